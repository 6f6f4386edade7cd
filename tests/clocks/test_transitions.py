"""When to request which clock: no instruction runs below its plan, on a GPU whose clock follows late."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perseus_ds.clocks.transitions import plan_transitions

LATENCY_S = 0.015
CLOCKS = st.sampled_from([900, 1005, 1110, 1200, 1305, 1410])
TIMES = st.integers(1, 80).map(lambda ms: ms / 1000)
RUNS = st.lists(st.tuples(CLOCKS, st.lists(TIMES, min_size=1, max_size=6)), min_size=1, max_size=8)
"""Clocks, and the times of instructions at them."""


def requests(transitions, times_s, iterations):
    """Return when which clock is requested, with instructions that follow each other at once."""
    now_s, found = 0.0, []
    for around, time_s in itertools.islice(
        itertools.cycle(zip(transitions, times_s, strict=True)), iterations * len(transitions)
    ):
        found.append((now_s, around.clock_mhz))
        if around.early_s is not None:
            found.append((now_s + around.early_s, around.next_clock_mhz))
        now_s += time_s
        found.append((now_s, around.next_clock_mhz))
    return sorted(found, key=lambda request: request[0])


def applied(found, latency_s):
    """Return when which clock is in effect; the worker makes one call at a time and skips overtaken requests."""
    free_s, clock_mhz, result = 0.0, None, []
    for number, (asked_s, wanted_mhz) in enumerate(found):
        begin_s = max(free_s, asked_s)
        overtaken = number + 1 < len(found) and found[number + 1][0] <= begin_s - 1e-9
        if wanted_mhz != clock_mhz and not overtaken:
            free_s = begin_s + latency_s
            clock_mhz = wanted_mhz
            result.append((free_s, wanted_mhz))
    return result


@given(RUNS)
@example([(1005, [0.03]), (900, [0.001, 0.03])])
def test_no_instruction_runs_below_its_planned_clock_where_clocks_are_held_for_two_latencies(runs):
    held = [(clock, [*times_s, max(0.0, 2 * LATENCY_S - sum(times_s)) or 0.001]) for clock, times_s in runs]
    stream = [(clock, time_s) for clock, times_s in held for time_s in times_s]
    clocks, times_s = zip(*stream, strict=True)
    transitions = plan_transitions(clocks, times_s, LATENCY_S)
    # The first change of all comes late; each iteration makes up for at least its shortest instruction, 1 ms.
    settled = 2 + int(2 * LATENCY_S / 0.001)
    there = applied(requests(transitions, times_s, settled + 2), LATENCY_S)
    begin_s = settled * sum(times_s)
    for planned_mhz, time_s in stream * 2:
        at_begin = [clock for when_s, clock in there if when_s <= begin_s + 1e-6][-1]
        meanwhile = [clock for when_s, clock in there if begin_s + 1e-6 < when_s < begin_s + time_s - 1e-6]
        assert min([at_begin, *meanwhile]) >= planned_mhz
        begin_s += time_s


def test_a_higher_clock_is_requested_one_latency_before_it_is_due():
    transitions = plan_transitions([1110, 1410], [0.1, 0.05], LATENCY_S)
    assert [around.early_s for around in transitions] == [pytest.approx(0.085), None]


def test_where_the_instruction_before_is_too_short_the_request_falls_into_an_earlier_one():
    transitions = plan_transitions([1110, 1110, 1110, 1410], [0.1, 0.01, 0.002, 0.05], LATENCY_S)
    assert [around.clock_mhz for around in transitions] == [1110, 1410, 1410, 1410]
    assert [around.early_s for around in transitions] == [pytest.approx(0.097), None, None, None]


@pytest.mark.parametrize(("times_s", "latency_s"), [((), LATENCY_S), ((0.001, 0.001), 0.0)])
def test_without_knowing_durations_or_latency_the_plan_is_followed_as_it_is(times_s, latency_s):
    transitions = plan_transitions([1110, 1410], times_s, latency_s)
    assert [(around.clock_mhz, around.next_clock_mhz, around.early_s) for around in transitions] == [
        (1110, 1410, None),
        (1410, 1110, None),
    ]
