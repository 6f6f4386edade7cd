"""Clocks that follow late: profiles count from when they are there, and plans have no runs too short for them."""

import sys

import pytest
from virtual.job import SLOWER, WorkerAtOnce

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.pipeline.instruction import Kind

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
        assert row.energy_j == pytest.approx(true_j, rel=0.005), row


@pytest.mark.parametrize("latency_s", [0.015, 0.03, 0.08])
def test_plans_of_auto_mode_have_no_run_that_is_shorter_than_two_latencies(start, latency_s):
    requests = []

    class Recording(WorkerAtOnce):
        def __init__(self, request, log_path):
            requests.append(request)
            super().__init__(request, log_path)

    job = start(mode="auto", gpu={"lock_latency_s": latency_s}, **SLOWER)
    job.worker = Recording
    job.train_until("run")
    assert set(requests[0].least_dwell_s) == set(SimulatedGpu.named("a100-sxm").supported_clocks_mhz())
    shortest_s, *_, longest_s = sorted(requests[0].least_dwell_s.values())
    assert (shortest_s, longest_s) == pytest.approx((2 * latency_s, 2 * latency_s), abs=0.003)


@pytest.mark.parametrize(("mode", "is_shorter"), [("observe", False), ("auto", True)])
def test_jobs_that_change_clocks_shorten_the_switch_interval_until_they_end(start, mode, is_shorter):
    before_s = sys.getswitchinterval()
    job = start(mode=mode)
    assert (sys.getswitchinterval() < before_s) is is_shorter
    job.close()
    assert sys.getswitchinterval() == before_s
