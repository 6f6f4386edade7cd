"""When to request which clock: no instruction runs below its plan, on a GPU whose clock follows late."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perseus_ds.device.clock_transitions import count_changes, plan_transitions, without_short_runs

LATENCY_S = 0.015
CLOCKS = st.sampled_from([900, 1005, 1110, 1200, 1305, 1410])
TIMES = st.integers(1, 80).map(lambda ms: ms / 1000)
STREAMS = st.lists(st.tuples(CLOCKS, TIMES), min_size=1, max_size=24)


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


@given(STREAMS)
@example([(1005, 0.001), (900, 0.03)])
def test_no_instruction_runs_below_its_planned_clock(stream):
    clocks, times_s = zip(*stream, strict=True)
    transitions = plan_transitions(clocks, times_s, LATENCY_S)
    # The first change of all comes late; each iteration makes up for at least its shortest instruction, 1 ms.
    settled = 2 + int(2 * LATENCY_S / 0.001)
    there = applied(requests(transitions, times_s, settled + 2), LATENCY_S)
    begin_s = settled * sum(times_s)
    for planned_mhz, time_s in list(stream) * 2:
        at_begin = [clock for when_s, clock in there if when_s <= begin_s + 1e-6][-1]
        meanwhile = [clock for when_s, clock in there if begin_s + 1e-6 < when_s < begin_s + time_s - 1e-6]
        assert min([at_begin, *meanwhile]) >= planned_mhz
        begin_s += time_s


@given(STREAMS, st.integers(0, 40).map(lambda ms: ms / 1000))
def test_leaving_short_runs_out_raises_clocks_and_saves_changes(stream, latency_s):
    clocks, times_s = zip(*stream, strict=True)
    bridged = without_short_runs(clocks, times_s, latency_s)
    assert all(ours >= planned for ours, planned in zip(bridged, clocks, strict=True))
    assert set(bridged) <= set(clocks)
    assert max(bridged) == max(clocks)
    assert count_changes(bridged) <= count_changes(clocks)
    assert without_short_runs(bridged, times_s, latency_s) == bridged
    if latency_s == 0:
        assert bridged == list(clocks)


@pytest.mark.parametrize(
    ("clocks", "times_ms", "expected"),
    [
        ([1410, 1110, 1410], [50, 29, 50], [1410, 1410, 1410]),
        ([1410, 1110, 1410], [50, 31, 50], [1410, 1110, 1410]),
        ([1200, 1110, 1410], [50, 29, 50], [1200, 1200, 1410]),
        ([900, 1110, 1410], [50, 14, 50], [900, 1410, 1410]),
        ([1410, 1110, 900], [50, 14, 50], [1410, 1410, 900]),
        ([900, 1410, 900], [50, 1, 50], [900, 1410, 900]),
        ([1110, 1005, 1110, 1410], [10, 25, 10, 50], [1110, 1110, 1110, 1410]),
    ],
)
def test_lower_clocks_are_left_out_where_there_is_no_time_for_them(clocks, times_ms, expected):
    assert without_short_runs(clocks, [ms / 1000 for ms in times_ms], LATENCY_S) == expected


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
