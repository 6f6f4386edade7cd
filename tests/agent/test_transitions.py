"""Times of clock requests: no instruction runs below its planned clock on a GPU with a latency."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perseus_ds.agent.timeline import plan_transitions
from perseus_ds.protocol.job_messages import LatencyTable

LATENCY_S = 0.015
ALL_ALIKE = LatencyTable({(1200, rises): (LATENCY_S,) * 3 for rises in (False, True)})
CLOCKS = st.sampled_from([900, 1005, 1110, 1200, 1305, 1410])
TIMES = st.integers(1, 80).map(lambda ms: ms / 1000)
RUNS = st.lists(st.tuples(CLOCKS, st.lists(TIMES, min_size=1, max_size=6)), min_size=1, max_size=8)
"""Clocks, and the times of instructions at them."""


def one_after_the_other(times_s):
    """Return begin and end of instructions that follow each other immediately, and the last end."""
    ends_s = list(itertools.accumulate(times_s))
    return list(zip([0.0, *ends_s], ends_s, strict=False)), ends_s[-1]


def requests(transitions, times_s, iterations):
    """Return the times and clocks of requests, with instructions that follow each other immediately."""
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
    """Return times and clocks that take effect. Calls are made one by one, and overtaken requests skipped."""
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
    transitions = plan_transitions(clocks, *one_after_the_other(times_s), ALL_ALIKE)
    # The very first change is late. Each iteration makes up for at least its shortest instruction, 1 ms.
    settled = 2 + int(2 * LATENCY_S / 0.001)
    there = applied(requests(transitions, times_s, settled + 2), LATENCY_S)
    begin_s = settled * sum(times_s)
    for planned_mhz, time_s in stream * 2:
        at_begin = [clock for when_s, clock in there if when_s <= begin_s + 1e-6][-1]
        meanwhile = [clock for when_s, clock in there if begin_s + 1e-6 < when_s < begin_s + time_s - 1e-6]
        assert min([at_begin, *meanwhile]) >= planned_mhz
        begin_s += time_s


def around(clocks_mhz, spans_s, length_s, latencies=ALL_ALIKE):
    """Return the clock requested at the beginning of each instruction, and the time of its early request."""
    found = plan_transitions(clocks_mhz, spans_s, length_s, latencies)
    return [each.clock_mhz for each in found], [each.early_s and pytest.approx(each.early_s) for each in found]


@pytest.mark.parametrize(
    ("clocks_mhz", "spans_s", "length_s", "requested", "early_s"),
    [
        # One latency before it is due. A lower clock is due 1 ms after the next instruction has begun.
        ([1110, 1410], [(0.0, 0.1), (0.1, 0.15)], 0.15, [1110, 1410], [0.085, 0.036]),
        # Instructions before that are too short: the request is made during an earlier one.
        (
            [1110, 1110, 1110, 1410],
            [(0.0, 0.1), (0.1, 0.11), (0.11, 0.112), (0.112, 0.162)],
            0.162,
            [1110, 1410, 1410, 1410],
            [0.097, None, None, 0.036],
        ),
        # Due while the rank waits: a higher clock is requested before, a lower one after.
        ([1110, 1110, 1410], [(0.0, 0.05), (0.06, 0.07), (0.07, 0.17)], 0.2, [1110, 1410, 1410], [None, None, 0.1]),
        ([1110, 1110, 900], [(0.0, 0.05), (0.06, 0.07), (0.07, 0.17)], 0.2, [1110, 1110, 900], [None, 0.0, 0.085]),
        # The first clock is due when the previous iteration ends, even if the first instruction is short.
        ([1410, 1110, 1110], [(0.0, 0.1), (0.1, 0.15), (0.15, 0.16)], 0.3, [1410, 1110, 1410], [0.086, 0.045, None]),
        # A lower clock is not requested before its iteration begins.
        (
            [1410, 1110, 1410],
            [(0.0, 0.005), (0.005, 0.105), (0.105, 0.205)],
            0.205,
            [1410, 1110, 1410],
            [0.0, 0.085, None],
        ),
        # The times of instructions are unknown.
        ([1110, 1410], [], 0.2, [1110, 1410], [None, None]),
    ],
)
def test_a_clock_is_requested_early_by_its_latency(clocks_mhz, spans_s, length_s, requested, early_s):
    assert around(clocks_mhz, spans_s, length_s) == (requested, early_s)


def test_each_clock_is_requested_by_its_own_latency_and_direction():
    """A higher clock is requested by its 90th percentile, and a lower one by its 10th."""
    latencies = LatencyTable(
        {(1410, True): (0.02, 0.03, 0.04, 0.05, 0.06), (1110, False): (0.01, 0.02, 0.03, 0.03, 0.03)}
    )
    spans_s = [(0.0, 0.1), (0.1, 0.2)]
    assert around([1110, 1410], spans_s, 0.2, latencies) == ([1110, 1410], [0.05, 0.081])
    assert around([1110, 1410], spans_s, 0.2, LatencyTable()) == ([1110, 1410], [None, None])


def test_figures_of_many_clocks_are_those_of_the_nearest_clocks_with_latencies():
    table = LatencyTable({(clock, True): (clock * 1e-5,) * 5 for clock in (900, 1200)})
    asked = []

    def figure(clock_mhz):
        asked.append(clock_mhz)
        return table.dwell_s(clock_mhz)

    assert table.of_clocks(range(800, 1401, 100), figure) == pytest.approx([0.018] * 3 + [0.024] * 4)
    assert sorted(asked) == [900, 1200]
    assert LatencyTable().of_clocks([900], LatencyTable().dwell_s) == [0.0]
