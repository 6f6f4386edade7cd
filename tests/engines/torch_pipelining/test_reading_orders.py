"""The order executed by a torch schedule, read for every rank without processes."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from pipelines import STAGES_PER_RANK, of_torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
from virtual.job import predicted_over_used

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, StageProfile
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.cli.inputs import schedule_for
from perseus_ds.engines.torch_pipelining.order import _Stage, await_receives, read_class, read_order
from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.dependencies import check_dependencies
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Other, Wait

SHAPES = [(1, 4), (2, 4), (4, 8)]


@pytest.mark.parametrize("name", STAGES_PER_RANK)
@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_each_stage_computes_each_micro_batch_once_on_one_rank_and_nothing_deadlocks(name, ranks, micro_batches):
    schedule = of_torch(name, ranks, micro_batches)
    rank_of = {i.stage: rank for rank, stream in enumerate(schedule.instructions) for i in stream}
    counts = Counter(i for stream in schedule.instructions for i in stream)
    assert set(counts.values()) == {1}
    assert schedule.num_stages == ranks * STAGES_PER_RANK[name] == len(rank_of)
    for rank, stream in enumerate(schedule.instructions):
        assert {rank_of[i.stage] for i in stream} == {rank}
        assert [i.kind for i in stream].index(Kind.TAIL) == len(stream) - 1
    for stage in rank_of:
        kinds = Counter(i.kind for i in counts if i.stage == stage)
        assert kinds[Kind.FORWARD] == micro_batches
        # The first stage's input needs no gradient, so torch computes everything in the second part.
        assert kinds[Kind.BACKWARD_INPUT] == (kinds[Kind.BACKWARD_WEIGHT] if stage > 0 else 0)
        assert kinds[Kind.BACKWARD] + kinds[Kind.BACKWARD_WEIGHT] == micro_batches
    check_dependencies(schedule)
    assert sum(len(nodes) for nodes in Dag.build(schedule).compute_nodes) == sum(counts.values())
    assert ScheduleStreams.model_validate_json(ScheduleStreams.of(schedule).model_dump_json()).to_schedule() == schedule


WAITS_ARE_ACTIONS = hasattr(schedules, "WAIT_SEND_F")
"""Whether a schedule contains waits for sends, as since torch 2.15."""
LIMITS = (None, 1, 3) if WAITS_ARE_ACTIONS else (None,)
"""Maximum number of outstanding sends of a rank; None for no limit."""
SEVERAL = [name for name, stages in STAGES_PER_RANK.items() if stages == 2]


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_the_order_is_that_of_the_schedule_itself_with_its_communication(name, ranks, micro_batches, limit):
    executed = read_order(multi_stage(name, 0, ranks, micro_batches, limit))
    for rank, stream in enumerate(executed.ranks):
        theirs = list(written_by_torch(multi_stage(name, rank, ranks, micro_batches, limit), rank))
        assert list(written(stream)) == theirs
        if limit is not None:
            assert most_outstanding(stream) <= limit
    check_dependencies(executed)


def multi_stage(name, rank, ranks, micro_batches, limit=None):
    of_rank = {"submod": None, "num_stages": 2 * ranks, "group_size": ranks, "group_rank": rank}
    stages = [SimpleNamespace(stage_index=rank + ranks * number, **of_rank) for number in range(2)]
    options = {} if limit is None else {"max_outstanding_sends": limit}
    return get_schedule_class(name)(stages, micro_batches, loss_fn=abs, **options)


def most_outstanding(stream):
    """Return the largest number of sends that a rank has launched and not waited for."""
    sends, most = set(), 0
    for operation in stream:
        if isinstance(operation, Launch | Exchange):
            sends.update(operation.sends)
            most = max(most, len(sends))
        if isinstance(operation, Wait | Exchange):
            sends.difference_update(operation.transfers)
    assert not sends
    return most


LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


def written(stream):
    """Return a rank's launched and computed operations and awaited sends in torch's notation."""
    launched = set()
    for operation in stream:
        if isinstance(operation, Compute) and operation.instruction.kind is not Kind.TAIL:
            i = operation.instruction
            yield f"{i.stage}{LETTERS[i.kind]}{i.micro_batch}"
        if isinstance(operation, Launch | Exchange):
            launched.update(operation.sends)
            for transfer in operation.transfers:
                letter = "F" if transfer.payload == "activation" else "B"
                if transfer in operation.sends:
                    yield f"{transfer.source}SEND_{letter}{transfer.micro_batch}"
                else:
                    yield f"{transfer.target}RECV_{letter}{transfer.micro_batch}"
        if isinstance(operation, Wait | Exchange) and WAITS_ARE_ACTIONS:
            for transfer in operation.transfers:
                if transfer in launched:
                    letter = "F" if transfer.payload == "activation" else "B"
                    yield f"{transfer.source}WAIT_SEND_{letter}{transfer.micro_batch}"


def written_by_torch(schedule, rank):
    for action in schedule.pipeline_order_with_comms[rank]:
        for part in action.sub_actions or (action,):
            name = part.computation_type.name
            computes_nothing = name == "BACKWARD_INPUT" and part.stage_index == 0
            if not computes_nothing and name not in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"):
                yield str(part)


PREDICTED = [(name, None) for name in STAGES_PER_RANK] + [
    (name, n) for name in SEVERAL for n in LIMITS if n is not None
]


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        pytest.param(*case, marks=() if case in (("1F1B", None), ("ZBVZeroBubble", 1)) else pytest.mark.extended)
        for case in PREDICTED
    ],
)
def test_a_profile_predicts_what_plans_of_the_order_take(tmp_path, name, limit):
    order = of_torch(name, 2, 4) if STAGES_PER_RANK[name] == 1 else read_order(multi_stage(name, 0, 2, 4, limit))
    stages_s = [0.02 + 0.004 * stage for stage in range(order.num_stages)]
    time, energy = predicted_over_used(tmp_path, order, stages_s)
    assert abs(time) < 0.005
    assert abs(energy) < 0.005


def test_1f1b_waits_for_what_it_sends_before_the_next_pass_and_gpipe_only_when_all_forwards_are_done():
    first = of_torch("1F1B", 2, 3).ranks[0]
    assert [type(operation) for operation in first[:5]] == [Compute, Launch, Compute, Wait, Exchange]
    first = of_torch("GPipe", 2, 3).ranks[0]
    assert [type(operation) for operation in first[:7]] == [Compute, Launch] * 3 + [Wait]
    assert len(first[6].transfers) == 3


def sharded(make):
    """Return a schedule of stages sharded by FSDP, as on their own rank."""

    class Sharded(schedules.FSDPModule, torch.nn.Module):
        def __new__(cls):
            return torch.nn.Module.__new__(cls)

    def made(stages, micro_batches, loss_fn):
        for stage in stages:
            stage.submod = Sharded()
        return make(stages, micro_batches, loss_fn=loss_fn)

    return made


def test_gradients_that_fsdp_reduces_are_measured_by_themselves_however_torch_spells_it(tmp_path):
    order = read_class(sharded(get_schedule_class("Interleaved1F1B")), ranks=1, stages_per_rank=2, micro_batches=4)
    commands = [operation.command for operation in order.ranks[0] if isinstance(operation, Other)]
    of_stage = ["perform_reduce_grad"]
    if WAITS_ARE_ACTIONS:
        of_stage = ["start_gradient_reduction", "wait_for_gradient_reduction"]
    assert commands == 2 * of_stage
    time, energy = predicted_over_used(tmp_path, order, (0.02, 0.012), other_s=0.004)
    assert abs(time) < 0.01
    assert abs(energy) < 0.01


class StepsAsItLikes(PipelineScheduleSingle):
    """A user's schedule without a readable order."""

    def _step_microbatches(self, arg_mbs=None, *_, **__):
        for micro_batch, arguments in enumerate(arg_mbs):
            self._stage.some_other_call(micro_batch, *arguments)


@pytest.mark.parametrize(
    ("schedule_class", "stages_per_rank", "micro_batches", "message"),
    [
        (get_schedule_class("1F1B"), 1, 2, r"Number of microbatches \(2\) must be greater"),
        (get_schedule_class("1F1B"), 2, 8, "it has one stage on each rank"),
        (get_schedule_class("DualPipeV"), 1, 8, "requires exactly 2 stages per rank"),
        (get_schedule_class("ZBVZeroBubble"), 2, 0, "expected at least 1 of each"),
        (StepsAsItLikes, 1, 4, r"The order of .*StepsAsItLikes is not known, with torch \d.*some_other_call"),
        (PipelineScheduleMulti, 2, 4, "The order of .*PipelineScheduleMulti is not known"),
    ],
)
def test_an_order_that_cannot_be_read_is_an_error_that_says_why(
    schedule_class, stages_per_rank, micro_batches, message
):
    with pytest.raises(ScheduleError, match=message):
        read_class(schedule_class, ranks=4, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


def test_commands_read_the_order_that_a_profile_was_measured_with():
    measured = of_torch("ZBVZeroBubble", 2, 4)
    info = ProfileInfo(schedule=measured.name, stages=4, pipeline_ranks=2, micro_batches=4)
    rows = [Measurement(stage, Kind.FORWARD, 1410, 1.0, 1.0) for stage in range(4)]
    profile = StageProfile(rows, info)
    assert schedule_for(profile, schedule=None, stages=None, micro_batches=None) == measured
    assert schedule_for(profile, schedule=None, stages=None, micro_batches=8) == of_torch("ZBVZeroBubble", 2, 8)


def test_a_custom_function_does_not_wait_again_for_a_receive():
    waits = []
    kept = {(1, 0): [SimpleNamespace(wait=lambda: waits.append("waited"))]}
    schedule = SimpleNamespace(fwd_recv_ops={}, bwd_recv_ops=kept)
    action = SimpleNamespace(
        sub_actions=None, computation_type=SimpleNamespace(name="BACKWARD_INPUT"), stage_index=1, microbatch_index=0
    )
    await_receives(schedule, action)
    for work in schedule.bwd_recv_ops.pop((1, 0)):
        work.wait()
    assert waits == ["waited"]


def test_a_custom_backward_of_the_first_stage_is_a_pass():
    rank_of_stage = {0: 0, 1: 1, 2: 0, 3: 1}
    stages = [_Stage(stage, rank_of_stage, []) for stage in (0, 2)]
    schedule = schedules.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=lambda *_: None)
    schedule.register_custom_function(schedules.BACKWARD_INPUT, lambda action, context: None)
    assert Compute(Instruction(0, Kind.BACKWARD_INPUT, 0)) in read_order(schedule).ranks[0]
