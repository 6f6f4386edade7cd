"""One job is profiled online, planned in the background, and run under the plan."""

import pytest
from job import assert_same_without_perseus, run
from run_log import events, phases

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.main import main
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.report.inputs import read
from perseus_ds.server.frontiers import cached, store

pytestmark = pytest.mark.integration
BLOCK = {"simulated": {"counter_period_s": 0.02}}
JOB = {"ranks": 2, "work": [4, 3, 2, 2]}


def test_a_job_profiles_plans_and_runs_with_the_same_losses_and_the_next_one_uses_its_plans(tmp_path, monkeypatch):
    finished = run(tmp_path / "auto", perseus=BLOCK, **JOB, steps=10_000, until=["run", 5])
    assert_same_without_perseus(finished, **JOB)
    assert all(rank["plan"] for rank in finished.ranks)
    records = finished.records()
    gone_through = [phase for phase in phases(records) if phase != "default"]
    assert list(dict.fromkeys(gone_through)) == ["calibrate", "warm-up", "profile", "optimizing", "run"]
    names = [r["event"] for r in events(records, "start", "profile", "plan", "failure", "end")]
    assert list(dict.fromkeys(names)) == ["start", "profile", "plan", "end"]
    # On a busy machine, passes may deviate too much from the profile, so that nothing is compared.
    (end,) = events(records, "end")
    is_compared = end.get("under_plans") is not None or end.get("whole") is not None
    assert ("Under plans (" in finished.output) == is_compared, "the last line has the saving"
    folder = finished.folder / "perseus"
    profile, frontier = StageProfile.load(folder), Frontier.load(folder)
    assert set(profile.keys) >= {(stage, kind) for stage in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    assert all(r["plan"] < len(frontier.plans) for r in finished.iterations("run"))
    assert all(r["plan"] is None for r in finished.iterations("warm-up", "profile", "optimizing", "default"))
    assert_reported(folder)

    # Whether the plan is measured to save energy, and is therefore kept, depends on the load of the machine.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    store(folder, cached(profile.info.job))
    earlier = {"XDG_CACHE_HOME": str(tmp_path / "kept")}
    again = run(tmp_path / "again", environment=earlier, perseus=BLOCK, **JOB, steps=1000, until=["run", 2])
    assert phases(again.records()) == ["calibrate", "run"]
    assert "using plans profiled by an earlier run" in again.output
    assert again.events("start")[0]["job"] == finished.events("start")[0]["job"]


def assert_reported(folder):
    """Assert that the files of a run suffice for a report and a trace."""
    found = read(folder)
    assert found.missing == []
    assert [(iteration.phase, iteration.plan is None) for _, iteration in found.measured] == [
        ("warm-up", True),
        ("run", False),
    ]
    assert main(["report", str(folder)]) == 0
    assert main(["trace", str(folder)]) == 0
    assert "Not in this report" not in (folder / "report.html").read_text(encoding="utf-8")
    assert "measured: plan" in (folder / "trace.json").read_text(encoding="utf-8")
