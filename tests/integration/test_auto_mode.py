"""One job, no second command: profiled online, planned in the background, run under the plan."""

import statistics

import pytest
from job import run

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.main import main
from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.report.sources import find_sources

pytestmark = pytest.mark.integration
MODEL = DEVICES["a100-sxm"]


def phases_of(finished):
    return list(dict.fromkeys(r["phase"] for r in finished.records() if "iteration" in r))


BLOCK = {"simulated": {"counter_period_s": 0.02, "longest_instruction_s": 0.04}}
JOB = {"ranks": 2, "work": [4, 3, 2, 2], "steps": 50}


def test_a_job_profiles_plans_and_saves_energy_with_the_same_losses(tmp_path):
    without = run(tmp_path / "without", **JOB).ranks
    finished = run(tmp_path / "auto", perseus=BLOCK, **JOB)
    for ours, theirs in zip(finished.ranks, without, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert ours["weights"] == theirs["weights"]
        assert ours["plan"]
    assert phases_of(finished) == ["calibrate", "warm-up", "profile", "plan", "run"]
    # The simulated board's power limit keeps it below its highest clocks, which is recorded as "refused".
    events = [r["event"] for r in finished.records() if r.get("event", "refused") != "refused"]
    assert events == ["start", "profile", "plan", "end"]
    assert "less energy than default clocks take" in finished.output
    assert_reported(finished.folder / "perseus")
    # On a machine that is busy with something else nothing takes as long as it should: that deserves a second look.
    if not went_well(finished):
        assert went_well(run(tmp_path / "second", perseus=BLOCK, **JOB))

    earlier = {"XDG_CACHE_HOME": str(tmp_path / "auto" / "cache")}
    again = run(tmp_path / "again", environment=earlier, perseus=BLOCK, **{**JOB, "steps": 3})
    assert phases_of(again) == ["calibrate", "run"]
    assert job_of(again) == job_of(finished)
    changed = {**JOB, "work": [4, 3, 3, 2], "steps": 3}
    other = run(tmp_path / "changed", environment=earlier, perseus=BLOCK, **changed)
    assert phases_of(other) == ["calibrate", "warm-up"]
    assert job_of(other) != job_of(finished)


def job_of(finished):
    return finished.records()[0]["job"]


def assert_reported(folder):
    """What a run leaves is all that a report and a trace are made of."""
    found = find_sources(folder)
    assert found.missing == []
    assert [(iteration.phase, iteration.plan is None) for _, iteration in found.measured] == [
        ("warm-up", True),
        ("run", False),
    ]
    assert main(["report", str(folder)]) == 0
    assert main(["trace", str(folder)]) == 0
    assert "Not in this report" not in (folder / "report.html").read_text(encoding="utf-8")
    assert "measured: plan" in (folder / "trace.json").read_text(encoding="utf-8")


def went_well(finished):
    """Rows are close to the truth, and iterations under the plan use less and take no longer."""
    profile = StageProfile.load(finished.folder / "perseus")
    good = [profile.info.blocking_power_w == pytest.approx(MODEL.blocking_power_w, rel=0.1)]
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        if kind is Kind.TAIL:
            continue
        top_s = options.time_s[-1] / MODEL.slowdown(int(options.clock_mhz[-1]))
        for clock, time_s, energy_j in zip(options.clock_mhz, options.time_s, options.energy_j, strict=True):
            good.append(time_s == pytest.approx(top_s * MODEL.slowdown(int(clock)), rel=0.04))
            good.append(energy_j / time_s == pytest.approx(MODEL.power_w(int(clock)), rel=0.1))

    def mean(phase, what):
        return statistics.mean(r[what] for r in finished.records() if r.get("phase") == phase)

    good.append(mean("run", "energy_j") < 0.95 * mean("plan", "energy_j"))
    good.append(mean("run", "time_s") < 1.03 * mean("plan", "time_s"))
    return all(good)
