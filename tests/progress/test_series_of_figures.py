"""Series of figures over a job of any length."""

import pytest
from live_records import planned_iteration

from perseus_ds.progress.series import EveryNth, PowerExtremes, RecentPower, SeriesPart, SeriesParts
from perseus_ds.savings import sums_of


def by_second(seconds, *iterations, pause_after=None):
    """Return figures of consecutive iterations of given seconds and watts, with an optional pause."""
    ended = 1e9
    for number, (time_s, power_w) in enumerate(iterations):
        ended += time_s
        seconds.add(time_s, None if power_w is None else time_s * power_w, ended)
        ended += 10.0 * (number == pause_after)
    return seconds.figures


@pytest.mark.parametrize("seconds", [PowerExtremes, lambda: RecentPower(60)])
def test_power_over_a_second_is_that_of_whole_iterations(seconds):
    figures = by_second(seconds(), *[(0.25, 100.0), (0.25, 300.0)] * 2, *[(0.25, 300.0)] * 4, (0.5, 1000.0))
    assert (figures.lowest_w, figures.highest_w, figures.change_w) == pytest.approx((200.0, 300.0, 100.0))
    assert (figures.mean_w, figures.window_s) == pytest.approx((250.0, 1.0))
    assert by_second(seconds(), (30.0, 200.0), (30.0, 210.0)).window_s == 30.0


@pytest.mark.parametrize("seconds", [PowerExtremes, lambda: RecentPower(60)])
def test_a_change_of_power_is_between_seconds_without_a_gap(seconds):
    levels = [(1.0, 100.0), (1.0, 150.0), (1.0, 400.0)]
    assert by_second(seconds(), *levels).change_w == 250.0
    assert by_second(seconds(), *levels, pause_after=1).change_w == 50.0
    assert by_second(seconds(), (1.0, 100.0), (1.0, 150.0), (1.0, None), (1.0, 400.0)).change_w == 50.0
    assert by_second(seconds(), (1.0, 900.0)) is None


@pytest.mark.parametrize("seconds", [PowerExtremes, lambda: RecentPower(60)])
def test_a_second_begins_anew_after_an_iteration_of_unknown_energy(seconds):
    figures = by_second(seconds(), (0.5, 900.0), (1.0, None), (1.0, 100.0), (1.0, 110.0))
    assert (figures.lowest_w, figures.highest_w) == (100.0, 110.0)


def test_the_recent_power_is_that_of_the_last_seconds():
    figures = by_second(RecentPower(2), (1.0, 900.0), (1.0, 100.0), (1.0, 110.0))
    assert (figures.highest_w, figures.change_w) == (110.0, 10.0)


@pytest.mark.parametrize(("count", "n"), [(5, 1), (8, 1), (9, 2), (16, 2), (17, 4), (1000, 128)])
def test_every_nth_point_is_kept(count, n):
    kept = EveryNth(8)
    for point in range(count):
        kept.add(point)
    assert kept.n == n
    assert kept.points == list(range(0, count, n))


@pytest.mark.parametrize("count", [4, 23, 40, 41, 80, 81, 500, 5003])
def test_parts_of_a_series_have_all_of_its_iterations_in_order(count):
    parts = SeriesParts(40)
    for number in range(1, count + 1):
        sums = sums_of(planned_iteration(number))
        parts.add(SeriesPart(number, number, None, frozenset({number % 3}), sums))
    found = parts.of_at_least(5)
    assert len(found) <= 40
    assert sum(part.sums.iterations for part in found) == count
    assert [part.first for part in found[1:]] == [part.last + 1 for part in found[:-1]]
    assert min(part.sums.iterations for part in found) >= min(5, count)
    assert found[-1].plans == {0, 1, 2} or count < 3
