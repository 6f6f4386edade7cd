"""Stages of a schedule wait for each other, or an error names what they lack."""

from dataclasses import replace

import pytest
from pipelines import EarlyRecomputation, GPipe, MergedTransfers, dual_pipe_v, interleaved, one_f_one_b
from torch.distributed.pipelining.schedules import get_schedule_class

from perseus_ds.engines.torch_pipelining.order import read_class
from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.dependencies import check_dependencies
from perseus_ds.pipeline.schedule import Exchange, Launch, Wait


def of_torch(name, stages_per_rank):
    return read_class(get_schedule_class(name), ranks=2, stages_per_rank=stages_per_rank, micro_batches=4)


SCHEDULES = {
    "1F1B": one_f_one_b(2, 3),
    "1F1B of four ranks": one_f_one_b(4, 6),
    "DualPipeV": dual_pipe_v(2, 5),
    "DualPipeV of three ranks": dual_pipe_v(3, 6),
    "GPipe": read_schedule(GPipe, ranks=3, micro_batches=3),
    "merged transfers": read_schedule(MergedTransfers, ranks=3, micro_batches=4),
    "early recomputation": read_schedule(EarlyRecomputation, ranks=3, micro_batches=4),
    "interleaved 1F1B": interleaved(2, 2, 4),
    "zero bubble": of_torch("InterleavedZeroBubble", 2),
    "zero bubble in a V": of_torch("ZBVZeroBubble", 2),
    "torch's DualPipeV": of_torch("DualPipeV", 2),
    "torch's 1F1B": of_torch("1F1B", 1),
}


def without(schedule, is_removed):
    """Return a schedule without some transfers."""

    def kept(operation):
        if isinstance(operation, Exchange | Launch):
            sends, receives = (
                tuple(t for t in own if not is_removed(t)) for own in (operation.sends, operation.receives)
            )
            return replace(operation, sends=sends, receives=receives)
        if isinstance(operation, Wait):
            return Wait(tuple(t for t in operation.transfers if not is_removed(t)))
        return operation

    return replace(schedule, ranks=tuple(tuple(map(kept, stream)) for stream in schedule.ranks))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_several_ranks_is_an_error_unless_it_names_its_transfers(name):
    schedule = SCHEDULES[name]
    check_dependencies(schedule)
    for removed in (("activation",), ("grad",), ("activation", "grad")):
        with pytest.raises(ScheduleError, match="on which it depends"):
            check_dependencies(without(schedule, lambda transfer, removed=removed: transfer.payload in removed))


@pytest.mark.parametrize("schedule", [one_f_one_b(1, 3), dual_pipe_v(1, 3)])
def test_stages_of_one_rank_need_no_transfers(schedule):
    assert not schedule.transfers
    check_dependencies(schedule)


def test_the_error_names_ranks_and_passes_and_what_is_expected():
    unsent = without(one_f_one_b(3, 2), lambda transfer: (transfer.source, transfer.target) == (1, 2))
    expected = (
        "the forward of micro-batch 0 on stage 2 on rank 2 can begin before the forward of micro-batch 0 on stage 1 on "
        "rank 1, on which it depends. Expected a transfer between these stages, which rank 1 sends after the one and "
        "rank 2 receives before the other. Let the schedule name all transfers"
    )
    with pytest.raises(ScheduleError, match=expected):
        check_dependencies(unsent)
