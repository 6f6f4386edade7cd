"""Errors of Perseus itself, which must not reach the training that it surrounds."""

import gc
import logging
import weakref

import pytest
import torch
from engines_on_virtual_cuda import cuda_of_engines
from one_rank_engine import batches, config, module, one_rank
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe

import perseus_ds
from perseus_ds.client import operations
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.operations import OperationHooks
from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.client.timers import Execution
from perseus_ds.engines.deepspeed.engine import DeepSpeedEngine
from perseus_ds.engines.engine import Session
from perseus_ds.engines.hooks import Hooks
from perseus_ds.engines.torch_pipelining.engine import TorchSchedule
from perseus_ds.pipeline.commands import RepeatedReader


class MistakeError(Exception):
    """An error that nobody expects."""


class Work:
    """An object with a method, whose calls are counted."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def run(self, value):
        self.calls += 1
        if self.error:
            raise self.error
        return 2 * value


def before(method, value):
    raise MistakeError


def behind(method, value):
    method(value)
    raise MistakeError


def within(method, value):
    try:
        return method(value)
    finally:
        raise MistakeError


def around(method, value):
    return method(value)


@pytest.mark.parametrize(("by", "mistakes"), [(before, 1), (behind, 1), (within, 1), (around, 0)])
def test_a_method_runs_once_and_returns_its_result_also_after_a_mistake_of_ours(by, mistakes):
    found, work = [], Work()
    Hooks(found.append).surround(work, "run", by)
    assert work.run(4) == 8
    assert work.calls == 1
    assert [type(error) for error in found] == [MistakeError] * mistakes


@pytest.mark.parametrize("error", [ValueError("of the user"), StopIteration(), KeyboardInterrupt()])
@pytest.mark.parametrize(("by", "mistakes"), [(behind, 0), (within, 1), (around, 0)])
def test_an_error_of_the_user_passes_unchanged_also_after_a_mistake_of_ours(by, mistakes, error):
    error.__cause__ = cause = OSError()
    found, work = [], Work(error)
    Hooks(found.append).surround(work, "run", by)
    with pytest.raises(type(error)) as raised:
        work.run(4)
    assert raised.value is error
    assert error.__cause__ is cause
    assert work.calls == 1
    assert [type(each) for each in found] == [MistakeError] * mistakes


def test_what_the_receiver_of_mistakes_raises_is_raised():
    work = Work()
    Hooks().surround(work, "run", before)
    with pytest.raises(MistakeError):
        work.run(4)
    assert work.calls == 0


def test_inputs_are_freed_after_an_error_of_the_user_without_a_collection_of_garbage():
    """A user may try a smaller batch after one that does not fit into memory."""
    work, inputs = Work(MemoryError()), Work()
    Hooks([].append).surround(work, "run", around)
    freed = weakref.ref(inputs)
    gc.disable()
    try:
        try:
            work.run(inputs)
        except MemoryError:
            work.error = None
        del inputs
        assert freed() is None
    finally:
        gc.enable()


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in for CUDA, on which everything is timed."""
    monkeypatch.setattr(operations, "times_of", lambda follow, iteration: "all")
    return cuda_of_engines(monkeypatch)


@pytest.fixture
def mistake_in(monkeypatch):
    """A function that replaces a function of Perseus by one that raises an error when it is called."""

    def mistake_in(owner, name):
        def raises(*_, **__):
            raise MistakeError(name)

        monkeypatch.setattr(owner, name, raises)

    return mistake_in


def check_that_it_stepped_aside(session, caplog, losses, expected):
    """Check that training went on as without Perseus, and that the mistake is reported once."""
    assert losses == expected
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "error in Perseus itself" in record.getMessage()
    assert record.exc_info[0] is MistakeError
    assert session.runtime._closed
    assert session.runtime.clocks._link.actor.is_reset


COMMON = [
    (Session, "iteration"),
    (PerseusRuntime, "iteration"),
    (PerseusRuntime, "operation"),
    (PerseusRuntime, "_receive"),
    (PerseusRuntime, "_send"),
    (OperationHooks, "__enter__"),
    (OperationHooks, "__exit__"),
    (Execution, "finish_iteration"),
    (AgentClocks, "begin_iteration"),
    (AgentClocks, "end_iteration"),
]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("owner", "name"),
    [*COMMON, (Session, "begin_tail"), (TorchSchedule, "_order_digest"), (TorchSchedule, "_count_optimizer_step")],
)
def test_a_schedule_of_torch_trains_on(mistake_in, owner, name, caplog, cuda, tmp_path):
    def train(attaches):
        torch.manual_seed(3)
        stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
        schedule, losses = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss), []
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
        if attaches:
            perseus_ds.attach(schedule, {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path)})
            session = schedule.perseus
        for step in range(4):
            if attaches and step == 2:
                mistake_in(owner, name)
            schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=losses)
            optimizer.step()
            cuda.synchronize()
        if attaches:
            assert not hasattr(schedule, "perseus")
            return losses, session
        return losses

    expected = train(attaches=False)
    losses, session = train(attaches=True)
    check_that_it_stepped_aside(session, caplog, losses, expected)


@pytest.fixture(scope="module")
def _deepspeed(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@pytest.mark.usefixtures("_deepspeed")
@pytest.mark.parametrize(
    ("owner", "name"), [*COMMON, (Session, "end_iteration"), (RepeatedReader, "read"), (DeepSpeedEngine, "_trains_by")]
)
def test_an_engine_of_deepspeed_trains_on(mistake_in, owner, name, caplog, cuda, tmp_path):
    def train(attaches):
        torch.manual_seed(3)
        block = {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path), "enabled": attaches}
        model = module()
        engine, *_ = perseus_ds.initialize(
            model=model, model_parameters=list(model.parameters()), config=config(perseus=block)
        )
        session, data, losses = getattr(engine, "perseus", None), batches(), []
        for step in range(4):
            if attaches and step == 2:
                mistake_in(owner, name)
            losses.append(engine.train_batch(data).item())
            cuda.synchronize()
        assert not hasattr(engine, "perseus")
        return losses, session

    expected, _ = train(attaches=False)
    losses, session = train(attaches=True)
    check_that_it_stepped_aside(session, caplog, losses, expected)
