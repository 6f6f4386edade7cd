"""Auto mode with late clock changes and short iterations, in virtual time."""

import statistics

import pytest
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import PlanJudged
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.simulation.gpu import SimulatedGpu


def typical(job, phase):
    """Return time and energy of a typical iteration of a phase."""
    found = [(time_s, energy_j) for name, time_s, energy_j in job.taken[2:] if name == phase]
    times_s, energies_j = zip(*found[len(found) // 2 :], strict=True)
    return statistics.median(times_s), statistics.mean(energies_j)


@pytest.mark.extended
def test_where_clock_changes_delay_transfers_late_plans_are_followed_by_one_with_fewer_changes_that_stays(tmp_path):
    stages_s, gpu = (0.036, 0.034, 0.034, 0.046), {"conditions": ["slow-transfers"]}
    job = VirtualJob(tmp_path, stages_s=stages_s, micro_batches=8, gpu=gpu, mode="auto")
    job.train(240)
    job.close()
    default_s, _ = typical(job, "default")
    kept = [event.kept for event in job.events(PlanJudged)]
    assert (kept[0], kept[-1]) == (False, True)
    assert "run" in {phase for phase, _, _ in job.taken[-30:]}
    after_profile_s = [time_s for phase, time_s, _ in job.taken if phase in ("run", "default", "observe")]
    assert statistics.fmean(after_profile_s) < 1.01 * default_s


@pytest.mark.extended
def test_short_iterations_are_profiled_and_compared_in_few_of_them_and_run_a_plan_that_skips_no_change(tmp_path):
    noise = {"time_noise": 0.02, "power_noise": 0.01}
    job = VirtualJob(tmp_path, stages_s=(0.0025, 0.0022, 0.003), tail_s=0.002, micro_batches=10, gpu=noise, mode="auto")
    job.train(500)
    records = job.close()
    phases = [phase for phase, _, _ in job.taken]
    assert phases.count("profile") <= 85
    assert phases.count("default") <= 180
    assert phases[-100:].count("run") >= 60
    (default_s, default_j), (planned_s, planned_j) = typical(job, "default"), typical(job, "run")
    assert planned_s < 1.01 * default_s
    assert planned_j < 0.96 * default_j
    assert sum(record.clock_skips for record in records) == 0
    assert statistics.median(record.clock_changes for record in records[-100:]) >= 4, "as often as planned"


LATE_S = 0.4


def test_energy_is_counted_from_when_the_clock_is_there(start):
    profile = {"sampling": "stride", "clock_stride": 16, "min_clock_mhz": 690, "max_clock_mhz": 1290}
    job = start(mode="auto", gpu={"lock_latency_s": LATE_S}, wait_s=0.05, profile=profile, **SLOWER)
    job.train_until("optimizing")
    rows = [row for row in StageProfile.load(job.folder / "measured.csv").measurements if row.kind is not Kind.TAIL]
    assert len({row.clock_mhz for row in rows}) >= 3
    model = job.gpu.model
    for row in rows:
        true_j = job.work_s[0][row.kind] * model.slowdown(row.clock_mhz) * model.power_w(row.clock_mhz)
        assert row.energy_j == pytest.approx(true_j, rel=0.01), row


def test_a_profile_has_the_least_dwell_times_by_which_plans_are_made_again_without_the_job(tmp_path):
    latency_s = 0.03
    job = VirtualJob(tmp_path, stages_s=(0.05, 0.08), micro_batches=6, mode="auto", gpu={"lock_latency_s": latency_s})
    job.train_until("run")
    job.close()
    profile, planned = StageProfile.load(job.folder / "profile.csv"), Frontier.load(job.folder)
    assert set(profile.info.least_dwell_s) == set(SimulatedGpu.named("a100-sxm").supported_clocks_mhz())
    for dwell_s in profile.info.least_dwell_s.values():
        assert dwell_s == pytest.approx(2 * latency_s, abs=0.003)
    schedule = profile.info.streams.to_schedule()
    again = optimize(schedule, profile, plans=20)
    assert again.plans == planned.plans
    assert again.provenance.least_dwell_s == planned.provenance.least_dwell_s > 0
    assert optimize(schedule, profile, plans=20, least_dwell_s=0.0).plans != again.plans
