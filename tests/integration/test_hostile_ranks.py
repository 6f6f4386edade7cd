"""Random faults of real ranks for some seconds; ``benchmarks/soak.py`` does so for hours."""

import pytest
from hostile_ranks import HostileRanks

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def test_losses_stay_and_all_ranks_are_under_a_plan_again_after_faults_and_kills(tmp_path, make_stub_nvml):
    causes = ("driver error", "full disk", "orders", "kill one rank")
    job = HostileRanks(tmp_path, make_stub_nvml(4), seed=1, causes=causes, longest_s=2.0)
    assert job.run(minutes=0.5) == []
    assert all(outcome.times for outcome in job.outcomes.values())
