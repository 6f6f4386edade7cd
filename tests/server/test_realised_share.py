"""Short jobs of the fleet benchmark realise at least a part of what the best plans save, and are hardly late.

Both limits are somewhat beyond the measured figures. The start is a large part of a short job. SIMULATED GPUs.
"""

import pytest
from fleet import SCENARIOS, run

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize(
    ("name", "iterations", "least_realised", "most_late"),
    [
        ("200 iterations", 200, 0.70, 0.036),
        ("a counter fails", 400, 0.82, 0.02),
        ("restart every 250", 500, 0.86, 0.018),
        pytest.param("server killed every 150", 400, 0.80, 0.021, marks=pytest.mark.extended),
        pytest.param("flat tail", 400, 0.82, 0.023, marks=pytest.mark.extended),
    ],
)
def test_a_job_saves_most_of_what_it_could_and_is_hardly_late(name, iterations, least_realised, most_late):
    result = run(BY_NAME[name], seed=1, iterations=iterations)
    assert result.realised >= least_realised
    assert result.late <= most_late
