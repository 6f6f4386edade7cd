import sys
from collections import Counter

import pytest
from deepspeed.runtime.pipe.schedule import CommitP2P, DualPipeVSchedule, SendActivation, TrainSchedule
from pipelines import EarlyRecomputation, GPipe, MergedTransfers, dual_pipe_v, one_f_one_b

from perseus_ds.errors import ConfigError, ScheduleError
from perseus_ds.pipeline.commands import read_schedule, schedule_class, stages_per_rank
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Exchange


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (4, 8), (5, 2)])
def test_every_micro_batch_goes_forward_and_backward_once_on_every_stage(ranks, micro_batches):
    schedule = one_f_one_b(ranks, micro_batches)
    for rank, stream in enumerate(schedule.instructions):
        expected = {Instruction(rank, k, m) for k in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches)}
        assert set(stream) == expected | {Instruction(rank, Kind.TAIL, 0)}
        assert len(stream) == 2 * micro_batches + 1
        assert stream[-1].kind is Kind.TAIL
    assert schedule.num_stages == ranks


def test_dual_pipe_v_ranks_hold_two_stages():
    schedule = dual_pipe_v(2, 6)
    assert schedule.stages_of_ranks == [[0, 3], [1, 2]]
    assert schedule.num_stages == 4
    assert Counter(
        (i.stage, i.kind) for stream in schedule.instructions for i in stream if i.kind is not Kind.TAIL
    ) == {(stage, kind): 6 for stage in range(4) for kind in (Kind.FORWARD, Kind.BACKWARD)}


def test_merged_transfers_are_one_exchange_of_two():
    schedule = read_schedule(MergedTransfers, ranks=3, micro_batches=4)
    middle = [op for op in schedule.ranks[1] if isinstance(op, Exchange)]
    assert any(len(op.sends) == 1 and len(op.receives) == 1 for op in middle)
    assert schedule.instructions == one_f_one_b(3, 4).instructions


def test_recomputation_belongs_to_the_backward_that_follows():
    schedule = read_schedule(EarlyRecomputation, ranks=4, micro_batches=6)
    for rank, stream in enumerate(schedule.instructions):
        recomputed = [n for n, i in enumerate(stream) if i.kind is Kind.RECOMPUTE]
        assert len(recomputed) == 4 - 1 - rank
        for position in recomputed:
            here, following = stream[position], stream[position + 1]
            assert following == Instruction(rank, Kind.BACKWARD, here.micro_batch)


class WithoutCommit(GPipe):
    def steps(self):
        yield [CommitP2P(), SendActivation(0)]


@pytest.mark.parametrize(
    ("schedule_class", "ranks", "micro_batches", "message"),
    [
        (TrainSchedule, 0, 4, "at least 1 rank and 1 micro-batch, got 0 ranks"),
        (TrainSchedule, 2, 0, "at least 1 rank and 1 micro-batch, .* and 0 micro-batches"),
        (DualPipeVSchedule, 2, 3, "DualPipeVSchedule cannot schedule 3 micro-batches on 2 pipeline ranks"),
        (WithoutCommit, 2, 2, "WithoutCommit: rank 0 queues a transfer after its last CommitP2P: activation of micro-"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(schedule_class, ranks, micro_batches, message):
    with pytest.raises(ScheduleError, match=message):
        read_schedule(schedule_class, ranks=ranks, micro_batches=micro_batches)


def test_schedules_are_found_by_short_name_and_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_schedules.py").write_text(
        "from deepspeed.runtime.pipe.schedule import TrainSchedule\n"
        "class Mine(TrainSchedule): pass\n"
        "class Other: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert schedule_class("1f1b").__name__ == "TrainSchedule"
    assert stages_per_rank(schedule_class("dualpipev")) == 2
    assert stages_per_rank(schedule_class("my_schedules:Mine")) == 1
    with pytest.raises(ConfigError, match="not a PipeSchedule"):
        schedule_class("my_schedules:Other")
    sys.modules.pop("my_schedules")


@pytest.mark.parametrize("name", ["gpipe", "deepspeed.runtime.pipe.schedule:NoSuch"])
def test_an_unknown_schedule_says_what_to_write(name):
    with pytest.raises(ConfigError, match=r"not found .* Write 1f1b, dualpipev, or package.module:Class"):
        schedule_class(name)
