"""One job, no second command: profiled online, planned in the background, run under the plan."""

import statistics

import pytest
from job import run

from perseus_ds.gpu.simulated import DEVICES
from perseus_ds.instruction import Kind
from perseus_ds.stage_profile import StageProfile

pytestmark = pytest.mark.integration
MODEL = DEVICES["a100-sxm"]


def phases_of(finished):
    return list(dict.fromkeys(r["phase"] for r in finished.records() if "iteration" in r))


def test_a_job_profiles_plans_and_saves_energy_with_the_same_losses(tmp_path):
    job = {"ranks": 2, "work": [4, 3, 2, 2], "steps": 50}
    without = run(tmp_path / "without", **job).ranks
    block = {
        "simulated": {"counter_period_s": 0.02, "longest_instruction_s": 0.04},
    }
    finished = run(tmp_path / "auto", perseus=block, **job)
    for ours, theirs in zip(finished.ranks, without, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert ours["weights"] == theirs["weights"]
        assert ours["plan"]
    records = finished.records()
    iterations = [r for r in records if "iteration" in r]
    assert phases_of(finished) == ["calibrate", "warm-up", "profile", "plan", "run"]
    assert [r["event"] for r in records if "event" in r] == ["start", "profile", "plan"]

    profile = StageProfile.load(tmp_path / "auto" / "perseus")
    assert profile.info.blocking_power_w == pytest.approx(MODEL.blocking_power_w, rel=0.1)
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        if kind is Kind.TAIL:
            continue
        top_s = options.time_s[-1] / MODEL.slowdown(int(options.clock_mhz[-1]))
        for clock, time_s, energy_j in zip(options.clock_mhz, options.time_s, options.energy_j, strict=True):
            assert time_s == pytest.approx(top_s * MODEL.slowdown(int(clock)), rel=0.04)
            assert energy_j / time_s == pytest.approx(MODEL.power_w(int(clock)), rel=0.1)

    def mean(phase, what):
        return statistics.mean(r[what] for r in iterations if r["phase"] == phase)

    earlier = {"XDG_CACHE_HOME": str(tmp_path / "auto" / "cache")}
    again = run(tmp_path / "again", environment=earlier, perseus=block, **{**job, "steps": 3})
    assert phases_of(again) == ["calibrate", "run"]
    changed = {**job, "work": [4, 3, 3, 2], "steps": 3}
    assert phases_of(run(tmp_path / "changed", environment=earlier, perseus=block, **changed)) == [
        "calibrate",
        "warm-up",
    ]

    assert mean("run", "energy_j") < 0.95 * mean("plan", "energy_j")
    assert mean("run", "time_s") < 1.03 * mean("plan", "time_s")
