"""Profiles from observation only: times of passes, and the power of waiting."""

import pytest
from pipelines import one_f_one_b

from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Transfer
from perseus_ds.profiler.observed import UNREAD_CLOCK_MHZ, observed_profile

FORWARD_S, BACKWARD_S, TRANSFER_S = (0.1, 0.2, 0.3), (0.2, 0.4, 0.5), 0.01
BUSY_W, WAITING_W = 400.0, 100.0


def observed(micro_batches=4):
    """Return a timeline of 1F1B on three ranks, with transfers that include waiting."""
    dag = Dag.build(one_f_one_b(3, micro_batches))

    def duration_s(work):
        if isinstance(work, Transfer):
            return TRANSFER_S
        if not isinstance(work, Instruction):
            return 0.0
        return (FORWARD_S if work.kind is Kind.FORWARD else BACKWARD_S)[work.stage]

    durations_s = [duration_s(node.work) if not is_tail(node.work) else 0.05 for node in dag.nodes]
    ends_s = dag.finish_s(durations_s)
    ranks, free_s = [[], [], []], [0.0, 0.0, 0.0]
    for node, duration, end_s in zip(dag.nodes, durations_s, ends_s, strict=True):
        for rank in node.ranks:
            start_s = free_s[rank] if isinstance(node.work, Transfer) else end_s - duration
            ranks[rank].append(MeasuredOperation.of(node.work, float(start_s), float(end_s)))
            free_s[rank] = float(end_s)
    return MeasuredIteration(iteration=2, phase="observe", ranks=ranks)


def is_tail(work):
    return isinstance(work, Instruction) and work.kind is Kind.TAIL


def file_of(*iterations):
    return TimelineFile(simulated=True, gpu="A100", job=ProfileInfo(gpu="A100"), iterations=list(iterations))


def test_times_transfers_and_tails_are_those_of_the_iteration():
    profile = observed_profile(file_of(observed()), [], blocking_power_w=None)
    for stage in range(3):
        assert profile.at(stage, Kind.FORWARD, UNREAD_CLOCK_MHZ).time_s == pytest.approx(FORWARD_S[stage])
        assert profile.at(stage, Kind.BACKWARD, UNREAD_CLOCK_MHZ).time_s == pytest.approx(BACKWARD_S[stage])
    assert profile.info.tail_s == pytest.approx({0: 0.05, 1: 0.05, 2: 0.05})
    assert profile.info.fixed_durations.transfer_s["activation", 0, 1] == pytest.approx(TRANSFER_S)
    assert profile.info.rows[0].samples == 4
    assert profile.info.blocking_power_w is None


@pytest.mark.parametrize(("micro_batches", "error"), [(1, None), (2, pytest.approx(0.0, abs=1e-9))])
def test_the_error_of_a_time_is_known_from_two_passes_on(micro_batches, error):
    profile = observed_profile(file_of(observed(micro_batches)), [], blocking_power_w=None)
    for row in profile.info.rows:
        assert row.time_relative_error == error


def test_the_power_of_waiting_follows_from_ranks_that_wait_differently():
    iteration = observed()
    powers_w = [WAITING_W * waits + BUSY_W * (1 - waits) for waits in iteration.waits]
    for given in (None, WAITING_W):
        profile = observed_profile(file_of(iteration), powers_w, blocking_power_w=given)
        assert profile.info.blocking_power_w == pytest.approx(WAITING_W)
        row = profile.at_highest_clock(2, Kind.BACKWARD)
        assert row.energy_j == pytest.approx(BUSY_W * BACKWARD_S[2])


def test_ranks_that_wait_alike_do_not_tell_the_power_of_waiting():
    alike = [MeasuredOperation(kind="forward", stage=0, micro_batch=0, start_s=0.0, end_s=1.0)]
    other = [alike[0].model_copy(update={"stage": 1})]
    iteration = MeasuredIteration(iteration=2, phase="observe", ranks=[alike, other])
    profile = observed_profile(file_of(iteration), [300.0, 300.0], blocking_power_w=None)
    assert profile.info.blocking_power_w is None
