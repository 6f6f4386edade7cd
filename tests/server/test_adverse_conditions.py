"""Auto mode with late clock changes, short iterations or a busy host, in virtual time."""

import random
import statistics
from collections import Counter

import pytest
from virtual.job import SLOWER, VirtualJob, WorkerAtOnce

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Drifted, PlanJudged, ProfileWritten
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.pipeline.instruction import Kind


def typical(job, phase):
    """Return time and energy of a typical iteration of a phase."""
    found = [(time_s, energy_j) for name, time_s, energy_j in job.taken[2:] if name == phase]
    times_s, energies_j = zip(*found[len(found) // 2 :], strict=True)
    return statistics.median(times_s), statistics.mean(energies_j)


@pytest.mark.extended
def test_where_clock_changes_delay_transfers_plans_allow_for_it_and_still_save_energy(tmp_path, capsys):
    stages_s, gpu = (0.036, 0.034, 0.034, 0.046), {"conditions": ["slow-transfers"]}
    job = VirtualJob(tmp_path, stages_s=stages_s, micro_batches=8, gpu=gpu, mode="auto")
    job.train(240)
    default_s, default_j = typical(job, "default")
    under_plan_s, under_plan_j = typical(job, "run")
    assert "a clock change delays this job by" in capsys.readouterr().out
    assert {phase for phase, _, _ in job.taken[-30:]} == {"run"}
    assert under_plan_s < 1.01 * default_s
    assert under_plan_j < 0.95 * default_j
    job.close()


SHORT = {"stages_s": (0.0025, 0.0022, 0.003), "tail_s": 0.002, "micro_batches": 10}


@pytest.mark.extended
def test_short_iterations_are_profiled_and_compared_in_few_of_them_and_run_a_plan_that_skips_no_change(tmp_path):
    noise = {"time_noise": 0.02, "power_noise": 0.01}
    job = VirtualJob(tmp_path, **SHORT, gpu=noise, mode="auto")
    job.train(500)
    records = job.close()
    counts = Counter(phase for phase, _, _ in job.taken)
    assert counts["profile"] <= 85
    assert counts["default"] <= 180
    default, planned = ([taken for taken in job.taken if taken[0] == phase] for phase in ("default", "run"))
    assert {phase for phase, _, _ in job.taken[-100:]} == {"run"}
    default_s, planned_s = (statistics.median(time_s for _, time_s, _ in found) for found in (default, planned))
    default_j, planned_j = (statistics.mean(energy_j for *_, energy_j in found) for found in (default, planned))
    assert planned_s < 1.01 * default_s
    assert planned_j < 0.96 * default_j
    assert sum(record.clock_skips for record in records) == 0
    # As often as planned.
    assert statistics.median(record.clock_changes for record in records[-100:]) >= 4


@pytest.mark.extended
def test_a_plan_that_saves_energy_stays_where_a_busy_host_holds_up_short_instructions(tmp_path):
    job = VirtualJob(tmp_path, **SHORT, mode="auto")
    job.train_until_compared(most=700)
    draw, work = random.Random(3), job.work

    def work_held_up(rank, kind):
        job.idle(rank, draw.uniform(0.0004, 0.0005))
        work(rank, kind)

    job.work = work_held_up
    job.train_until_compared(times=2, most=1500)
    job.train(20)
    job.close()
    assert max(event.drift for event in job.events(Drifted)) > 0.05
    assert len(job.events(ProfileWritten)) == 1
    assert [event.kept for event in job.events(PlanJudged)] == [True, True]
    assert job.taken[-1][0] == "run"


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


def test_plans_of_auto_mode_have_no_run_that_is_shorter_than_two_latencies(start):
    latency_s, requests = 0.03, []

    class Recording(WorkerAtOnce):
        def __init__(self, request, log_path):
            requests.append(request)
            super().__init__(request, log_path)

    job = start(mode="auto", gpu={"lock_latency_s": latency_s}, **SLOWER)
    job.worker = Recording
    job.train_until("run")
    assert set(requests[0].settings.least_dwell_s) == set(SimulatedGpu.named("a100-sxm").supported_clocks_mhz())
    shortest_s, *_, longest_s = sorted(requests[0].settings.least_dwell_s.values())
    assert (shortest_s, longest_s) == pytest.approx((2 * latency_s, 2 * latency_s), abs=0.003)
