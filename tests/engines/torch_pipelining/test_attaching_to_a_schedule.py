"""Perseus attaches to a torch schedule and restores it.

A schedule that cannot be planned is an error, or trains at default clocks.
"""

import copy
import gc
import weakref
from collections import Counter
from enum import Enum
from pathlib import Path

import pytest
import run_log
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    ScheduleGPipe,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.optim.optimizer import _global_optimizer_post_hooks

import perseus_ds
from perseus_ds.client import operations
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.lease import Lease
from perseus_ds.client.meeting import Opened, Training, meet
from perseus_ds.config import parse_block
from perseus_ds.engines.engine import Session, SessionState
from perseus_ds.engines.torch_pipelining.engine import NEWEST_TORCH
from perseus_ds.errors import ConfigError, GpuError, ScheduleError, VersionError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

pytestmark = pytest.mark.usefixtures("process_group")
WIDTH, ROWS = 8, 2


@pytest.fixture
def block(tmp_path):
    """Observe on a simulated GPU with negligible instruction times."""
    simulated = {"longest_instruction_s": 0.001, "counter_period_s": 0.001}
    return {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path / "perseus"), "simulated": simulated}


@pytest.fixture
def everything_is_timed(monkeypatch):
    """In observe mode, a server requests no times."""
    monkeypatch.setattr(operations, "times_of", lambda follow, iteration: "all")


@pytest.fixture
def make():
    """A function that makes a schedule on one rank. Perseus is closed at the end of the test."""
    schedules = []

    def make(name="GPipe", micro_batches=2, stages=1, loss_fn=nn.functional.mse_loss, **arguments):
        torch.manual_seed(3)
        parts = [
            PipelineStage(nn.Linear(WIDTH, WIDTH), number, stages, torch.device("cpu"), **arguments)
            for number in range(stages)
        ]
        schedule = get_schedule_class(name)(parts if stages > 1 else parts[0], micro_batches, loss_fn=loss_fn)
        schedules.append(schedule)
        return schedule

    yield make
    for schedule in schedules:
        perseus_ds.detach(schedule)


def train(schedule, steps=1, micro_batches=2):
    for _ in range(steps):
        inputs = torch.ones(ROWS * micro_batches, WIDTH)
        schedule.step(inputs, target=inputs)


def iterations(block):
    return run_log.iterations(run_log.records(Path(block["output_dir"])))


def attributes(schedule):
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    return [dict(vars(thing)) for thing in (schedule, *stages)]


def test_detach_leaves_nothing_behind(make, block):
    schedule = make("InterleavedZeroBubble", stages=2)
    before = [set(found) for found in attributes(schedule)]
    assert perseus_ds.attach(schedule, block) is schedule
    train(schedule, steps=3)
    assert schedule.perseus.phase == "observe"
    assert perseus_ds.detach(schedule) is schedule
    assert [set(found) for found in attributes(schedule)] == before
    assert not _global_optimizer_post_hooks
    assert len(iterations(block)) == 3
    train(schedule)
    assert len(iterations(block)) == 3


def test_a_hook_that_somebody_put_in_front_of_ours_stays_and_works(make, block):
    schedule = make()
    calls = []
    perseus_ds.attach(schedule, block)
    session, ours = schedule.perseus, schedule.step

    def theirs(*args, **kwargs):
        calls.append(session.state is SessionState.TAIL)
        result = ours(*args, **kwargs)
        calls.append(session.state is SessionState.TAIL)
        return result

    schedule.step = theirs
    train(schedule)
    perseus_ds.detach(schedule)
    train(schedule)
    assert calls == [False, True, False, False], "the tail of an iteration follows its step while Perseus is attached"
    assert schedule.step is theirs


def test_the_loss_belongs_to_the_forward_of_the_last_stage_and_the_tail_lasts_until_the_next_step(
    make, block, everything_is_timed
):
    ended = []

    def loss(output, target):
        runtime = schedule.perseus.runtime
        ended.append(len(runtime.timers.finish_iteration().spans()))
        return nn.functional.mse_loss(output, target)

    schedule = make(loss_fn=loss)
    perseus_ds.attach(schedule, block)
    train(schedule)
    ended.clear()
    train(schedule)
    timers = schedule.perseus.runtime.timers
    assert ended == [0, 1]  # passes that have ended when the loss of each micro-batch is computed
    assert [str(span.operation) for span in timers.finish_iteration().spans()] == [
        "forward of micro-batch 0 on stage 0",
        "forward of micro-batch 1 on stage 0",
        "backward of micro-batch 0 on stage 0",
        "backward of micro-batch 1 on stage 0",
        "perform_reduce_grad 0 on stage 0",
    ]
    perseus_ds.detach(schedule)
    assert str(timers.finish_iteration().spans()[-1].operation) == "tail of stage 0"


def last_operation(schedule):
    return str(schedule.perseus.runtime.timers.finish_iteration().spans()[-1].operation)


def test_the_tail_ends_with_the_last_step_of_the_optimizers(make, block, everything_is_timed):
    schedule = make()
    perseus_ds.attach(schedule, block)
    optimizers = [torch.optim.SGD(schedule._stage.submod.parameters(), lr=0.0) for _ in range(2)]
    for iteration in range(3):
        train(schedule)
        for optimizer in optimizers:
            assert last_operation(schedule) != "tail of stage 0"
            optimizer.step()
        is_known = iteration > 0  # the first tail lasts until the next step
        assert (last_operation(schedule) == "tail of stage 0") == is_known
    optimizers[0].step()
    train(schedule)
    assert last_operation(schedule) != "tail of stage 0"
    perseus_ds.detach(schedule)
    assert len(iterations(block)) == 4


def test_a_first_step_that_is_skipped_does_not_lengthen_later_tails(make, block, everything_is_timed):
    """A gradient scaler skips steps of the optimizer, mostly the very first ones."""
    schedule = make()
    perseus_ds.attach(schedule, block)
    optimizer = torch.optim.SGD(schedule._stage.submod.parameters(), lr=0.0)
    train(schedule)
    train(schedule)
    optimizer.step()
    train(schedule)
    optimizer.step()
    assert last_operation(schedule) == "tail of stage 0"
    perseus_ds.detach(schedule)


@pytest.mark.parametrize("place", ["loss", "tail"])
def test_a_gpu_is_not_leased_again_after_a_close_within_an_iteration(make, block, monkeypatch, place):
    closes = []

    def loss(output, target):
        if closes and place == "loss":
            schedule.perseus.close()
        return nn.functional.mse_loss(output, target)

    schedule = make(loss_fn=loss)
    perseus_ds.attach(schedule, block)
    session = schedule.perseus
    train(schedule, steps=2)
    closes.append(None)
    train(schedule)
    session.close()
    monkeypatch.setattr(Lease, "_progress", lambda lease: closes.append("lease"))
    train(schedule)
    perseus_ds.detach(schedule)
    assert closes == [None]
    assert len(iterations(block)) == 2


def test_eval_is_no_iteration_and_runs_at_default_clocks(make, block, monkeypatch):
    schedule = make()
    perseus_ds.attach(schedule, block)
    train(schedule, steps=2)
    asked = []
    monkeypatch.setattr(AgentClocks, "pause", lambda clocks: asked.append(None))
    inputs = torch.ones(ROWS * 2, WIDTH)
    schedule.eval(inputs, target=inputs, losses=[])
    assert asked == [None]
    monkeypatch.undo()
    train(schedule)
    perseus_ds.detach(schedule)
    assert len(iterations(block)) == 3


def test_a_step_that_raises_raises_the_same_error_and_training_goes_on(make, block):
    broken = [False]

    def loss(output, target):
        if broken[0]:
            raise ZeroDivisionError("the user's own mistake")
        return nn.functional.mse_loss(output, target)

    schedule = make(loss_fn=loss)
    perseus_ds.attach(schedule, block)
    train(schedule, steps=2)
    broken[0] = True
    with pytest.raises(ZeroDivisionError, match="own mistake"):
        train(schedule)
    broken[0] = False
    train(schedule, steps=2)
    perseus_ds.detach(schedule)
    assert [r["iteration"] for r in iterations(block)] == [1, 2, 4, 5]  # the one that raised an error has no record


def test_orders_are_the_same_by_their_content(make, block, monkeypatch):
    seen, begin = [], Session.iteration
    monkeypatch.setattr(Session, "iteration", lambda self, order, *a: seen.append(order) or begin(self, order, *a))
    schedule = make("LoopedBFS", stages=2)
    perseus_ds.attach(schedule, block)
    train(schedule)
    schedule.pipeline_order_with_comms = copy.deepcopy(schedule.pipeline_order_with_comms)
    train(schedule)
    first, second, *others = schedule.pipeline_order_with_comms[0]
    schedule.pipeline_order_with_comms = {0: [second, first, *others]}
    train(schedule)
    assert seen[0] == seen[1] != seen[2]


def test_the_variable_perseus_replaces_keys_of_the_block_and_a_disabled_one_changes_nothing(make, block, monkeypatch):
    monkeypatch.setenv("PERSEUS", '{"enabled": false}')
    schedule = make()
    before = attributes(schedule)
    assert perseus_ds.attach(schedule, block) is schedule
    assert attributes(schedule) == before


class NoStage(nn.Linear):
    """An object that is not a stage."""

    stage_index, num_stages, group_size, group_rank = 0, 1, 1, 0


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda make: get_schedule_class("GPipe")(NoStage(1, 1), 2, loss_fn=abs), ConfigError, "has a NoStage as a st"),
        (lambda make: make(loss_fn=None), ScheduleError, "it has no loss_fn, so it trains nothing"),
    ],
)
def test_what_cannot_be_planned_is_an_error_before_training(make, block, bad, error, message):
    schedule = bad(make)
    with pytest.raises(error, match=message):
        perseus_ds.attach(schedule, block)
    assert "step" not in vars(schedule)


def test_a_torch_that_is_newer_than_those_that_were_tried_is_one_warning(make, block, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    perseus_ds.attach(make(), block)
    assert [record.getMessage() for record in caplog.records] == [
        f"perseus: torch 9.1.0 is newer than {NEWEST_TORCH}, the newest with tested schedules."
    ]


def test_an_older_torch_is_an_error_that_says_what_to_install(make, block, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.3.1+cpu")
    with pytest.raises(VersionError, match=r"torch 2\.3\.1\+cpu: .*torch>=2\.4.*pip install"):
        perseus_ds.attach(make(), block)


class OwnOrder(ScheduleGPipe):
    """A schedule that calls an unknown method of stages, so its order cannot be read."""

    def _step_microbatches(self, *args, **kwargs):
        self._stage.prepare()
        return super()._step_microbatches(*args, **kwargs)


@pytest.fixture
def of_unknown_order(make):
    stage = make()._stage
    stage.prepare = lambda: None
    return OwnOrder(stage, 2, loss_fn=nn.functional.mse_loss)


def test_a_job_whose_order_cannot_be_read_is_observed_with_one_warning(of_unknown_order, block, caplog):
    perseus_ds.attach(of_unknown_order, {**block, "mode": "auto"})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"not known, with torch {torch.__version__}" in warning
    assert "'prepare' of a stage, which perseus-ds does not know" in warning
    train(of_unknown_order, steps=4)
    perseus_ds.detach(of_unknown_order)
    observed = iterations(block)
    assert len(observed) == 4
    assert {record["phase"] for record in observed} <= {"calibrate", "observe"}
    assert all(record["time_s"] > 0 for record in observed)


@pytest.mark.parametrize("more", [{"mode": "auto", "required": True}, {"mode": "observe"}])
def test_an_order_that_cannot_be_read_is_an_error_if_the_job_asks_for_more(of_unknown_order, block, more):
    with pytest.raises(ScheduleError, match="'prepare' of a stage, which perseus-ds does not know"):
        perseus_ds.attach(of_unknown_order, {**block, **more})
    train(of_unknown_order)  # without Perseus


def run_pass(action, context):
    """Does the work of an action, as a user's function."""
    schedule, number = context.schedule_ref, action.microbatch_index
    stages = {stage.stage_index: stage for stage in schedule._stages}
    stage = stages[action.stage_index]
    before, after = (stages.get(stage.stage_index + step) for step in (-1, 1))
    if action.computation_type is FORWARD:
        output = stage.forward_one_chunk(number, context.arg_mbs[number], context.kwarg_mbs[number])
        schedule._maybe_compute_loss(stage, output, context.target_mbs, number)
        if after:
            after.set_local_fwd_input(output, number)
    else:
        schedule.backward_counter[stage.stage_index] += 1
        loss = schedule._maybe_get_loss(stage, number)
        stage.backward_one_chunk(number, loss=loss, full_backward=True, last_backward=False)
        if before:
            before.set_local_bwd_input(stage.get_local_bwd_output(number), number)


def run_both(action, context):
    for part in action.sub_actions:
        run_pass(part, context)


def test_functions_that_the_user_registers_are_passes_of_their_kind(make, block, everything_is_timed):
    losses = []
    for registers in ("never", "before", "after"):
        schedule = make("DualPipeV", micro_batches=4, stages=2)
        if registers == "before":
            schedule.register_custom_function(OVERLAP_F_B, run_both)
        if registers != "never":
            perseus_ds.attach(schedule, block)
        if registers == "after":
            schedule.register_custom_function(OVERLAP_F_B, run_both)
        losses.append([])
        for _ in range(2):
            schedule.step(torch.ones(8, WIDTH), target=torch.ones(8, WIDTH), losses=losses[-1])
        if registers != "never":
            spans = schedule.perseus.runtime.timers.finish_iteration().spans()
            kinds = Counter(s.operation.instruction.kind for s in spans if isinstance(s.operation, Compute))
            assert kinds[Kind.FORWARD_BACKWARD] == 5
            planned = Counter(i.kind for i in schedule.perseus.engine.read().instructions[0])
            assert kinds | {Kind.TAIL: 1} == planned
            perseus_ds.detach(schedule)
            assert schedule._comp_type_to_function_map == {OVERLAP_F_B: run_both}
    assert losses[1:] == losses[:1] * 2


def test_iterations_that_accumulate_gradients_are_one_training_step_and_a_checkpoint_sets_its_number(make, block):
    schedule = make()
    optimizer = torch.optim.SGD(schedule._stage.submod.parameters(), lr=0.0)
    perseus_ds.attach(schedule, block)
    schedule.perseus.set_steps(100)  # a checkpoint was loaded
    for _ in range(3):
        train(schedule, steps=2)
        optimizer.step()
    train(schedule)
    schedule.perseus.set_steps(50)  # an earlier one was loaded
    train(schedule)
    perseus_ds.detach(schedule)
    assert [record["iteration"] for record in iterations(block)] == [101, 101, 102, 102, 103, 103, 104, 51]


def attached(block, number):
    """Return a schedule that nothing else keeps, with Perseus."""
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    return perseus_ds.attach(schedule, {**block, "output_dir": f"{block['output_dir']}{number}"})


def test_a_schedule_that_is_dropped_is_freed_and_the_next_one_is_planned(block):
    first = attached(block, 1)
    train(first, steps=2)
    model, runtime = weakref.ref(first._stage.submod), first.perseus.runtime
    del first
    second = attached(block, 2)
    train(second, steps=2)  # frees the first
    assert model() is None
    assert runtime._closed
    assert second.perseus.runtime is not None
    assert len(_global_optimizer_post_hooks) == 1
    perseus_ds.detach(second)


@pytest.mark.parametrize("end", ["detached", "closed", "dropped"])
def test_a_second_schedule_is_planned_once_the_first_no_longer_trains(block, caplog, end):
    first, second = attached(block, 1), attached(block, 2)
    for _ in range(3):
        train(first)
        train(second)
    assert second.perseus.runtime is None
    assert caplog.text.count("trains two engines") == 1
    if end == "detached":
        perseus_ds.detach(first)
    elif end == "closed":  # as DeepSpeed's destroy() does
        first.perseus.close()
    del first
    iterations = 0
    while second.perseus.runtime is None and iterations < 10:
        train(second)
        iterations += 1
    # Garbage is collected after 1, 2, 4, 8 … iterations of waiting, on all ranks alike.
    assert iterations == (2 if end == "dropped" else 1)
    perseus_ds.detach(second)


def test_an_engine_that_waits_does_not_find_at_another_iteration_than_other_ranks_that_the_first_was_freed(block):
    """Garbage may be collected on one rank only."""
    first, second = attached(block, 1), attached(block, 2)
    train(first)
    train(second, steps=3)
    session = weakref.ref(first.perseus)
    del first
    gc.collect()
    assert session() is None
    train(second)
    assert second.perseus.runtime is None
    perseus_ds.detach(second)


def test_a_schedule_that_other_ranks_have_dropped_is_an_error_of_theirs_without_a_wait(make, block, monkeypatch):
    first, second = make(), make()
    for schedule in (first, second):
        perseus_ds.attach(schedule, block)
    train(first)
    dist.distributed_c10d._get_default_store().add("perseus/started/of/1", 1)  # as if rank 1 had started it, too
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    train(second)  # as rank 1, on which the first one is still there
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    engine = second.perseus.engine
    training = Training(facts=engine.facts, device=engine.device, read=engine.read)
    with pytest.raises(GpuError, match="rank 1 still trains a Linear with Perseus"):
        meet(parse_block(block), training, Opened())


class NewAction(str, Enum):
    """The type of actions that torch 2.13 does not have."""

    FULL_FORWARD_BACKWARD = "FULL_FORWARD_BACKWARD"


def test_a_function_that_runs_a_whole_micro_batch_is_one_pass(make, block, everything_is_timed):
    def run_micro_batch(action, context):
        for kind in (FORWARD, FULL_BACKWARD):
            run_pass(action._replace(computation_type=kind), context)

    schedule = _PipelineScheduleRuntime([make()._stage], 2, loss_fn=nn.functional.mse_loss)
    whole = NewAction.FULL_FORWARD_BACKWARD
    schedule.pipeline_order_with_comms = {0: [_Action(0, whole, number) for number in range(2)]}
    schedule._comp_type_to_function_map[whole] = run_micro_batch
    perseus_ds.attach(schedule, block)
    train(schedule)
    spans = schedule.perseus.runtime.timers.finish_iteration().spans()
    passes = [Instruction(0, Kind.FORWARD_BACKWARD, number) for number in range(2)]
    assert [span.operation.instruction for span in spans] == passes
    assert schedule.perseus.engine.read().instructions[0] == (*passes, Instruction(0, Kind.TAIL, 0))
    perseus_ds.detach(schedule)


def test_a_wrong_block_and_groups_of_an_engine_are_errors(make, block):
    with pytest.raises(ConfigError, match="mode"):
        perseus_ds.attach(make(), {**block, "mode": "fast"})
    with pytest.raises(ConfigError, match="knows its own ranks"):
        perseus_ds.attach(object(), block, pipeline=[0])
