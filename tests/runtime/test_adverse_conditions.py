"""Auto mode on pipelines whose simulated GPUs are as unpleasant as real ones may be; in virtual time."""

import statistics

import pytest
from virtual.job import VirtualJob


def typical(job, phase):
    """Time and energy of a typical iteration of a phase."""
    found = [(time_s, energy_j) for name, time_s, energy_j in job.taken[2:] if name == phase]
    times_s, energies_j = zip(*found[len(found) // 2 :], strict=True)
    return statistics.median(times_s), statistics.mean(energies_j)


@pytest.mark.extended
def test_where_clock_changes_delay_transfers_plans_allow_for_it_and_still_save_energy(tmp_path, capsys):
    stages_s, gpu = (0.036, 0.034, 0.034, 0.05), {"conditions": ["slow-transfers"]}
    job = VirtualJob(tmp_path, stages_s=stages_s, micro_batches=8, gpu=gpu, mode="auto")
    job.train(240)
    default_s, default_j = typical(job, "default")
    under_plan_s, under_plan_j = typical(job, "run")
    assert "a clock change delays this job by" in capsys.readouterr().out
    assert {phase for phase, _, _ in job.taken[-30:]} == {"run"}
    assert under_plan_s < 1.01 * default_s
    assert under_plan_j < 0.95 * default_j
    job.close()
