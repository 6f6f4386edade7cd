"""The cheapest assignment of plans to hours is the optimum of the linear programme, and can be carried out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from perseus_ds.policy.hourly_programme import HALT, Option, cheapest

FRONTIER = [Option(0, 1.0, 1000.0), Option(1, 0.9, 800.0), Option(2, 0.8, 690.0), Option(3, 0.7, 600.0)]
IDLE = Option(HALT, 0.0, 250.0)


def hours(count):
    return np.arange(count + 1) * 3600.0


def least_cost_ending_in(last, options, edges_s, prices, steps):
    """The linear programme over (hour, plan) of a job that ends in an hour, as HiGHS solves it."""
    lengths_s = np.diff(edges_s)[: last + 1]
    size = len(options)
    costs = np.concatenate([price * np.array([o.power_w for o in options]) for price in prices[: last + 1]])
    rates = np.tile([option.rate for option in options], last + 1)
    in_hour = np.kron(np.eye(last + 1), np.ones(size))
    scale = np.abs(costs).max() or 1.0  # the tolerances of HiGHS are absolute
    result = linprog(
        costs / scale,
        A_eq=np.vstack([in_hour[:-1], rates]),
        b_eq=[*lengths_s[:-1], steps],
        A_ub=in_hour[-1:],
        b_ub=lengths_s[-1:],
        method="highs",
    )
    return result.fun * scale if result.status == 0 else np.inf


def parts(solution):
    """What runs, from when to when."""
    edges_s, plans = solution.parts()
    return list(zip(plans.tolist(), edges_s[:-1], edges_s[1:], strict=True))


def totals(solution, options, edges_s, prices):
    """Steps and cost of a timetable, added up hour by hour."""
    by_plan = {option.plan: option for option in options}
    steps = cost = 0.0
    for plan, first_s, last_s in parts(solution):
        for begin_s, end_s, price in zip(edges_s, edges_s[1:], prices, strict=False):
            time_s = max(0.0, min(last_s, end_s) - max(first_s, begin_s))
            steps += by_plan[plan].rate * time_s
            cost += by_plan[plan].power_w * price * time_s
    return steps, cost


def options_of(draw):
    # Plans differ by more than the tolerance by which HiGHS keeps its constraints.
    times_s = sorted(draw(st.lists(st.integers(1000, 2000), min_size=1, max_size=6, unique=True)))
    plans = [Option(n, 1000 / t, draw(st.floats(100, 1000))) for n, t in enumerate(times_s)]
    return plans + draw(st.sampled_from([[], [IDLE]]))


@given(st.data())
def test_no_assignment_that_ends_in_time_costs_less_by_highs(data):
    options = options_of(data.draw)
    lengths_s = data.draw(st.lists(st.floats(10.0, 3600.0), min_size=1, max_size=6))
    edges_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
    prices = np.array(data.draw(st.lists(st.floats(-1.0, 3.0), min_size=len(lengths_s), max_size=len(lengths_s))))
    fastest = max(option.rate for option in options)
    steps = data.draw(st.floats(0.01, 1.0)) * edges_s[-1] * fastest
    solution = cheapest(options, edges_s, prices, steps)
    assert solution is not None
    best = min(least_cost_ending_in(last, options, edges_s, prices, steps) for last in range(len(prices)))
    scale = np.abs(prices).max() * 1000 * edges_s[-1]
    assert solution.cost == pytest.approx(best, rel=1e-6, abs=1e-7 * scale + 1e-9)
    done, cost = totals(solution, options, edges_s, prices)
    assert done == pytest.approx(steps, rel=1e-6)
    if prices.min() >= 0:  # a job that is done early does not idle on to be paid for it
        assert cost == pytest.approx(best, rel=1e-6, abs=1e-7 * scale + 1e-9)
    assert (np.diff(solution.parts()[0]) > 0).all()


def test_a_job_for_which_there_is_not_enough_time_has_no_solution():
    assert cheapest(FRONTIER, hours(2), np.array([1.0, 2.0]), 7200 * 1.001) is None
    assert cheapest(FRONTIER, hours(2), np.array([1.0, 2.0]), 7200).parts()[0][-1] == 7200


def test_a_job_halts_at_an_hour_that_costs_more_than_idling_through_it():
    steps, prices = 2 * 3600, np.array([1.0, 9.0, 1.0])
    halting = cheapest([*FRONTIER, IDLE], hours(3), prices, steps)
    assert halting.parts()[1].tolist() == [0, HALT, 0]
    assert halting.cost == pytest.approx(2 * 3600 * 1000 + 9 * 3600 * 250)
    never = cheapest(FRONTIER, hours(3), prices, steps)
    assert HALT not in never.parts()[1]
    assert never.cost > halting.cost


def test_at_most_one_hour_before_the_last_is_divided_between_plans():
    prices = np.random.default_rng(0).uniform(0.5, 2.0, 168)
    solution = cheapest(FRONTIER, hours(168), prices, 0.83 * 168 * 3600)
    inside = [end_s for end_s in solution.parts()[0][1:-1] if end_s % 3600 > 1e-6]
    assert len(inside) <= 2


def test_at_one_price_plans_are_divided_in_time_the_fast_one_first():
    solution = cheapest(FRONTIER, hours(2), np.ones(2), 0.85 * 7200)
    assert solution.parts()[1].tolist() == [1, 2]
    assert solution.parts()[0][-1] == pytest.approx(7200)


def test_prices_whose_costs_are_no_numbers_do_not_keep_the_decision_from_ending():
    with np.errstate(all="ignore"):
        cheapest([*FRONTIER, IDLE], hours(50), np.tile([1e308, -1e308], 25), 0.7 * 50 * 3600)
