"""Profiles that real ranks measure on simulated GPUs; benchmarks/prediction.py says how accurate they are."""

import json
import signal

import psutil
import pytest
from job import QUICK_PROFILE, run, start
from run_log import GIVE_UP_S, wait_until

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.main import main
from perseus_ds.pipeline.instruction import Kind

pytestmark = pytest.mark.integration


@pytest.mark.extended
def test_two_pipelines_of_two_stages_are_profiled_as_one_and_then_run_under_one_plan(tmp_path):
    job = {"ranks": 4, "stages": 2, "work": [4, 2, 2, 1]}
    heavy = {"transfer_s": 0.012, "tail_s": 0.12}
    block = {"mode": "profile", "profile": QUICK_PROFILE, "simulated": heavy}
    profiled = run(tmp_path / "profile", perseus=block, steps=200, until=["observe", 1], **job)
    assert len(profiled.ranks) == 4
    profile = StageProfile.load(tmp_path / "profile" / "perseus")
    assert set(profile.keys) >= {(stage, kind) for stage in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    assert (profile.info.data_parallel, profile.info.stages, profile.info.micro_batches) == (2, 2, 4)
    assert profile.info.blocking_power_w is not None
    assert {(t.payload, t.source, t.target) for t in profile.info.transfers} == {("activation", 0, 1), ("grad", 1, 0)}
    assert set(profile.info.tail_s) == {0, 1}
    # profile.csv leaves out tails that draw no more than waiting, which depends on what was measured.
    measured = StageProfile.load(tmp_path / "profile" / "perseus" / "measured.csv")
    for stage in (0, 1):
        clocks = [measured.options(stage, kind).clock_mhz.tolist() for kind in (Kind.TAIL, Kind.FORWARD)]
        assert clocks[0] == clocks[1], "a heavy tail is measured at every clock"

    out = tmp_path / "frontier"
    assert main(["optimize", f"profile={tmp_path}/profile/perseus/profile.csv", f"out={out}"]) == 0
    block = {
        "mode": "run",
        "frontier": str(out),
        "simulated": heavy,
        "policy": {"name": "slowdown", "max_slowdown": 0.1},
    }
    running = run(tmp_path / "run", perseus=block, steps=8, **job)
    assert all(rank["plan"] for rank in running.ranks)
    records = running.iterations("run")
    assert len(records) == 7
    # The job's energy is that of both pipelines.
    plan = json.loads((out / "frontier.json").read_text())["plans"][records[0]["plan"]]
    assert records[0]["predicted_energy_j"] == pytest.approx(2 * plan["energy_j"], abs=0.01)
    for record in records:
        assert record["simulated"] is True
        assert record["failed_ranks"] == []
        assert record["energy_j"] == pytest.approx(sum(record["energy_by_pipeline_j"]), abs=0.01)
        assert len(record["energy_by_pipeline_j"]) == 2


def is_rank(process):
    try:
        return "pipeline_job.py" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


@pytest.mark.extended
def test_a_rank_killed_while_profiling_leaves_no_profile(tmp_path):
    slow = {**QUICK_PROFILE, "clock_stride": 1, "min_clock_mhz": 300}
    process = start(tmp_path / "job", 2, perseus={"mode": "profile", "profile": slow}, steps=200)
    folder = tmp_path / "job" / "perseus"
    # Rows are kept as they are measured, so that an interrupted sweep can go on.
    wait_until(lambda: (folder / "measured.csv").exists() or process.poll() is not None, "the first rows")
    assert process.poll() is None
    ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if is_rank(p)]
    max(ranks, key=lambda p: p.pid).send_signal(signal.SIGKILL)
    process.communicate(timeout=GIVE_UP_S)
    assert process.returncode != 0
    assert not (folder / "profile.csv").exists()
