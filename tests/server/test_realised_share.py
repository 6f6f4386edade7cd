"""Short jobs of the fleet benchmark realise at least a part of what the best plans save, and are hardly late.

Both limits are somewhat beyond the measured figures. The start is a large part of a short job. SIMULATED GPUs.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fleet import SCENARIOS, Scenario, fault, run
from fleet_jobs import FleetJob, Machine, State

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize(
    ("name", "iterations", "least_realised", "most_late"),
    [
        ("200 iterations", 200, 0.70, 0.036),
        ("a counter fails", 400, 0.82, 0.02),
        ("restart every 250", 500, 0.86, 0.018),
        ("many lengths", 500, 0.74, 0.025),
        pytest.param("server killed every 150", 400, 0.80, 0.021, marks=pytest.mark.extended),
        pytest.param("noise 3 %, four stages", 1000, 0.72, 0.012, marks=pytest.mark.extended),
        pytest.param("flat tail", 400, 0.82, 0.023, marks=pytest.mark.extended),
    ],
)
def test_a_job_saves_most_of_what_it_could_and_is_hardly_late(name, iterations, least_realised, most_late):
    result = run(BY_NAME[name], seed=1, iterations=iterations)
    assert result.realised >= least_realised
    assert result.late <= most_late


def test_a_counter_that_fails_costs_no_saving():
    """Savings of this machine come from the first stage."""
    scenario = Scenario("the first counter fails", fault("counter fails", 0, 150))
    assert run(scenario, seed=1, iterations=400).realised >= 0.8


def test_a_job_that_clock_changes_delay_runs_plans_with_fewer_of_them():
    """Its first plans are late."""
    result = run(BY_NAME["clock changes delay by 2 ms"], seed=2, iterations=400)
    assert result.realised >= 0.7
    assert result.late <= 0.025


def test_a_job_whose_host_only_launches_passes_takes_as_long_as_another():
    # Ranks wait for transfers of each other in both.
    assert time_of_ten_iterations(launches=True, waits_for_gpu=True) == pytest.approx(time_of_ten_iterations())


def time_of_ten_iterations(**machine):
    with TemporaryDirectory() as folder:
        job = FleetJob(Path(folder) / "job", Machine(noise=0.0, **machine), seed=1, first=State(), goal={})
        for _ in range(10):
            job.go(State())
        job.settle()
        time_s = job.used().time_s - job.start_s
        job.close()
    return time_s
