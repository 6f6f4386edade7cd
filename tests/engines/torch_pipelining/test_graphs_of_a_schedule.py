"""A torch schedule captured into a CUDA graph and replayed, as in torchtitan, in virtual time."""

import pytest
import run_log
import torch
from engines_on_virtual_cuda import cuda_of_engines, launched
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe
from virtual.job import SLOWER

import perseus_ds
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.protocol.job_messages import Report
from perseus_ds.protocol.layout import PAUSED

pytestmark = pytest.mark.usefixtures("process_group")
WIDTH, ROWS, MICRO_BATCHES = 8, 2, 3
FORWARD_S, TAIL_S = 0.1, 0.02


@pytest.fixture
def cuda(monkeypatch):
    return cuda_of_engines(monkeypatch)


class Layer(nn.Linear):
    def __init__(self, cuda):
        super().__init__(WIDTH, WIDTH)
        self.cuda = cuda

    def forward(self, inputs):
        return launched(super().forward(inputs), self.cuda, FORWARD_S)


class Trainer:
    """Trains with a schedule of one stage, first eagerly and then by graphs, and evaluates."""

    def __init__(self, cuda, warm_up=1):
        self.cuda, self.warm_up, self.graphs = cuda, warm_up, {}
        stage = PipelineStage(Layer(cuda), 0, 1, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def run(self, name):
        inputs = torch.ones(ROWS * MICRO_BATCHES, WIDTH)
        step = self.schedule.step if name == "train" else self.schedule.eval
        if self.warm_up:
            self.warm_up -= 1
            step(inputs, target=inputs)
            return
        if name not in self.graphs:
            self.graphs[name] = graph = self.cuda.CUDAGraph()
            with self.cuda.graph(graph):
                step(inputs, target=inputs)
        self.graphs[name].replay()

    def train(self, steps=1):
        for _ in range(steps):
            self.run("train")
            self.cuda.launch(TAIL_S)  # optimizer step


@pytest.fixture
def make(cuda, tmp_path):
    schedules = []

    def make(mode="auto", warm_up=1):
        trainer = Trainer(cuda, warm_up)
        schedules.append(trainer.schedule)
        block = {"mode": mode, "device": "simulated", "cache": False, "output_dir": str(tmp_path), **SLOWER}
        perseus_ds.attach(trainer.schedule, block)
        return trainer

    yield make
    for schedule in schedules:
        perseus_ds.detach(schedule)


def recorded(trainer, tmp_path):
    """End a job and return the phases of all iterations."""
    trainer.cuda.synchronize()
    perseus_ds.detach(trainer.schedule)
    return [each["phase"] for each in run_log.iterations(run_log.records(tmp_path))]


def memory_of(trainer):
    return trainer.schedule.perseus.runtime.clocks.memory


def test_replayed_steps_are_profiled_and_run_under_a_plan(make, cuda, tmp_path):
    trainer = make()
    steps = 0
    while trainer.schedule.perseus.phase != "run":
        trainer.train()
        steps += 1
        assert steps < 100
    trainer.train(20)
    profile = StageProfile.load(tmp_path)
    for kind, times in ((Kind.FORWARD, 1), (Kind.BACKWARD, 2)):
        row = profile.at_highest_clock(0, kind)
        assert row.time_s == pytest.approx(times * FORWARD_S * cuda.gpu.model.slowdown(row.clock_mhz), rel=0.02)
    assert max(clock_mhz for clock_mhz in cuda.gpu.clocks_set[-10:] if clock_mhz) < cuda.gpu.model.top_clock_mhz
    assert len(phases := recorded(trainer, tmp_path)) == steps + 20
    assert "run" in phases


def test_a_job_in_profile_mode_is_profiled_when_its_profile_is_written(make, tmp_path):
    trainer = make("profile")
    steps = 0
    while not trainer.schedule.perseus.profiled:
        trainer.train()
        steps += 1
        assert steps < 100
    assert steps > 1
    assert StageProfile.load(tmp_path).keys


def test_each_replay_marks_all_passes_and_is_an_iteration_of_its_own(make, cuda, tmp_path):
    trainer = make("observe")
    for number in range(1, 6):
        trainer.train()
        cuda.synchronize()
        memory = memory_of(trainer)
        assert memory.begun == number
        passes = [memory.marked_s(slot) is not None for slot in range(4 * MICRO_BATCHES)]
        assert passes == [number > 1] * (4 * MICRO_BATCHES), "only replayed steps make marks"
    assert recorded(trainer, tmp_path) == ["observe"] * 5


def test_replayed_evaluations_run_at_default_clocks_and_are_no_iterations(make, tmp_path):
    trainer = make("observe")
    trainer.train(2)
    for _ in range(2):
        trainer.run("evaluate")
        assert memory_of(trainer).idle_since_s == PAUSED
        assert memory_of(trainer).progress % 2 == 0, "the previous iteration has ended"
    trainer.train(2)
    assert recorded(trainer, tmp_path) == ["observe"] * 4


def test_a_schedule_is_captured_again_after_a_step_without_a_graph(make, cuda, tmp_path):
    trainer = make("observe")
    trainer.train(3)
    trainer.graphs.clear()
    trainer.warm_up = 1
    trainer.train(3)
    cuda.synchronize()
    assert memory_of(trainer).marked_s(0) is not None
    assert recorded(trainer, tmp_path) == ["observe"] * 6


def test_what_is_captured_before_any_step_trains_at_default_clocks_until_it_is_captured_again(make, tmp_path, caplog):
    trainer = make("observe", warm_up=0)
    trainer.train(3)
    assert [record.getMessage().count("at least one iteration before the capture") for record in caplog.records] == [1]
    assert trainer.schedule.perseus.phase == "start"
    trainer.graphs.clear()
    trainer.warm_up = 1
    trainer.train(3)
    assert recorded(trainer, tmp_path) == ["observe"] * 3


def test_graphs_of_parts_of_a_pass_change_nothing(make, cuda, tmp_path):
    trainer = make("observe", warm_up=6)
    part = cuda.CUDAGraph()

    def forward(layer, inputs):
        if not hasattr(layer, "is_captured"):
            layer.is_captured = True
            with cuda.graph(part):
                cuda.launch(FORWARD_S)
        part.replay()

    trainer.schedule._stage.submod.register_forward_pre_hook(forward)
    trainer.train(2)  # the second one is timed
    cuda.synchronize()
    spans = trainer.schedule.perseus.runtime.timers.finish_iteration().spans()
    kinds = [span.operation.instruction.kind for span in spans if isinstance(span.operation, Compute)]
    assert kinds == 3 * [Kind.FORWARD] + 3 * [Kind.BACKWARD]
    assert recorded(trainer, tmp_path) == ["observe"] * 2


class TokenStage(nn.Module):
    def __init__(self, cuda):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, WIDTH), Layer(cuda)

    def forward(self, ids):
        return self.layer(self.embedding(ids))


def test_tokens_are_counted_in_steps_and_in_replays(cuda, tmp_path, monkeypatch):
    stage = PipelineStage(TokenStage(cuda), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    perseus_ds.attach(schedule, {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path)})
    reports = []
    ids, target = torch.ones(MICRO_BATCHES * ROWS, 7, dtype=torch.long), torch.ones(MICRO_BATCHES * ROWS, 7, WIDTH)
    schedule.step(ids, target=target)
    clocks = schedule.perseus.runtime.clocks
    send = clocks.send
    monkeypatch.setattr(clocks, "send", lambda message: (reports.append(message), send(message)))
    schedule.step(ids[:, :5], target=target[:, :5])
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        schedule.step(ids, target=target)
    graph.replay()
    graph.replay()
    perseus_ds.detach(schedule)
    found = {message.iteration: message.tokens for message in reports if isinstance(message, Report)}
    rows = MICRO_BATCHES * ROWS
    assert found == {1: 7 * rows, 2: 5 * rows, 3: 7 * rows, 4: 7 * rows}
