import numpy as np
import pytest
from pipelines import EarlyRecomputation, one_f_one_b, scaled, synthetic_profile

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.lowtime import solve_lowtime
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.instruction import Kind


def solve(schedule, profile):
    problem = problem_for(schedule, profile, blocking_power_w=80.0)
    seen = []
    plans = solve_lowtime(problem, lambda what, done: seen.append(done))
    assert seen == sorted(seen)
    assert (seen[0] < 0.2, seen[-1]) == (True, 1.0)
    return problem, plans


def test_a_profile_fifty_times_shorter_gives_as_good_a_frontier():
    schedule, profile = one_f_one_b(2, 4), synthetic_profile(2)
    profiles = profile, scaled(profile, time=1 / 50, energy=1 / 50)
    long, short = (optimize(schedule, each, blocking_power_w=80.0, solver="lowtime") for each in profiles)
    assert long.provenance.solver == "lowtime"
    assert long.plans[0].time_s <= long.baseline.time_s * 1.03
    assert long.plans[0].energy_j < long.baseline.energy_j
    assert short.t_min_s == pytest.approx(long.t_min_s / 50)
    for share in (1.03, 1.1):
        ours = short.lookup(short.t_min_s * share).energy_j * 50
        assert ours == pytest.approx(long.lookup(long.t_min_s * share).energy_j, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "profile"),
    [
        (
            read_schedule(EarlyRecomputation, ranks=2, micro_batches=3),
            synthetic_profile(2, kinds=(Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE, Kind.TAIL), load_s={0: 0.01}),
        ),
        (one_f_one_b(1, 2), synthetic_profile(1, clocks=2)),
    ],
    ids=["recomputation, load, and tail with clocks", "two clocks"],
)
def test_it_plans_for_any_schedule_and_profile(schedule, profile):
    problem, plans = solve(schedule, profile)
    assert plans[-1].time_s < plans[0].time_s
    assert all(plan.time_s >= problem.t_min_s - 1e-12 for plan in plans)
    assert plans[-1].time_s < 1.05 * problem.t_min_s
    for plan in (plans[0], plans[-1]):
        again = problem.evaluate(plan.clocks_mhz)
        assert (again.time_s, again.energy_j) == pytest.approx((plan.time_s, plan.energy_j))


def test_operations_without_a_clock_take_their_time_too():
    profile = synthetic_profile(2, clocks=4, load_s={0: 0.01, 1: 0.01}, tail_s={0: 0.2, 1: 0.1})
    problem, plans = solve(one_f_one_b(2, 2), profile)
    # Rank 1 waits during rank 0's longer tail, which lowtime cannot shorten.
    assert plans[-1].time_s == pytest.approx(problem.t_min_s, rel=0.03)


def test_an_instruction_without_useful_options_runs_at_its_best_clock():
    rows = [m for m in synthetic_profile(2).measurements if (m.stage, m.kind) != (0, Kind.FORWARD)]
    rows += [Measurement(0, Kind.FORWARD, 900, 0.06, 30.0), Measurement(0, Kind.FORWARD, 1410, 0.05, 20.0)]
    problem, plans = solve(one_f_one_b(2, 3), StageProfile(rows))
    forwards = [
        clock
        for plan in plans
        for i, clock in zip(problem.instructions[0], plan.clocks_mhz[0], strict=True)
        if i.kind is Kind.FORWARD
    ]
    assert set(np.unique(forwards)) == {1410}
