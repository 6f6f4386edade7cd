"""Durations of loads, transfers and the tail, without waiting."""

import pytest

from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Load, Transfer
from perseus_ds.profiler.fixed_durations import load_durations_s, tail_durations_s, transfer_durations, without_gaps

ACTIVATION = Transfer("activation", 0, 1, 0)


def tail(stage, *times):
    return [Span(Compute(Instruction(stage, Kind.TAIL, 0)), begin, end) for begin, end in times]


def test_the_duration_of_a_transfer_is_the_shorter_of_its_two_sides():
    sender = [Span(Exchange(sends=(ACTIVATION,)), 1.0, 1.1)]
    receiver = [Span(Exchange(receives=(ACTIVATION,)), 0.2, 1.1)]
    (found,) = transfer_durations([[sender], [receiver]])
    assert (found.payload, found.source, found.target) == ("activation", 0, 1)
    assert found.time_s == pytest.approx(0.1)


def test_the_tail_of_a_stage_is_the_sum_of_its_parts():
    iterations = [tail(0, (5.0, 5.1), (5.1, 5.3)), tail(0, (7.0, 7.2), (7.2, 7.6)), tail(0, (9.0, 9.2), (9.2, 9.3))]
    assert tail_durations_s([iterations, [tail(1, (5.0, 5.5))]]) == pytest.approx({0: 0.3, 1: 0.5})


def test_loads_are_medians_by_stage():
    spans = [[Span(Load(0, m), m, m + t) for m, t in enumerate((0.1, 0.2, 0.9))]]
    assert load_durations_s([spans]) == {0: pytest.approx(0.2)}


def test_gaps_are_added_to_loads_transfers_and_tails_except_the_gap_before_the_tail():
    forward = Compute(Instruction(0, Kind.FORWARD, 0))
    spans = [Span(Load(0, 0), 0.1, 0.2), Span(forward, 0.3, 1.0), *tail(0, (1.1, 1.2), (1.25, 1.3))]
    closed = without_gaps(spans, 1.5)
    assert [(s.start_s, s.end_s) for s in closed] == [(0.0, 0.3), (0.3, 1.0), (1.1, 1.25), (1.25, 1.5)]
