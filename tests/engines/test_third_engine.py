"""A third engine needs only the engine interface. See docs/developers/add-an-engine.md."""

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_log
import torch
import torch.distributed as dist

from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.config import parse_block
from perseus_ds.engines.engine import Engine, attach_to, fingerprint
from perseus_ds.errors import ConfigError, GpuError, PerseusError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Schedule
from perseus_ds.protocol.job_messages import RankFacts

pytestmark = pytest.mark.usefixtures("process_group")
WIDTH = 8


class Trainer:
    """A training loop of one stage, with hooks around passes and iterations."""

    def __init__(self, micro_batches=2):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.micro_batches = micro_batches
        self.around = lambda kind, micro_batch, work: work()
        self.around_step = lambda step: step()

    def step(self):
        return self.around_step(self._step)

    def _step(self):
        total = 0.0
        for number in range(self.micro_batches):
            inputs = torch.full((4, WIDTH), float(number))
            loss = self.around("forward", number, lambda inputs=inputs: self.model(inputs).square().mean())
            self.around("backward", number, loss.backward)
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class TrainerEngine(Engine):
    """Reports the passes and iterations of a Trainer."""

    model = "Linear"

    def __init__(self, trainer):
        self.trainer = trainer

    def facts(self):
        return RankFacts(pipeline=(0,), copies=(0,))

    def device(self):
        return torch.device("cpu")

    def read(self):
        passes = [(kind, number) for number in range(self.trainer.micro_batches) for kind in ("forward", "backward")]
        stream = (*passes, ("tail", 0))
        operations = tuple(Compute(Instruction(0, Kind(kind), number)) for kind, number in stream)
        return Schedule("tests:Trainer", self.trainer.micro_batches, (operations,))

    def surround(self, session):
        self.session = session
        self.kept = dict(vars(self.trainer))
        self.trainer.around, self.trainer.around_step = self.around, self.around_step

    def release(self):
        vars(self.trainer).update({name: self.kept[name] for name in ("around", "around_step")})

    def around(self, kind, micro_batch, work):
        with self.session.operation(Compute(Instruction(0, Kind(kind), micro_batch))):
            return work()

    def around_step(self, step):
        with self.session.iteration(self.trainer.micro_batches):
            result = step()
            self.session.begin_tail(stage=0)
        return result


def train(trainer, steps):
    return [trainer.step() for _ in range(steps)]


def test_the_page_about_engines_shows_this_engine():
    page = Path(__file__).parents[2] / "docs/developers/add-an-engine.md"
    assert inspect.getsource(TrainerEngine).strip() in page.read_text()


def test_an_engine_of_a_few_methods_trains_in_auto_mode_and_is_left_as_it_was(tmp_path):
    simulated = {"longest_instruction_s": 0.004, "counter_period_s": 0.002, "lock_latency_s": 0.0005}
    profile = {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8}
    block = {"device": "simulated", "simulated": simulated, "profile": profile, "cache": False}
    trainer = Trainer()
    before = set(vars(trainer)), trainer.around
    session = attach_to(lambda: TrainerEngine(trainer), parse_block({**block, "output_dir": str(tmp_path)}))
    losses = train(trainer, 1)
    while session.phase != "run":
        losses += train(trainer, 1)
    losses += train(trainer, 2)
    trainer.micro_batches = 3
    losses += train(trainer, 2)
    assert session.phase == "observe"
    session.detach()
    assert (set(vars(trainer)), trainer.around) == before
    plain = Trainer()
    expected = train(plain, len(losses) - 2)
    plain.micro_batches = 3
    assert losses == expected + train(plain, 2)
    assert [r["iteration"] for r in run_log.iterations(run_log.records(tmp_path))] == list(range(1, len(losses) + 1))


def test_a_model_with_other_times_has_another_fingerprint():
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 3), torch.nn.Linear(2, 2).half(), frozen]
    same, again, *others = (fingerprint([model], "settings") for model in models)
    assert same == again
    assert len({same, *others, fingerprint([models[0]], "others")}) == 5


def test_ranks_with_other_versions_are_an_error_of_all_before_training(tmp_path, monkeypatch, ranks):
    config = parse_block({"mode": "observe", "device": "simulated", "output_dir": str(tmp_path)})
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"0.0.{dist.get_rank()}")
    expected = r"ranks differ: torch is 0\.0\.1 on rank 1, 0\.0\.0 on rank 0\. .* install the same versions"
    for error in ranks(2, lambda: attach_to(lambda: TrainerEngine(Trainer()), config)):
        assert isinstance(error, ConfigError)
        assert re.search(expected, str(error))


def test_an_engine_that_cannot_describe_itself_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    def facts(engine):
        raise KeyError("no such group")

    monkeypatch.setattr(TrainerEngine, "facts", facts)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    trainer = Trainer()
    block = {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path)}
    session = attach_to(lambda: TrainerEngine(trainer), parse_block(block))
    with pytest.raises(PerseusError, match=r"rank 0: KeyError\('no such group'\)"):
        train(trainer, 1)
    session.detach()


def test_a_package_that_is_not_installed_but_in_pythons_path_trains_too(tmp_path, monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    block = {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path)}
    trainer = Trainer()
    session = attach_to(lambda: TrainerEngine(trainer), parse_block(block))
    train(trainer, 2)
    session.detach()
    assert len(run_log.iterations(run_log.records(tmp_path))) == 2


def test_a_gpu_that_cannot_be_used_ends_no_job_unless_it_is_required(tmp_path, monkeypatch, caplog):
    def start(*_):
        raise GpuError("GPU 1 fell off the bus")

    monkeypatch.setattr(PerseusRuntime, "start", start)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    block = {"device": "simulated", "output_dir": str(tmp_path)}
    trainer = Trainer()
    attach_to(lambda: TrainerEngine(trainer), parse_block(block))
    assert train(trainer, 2) == train(Trainer(), 2)
    expected = "perseus: GPU 1 fell off the bus. Training continues without Perseus."
    assert [record.getMessage() for record in caplog.records] == [expected]
    required = Trainer()
    session = attach_to(lambda: TrainerEngine(required), parse_block({**block, "required": True}))
    with pytest.raises(GpuError, match="fell off the bus"):
        train(required, 1)
    session.detach()


ENDS_WITHOUT_DETACH = """
import multiprocessing, sys, torch.distributed as dist
from test_third_engine import Trainer, TrainerEngine, attach_to, parse_block, train
folder, process = sys.argv[1:]

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer()
    block = {"mode": "observe", "device": "simulated", "output_dir": folder}
    attach_to(lambda: TrainerEngine(trainer), parse_block(block))
    train(trainer, 3)
    dist.destroy_process_group()

if process == "script":
    main()
else:
    forked = multiprocessing.get_context("fork").Process(target=main)
    forked.start()
    forked.join()
"""


@pytest.mark.parametrize("process", ["script", "forked"])
def test_the_last_iteration_of_a_process_that_does_not_detach_is_recorded(tmp_path, process):
    command = [sys.executable, "-c", ENDS_WITHOUT_DETACH, str(tmp_path), process]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run(command, env=environment, check=True, timeout=run_log.JOB_GIVE_UP_S)
    assert [r["iteration"] for r in run_log.iterations(run_log.records(tmp_path))] == [1, 2, 3]
