"""Correction of a profile from which parts of measured iterations differ."""

import pytest

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, StageProfile, TransferDuration
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Transfer
from perseus_ds.pipeline.span import Span
from perseus_ds.server.prediction import PartTimes, difference

TIME_S = 10.0
CLOCKS = {1000: (1.4, 200.0), 1400: (1.0, 300.0)}
TRANSFERS = [
    TransferDuration(payload=payload, source=source, target=target, time_s=0.1)
    for payload, source, target in (("activation", 0, 1), ("grad", 1, 0))
]


def profile():
    rows = [
        Measurement(stage, kind, clock, (1 + stage) * time_s, (1 + stage) * energy_j)
        for stage in (0, 1)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for clock, (time_s, energy_j) in CLOCKS.items()
    ]
    info = ProfileInfo(blocking_power_w=80.0, micro_batches=4, transfers=TRANSFERS, tail_s={0: 0.5, 1: 0.5})
    return StageProfile(rows, info)


def part_times(backward_s=2.0, transfer_s=0.1, tail_s=0.5):
    """Return the times of two ranks, of which the first waits for the second in its transfer and its tail."""

    def spans(stage, back_s, waits_s):
        times = {Kind.FORWARD: 1.0 + stage, Kind.BACKWARD: back_s, Kind.TAIL: tail_s + waits_s}
        side = {"sends" if stage == 0 else "receives": (Transfer("activation", 0, 1, 0),)}
        spans, end_s = [Span(Exchange(**side), 0.0, transfer_s + waits_s)], transfer_s + waits_s
        for kind, time_s in times.items():
            spans.append(Span(Compute(Instruction(stage, kind, 0)), end_s, end_s + time_s))
            end_s += time_s
        return spans

    return PartTimes.of([[spans(0, 1.0, 0.3)] * 4, [spans(1, backward_s, 0.0)] * 4])


BEFORE = part_times().instructions


def test_an_instruction_that_has_become_longer_is_corrected_at_all_clocks_at_the_same_power():
    factors, corrected = difference(profile(), part_times(backward_s=2.4), BEFORE, TIME_S)
    assert factors == {"backward of stage 1": pytest.approx(1.2)}
    for clock, (time_s, energy_j) in CLOCKS.items():
        row = corrected.at(1, Kind.BACKWARD, clock)
        assert (row.time_s, row.energy_j) == pytest.approx((2.4 * time_s, 2.4 * energy_j))
        assert corrected.at(0, Kind.BACKWARD, clock) == profile().at(0, Kind.BACKWARD, clock)


def test_more_than_a_factor_of_two_is_not_corrected():
    assert difference(profile(), part_times(backward_s=5.0), BEFORE, TIME_S)[1] is None


def test_transfers_and_tails_that_differ_are_replaced_and_those_not_seen_are_kept():
    factors, corrected = difference(profile(), part_times(transfer_s=0.3, tail_s=0.8), BEFORE, TIME_S)
    assert factors == {
        "transfer of activation from stage 0 to 1": pytest.approx(3.0),
        "tail": pytest.approx(1.6),
    }
    info = corrected.info
    assert {t.payload: t.time_s for t in info.transfers} == {"activation": pytest.approx(0.3), "grad": 0.1}
    assert info.tail_s == pytest.approx({0: 0.8, 1: 0.8})


def test_transfers_that_differ_by_less_than_matters_are_left_alone():
    assert difference(profile(), part_times(transfer_s=0.11), BEFORE, TIME_S)[0] == {}
