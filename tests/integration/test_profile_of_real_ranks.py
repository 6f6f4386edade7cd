"""Profiles that real ranks measure on simulated GPUs, whose truth is known."""

import json
import signal
import time

import psutil
import pytest
from job import QUICK_PROFILE, run, start

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.pipeline.instruction import Kind

pytestmark = pytest.mark.integration
MODEL = DEVICES["a100-sxm"]


def check_against_truth(profile):
    """Rows agree with the device model in how time and energy change with the clock."""
    for stage, kind in profile.keys:
        if kind is Kind.TAIL:  # takes what it takes for real, on no simulated GPU
            continue
        options = profile.options(stage, kind)
        top_s = options.time_s[-1] / MODEL.slowdown(int(options.clock_mhz[-1]))
        for clock, time_s, energy_j in zip(options.clock_mhz, options.time_s, options.energy_j, strict=True):
            true_s = top_s * MODEL.slowdown(int(clock))
            assert time_s == pytest.approx(true_s, rel=0.05)
            assert energy_j == pytest.approx(true_s * MODEL.power_w(int(clock)), rel=0.12)


def test_two_pipelines_of_two_stages_are_profiled_as_one_and_then_run_under_one_plan(tmp_path):
    job = {"ranks": 4, "stages": 2, "work": [4, 2, 2, 1]}
    profiled = run(tmp_path / "profile", perseus={"mode": "profile", "profile": QUICK_PROFILE}, steps=20, **job)
    assert len(profiled.ranks) == 4
    profile = StageProfile.load(tmp_path / "profile" / "perseus")
    assert set(profile.keys) >= {(stage, kind) for stage in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    assert (profile.info.data_parallel, profile.info.stages, profile.info.micro_batches) == (2, 2, 4)
    assert profile.info.blocking_power_w == pytest.approx(MODEL.blocking_power_w, rel=0.03)
    assert {(t.payload, t.source, t.target) for t in profile.info.transfers} == {("activation", 0, 1), ("grad", 1, 0)}
    assert set(profile.info.tail_s) == {0, 1}
    check_against_truth(profile)

    from perseus_ds.cli.main import main

    out = tmp_path / "frontier"
    assert main(["optimize", f"profile={tmp_path}/profile/perseus/profile.csv", f"out={out}"]) == 0
    block = {"mode": "run", "frontier": str(out), "policy": {"name": "slowdown", "max_slowdown": 0.1}}
    running = run(tmp_path / "run", perseus=block, steps=8, **job)
    assert all(rank["plan"] for rank in running.ranks)
    records = [r for r in running.records() if r.get("phase") == "run"]
    assert len(records) == 7
    assert all(r["simulated"] is True and r["failed_ranks"] == [] for r in records)
    # The job's energy is that of both pipelines.
    predicted = records[0]["predicted_energy_j"]
    assert predicted == pytest.approx(
        2 * json.loads((out / "frontier.json").read_text())["plans"][0]["energy_j"], rel=0.4
    )
    assert sum(r["energy_j"] for r in records) / len(records) == pytest.approx(predicted, rel=0.15)


def is_rank(process):
    try:
        return "pipeline_job.py" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def test_a_rank_killed_while_profiling_leaves_no_profile(tmp_path):
    slow = {**QUICK_PROFILE, "clock_stride": 1, "min_clock_mhz": 300, "max_window_s": 0.5}
    process = start(tmp_path / "job", 2, perseus={"mode": "profile", "profile": slow}, steps=4)
    folder = tmp_path / "job" / "perseus"
    deadline = time.monotonic() + 90
    while not (folder / "run.jsonl").exists() or len((folder / "run.jsonl").read_text().splitlines()) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)  # the warm-up is over: both ranks are in the sweep
    ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if is_rank(p)]
    max(ranks, key=lambda p: p.pid).send_signal(signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode != 0
    assert not (folder / "profile.csv").exists()
