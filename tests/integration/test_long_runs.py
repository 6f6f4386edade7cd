"""Jobs that run for long: nothing piles up, times drift, they are interrupted and resumed."""

import pytest
from job import QUICK_PROFILE, run
from test_policies_in_training import block, frontier, records_of_monitor

pytestmark = [pytest.mark.integration, pytest.mark.extended]
AUTO = {"profile": QUICK_PROFILE, "simulated": {"counter_period_s": 0.02, "longest_instruction_s": 0.02}}
LOOKS = (1000, 2999)


def test_thousands_of_iterations_use_no_more_of_anything_than_hundreds(tmp_path):
    frontier(tmp_path / "frontier", stages=2, micro_batches=2, forward_s=0.0005, linears=1)
    tiny = {"longest_instruction_s": 0.001, "lock_latency_s": 0.0001, "counter_period_s": 0.01}
    job = {"work": [1] * 2, "micro_batches": 2, "steps": LOOKS[-1] + 1, "look_after": LOOKS}
    finished = run(tmp_path / "job", 2, perseus={**block(tmp_path / "frontier"), "simulated": tiny}, **job)
    for rank, report in enumerate(finished.ranks):
        early, late = report["resources"]
        print(f"rank {rank}: after {LOOKS[0]} iterations {early}, after {LOOKS[-1]} {late}")
        assert late["threads"] == early["threads"]
        assert late["handles"] == early["handles"]
        assert late["queued_clocks"] <= 4
        assert late["objects"] - early["objects"] < 500, "less than one object in four iterations"
        assert late["memory_bytes"] - early["memory_bytes"] < 4e6
    assert len([r for r in finished.records() if r.get("phase") == "run"]) == LOOKS[-1]


def test_a_job_whose_times_drift_says_how_far_and_profiles_again(tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}}
    slower = {"pipeline": 0, "factor": 1.3, "first": 110, "last": 1000}
    finished = run(tmp_path / "job", 2, perseus=AUTO, steps=260, deepspeed=monitor, slow_pipeline=slower)
    assert len(finished.ranks) == 2
    records = finished.records()
    events = [r["event"] for r in records if "event" in r]
    assert events.index("drift") > events.index("profile")
    assert events.count("profile") == 2
    drift = next(r["drift"] for r in records if r.get("event") == "drift")
    assert drift == pytest.approx(0.3, abs=0.05)
    again = [r for r in records if "iteration" in r and r["iteration"] > 150 and r["phase"] == "run"]
    assert abs(again[-1]["late"]) < 0.1, "plans are of the new profile"
    told = records_of_monitor(tmp_path / "csv" / "job", "Perseus/simulated/drift")
    assert told == [r["drift"] for r in records if r.get("drift") is not None and "iteration" in r]
    assert min(told) < 0.05
    assert max(told) == pytest.approx(0.3, abs=0.05), "seen twice before it is acted on"


def test_a_checkpoint_in_the_middle_of_profiling_is_resumed_with_the_same_losses_and_policy(tmp_path):
    steps = 60
    without = run(tmp_path / "without", 2, steps=steps, save_after=steps)
    policy = {"name": "energy_optimal"}
    first = run(tmp_path / "first", 2, perseus=AUTO, steps=steps, save_in_phase="profile", policy=policy)
    done = len(first.ranks[0]["losses"])
    assert first.records()[-2]["phase"] == "profile"
    checkpoint = str(tmp_path / "first" / "checkpoint")
    perseus = {**AUTO, "output_dir": str(tmp_path / "first" / "perseus")}
    second = run(tmp_path / "second", 2, perseus=perseus, steps=steps - done, resume_from=checkpoint)
    for ours, begun, theirs in zip(second.ranks, first.ranks, without.ranks, strict=True):
        assert begun["losses"] + ours["losses"] == theirs["losses"]
        assert ours["weights"] == theirs["weights"]
    records = first.records()  # both runs write there
    assert [r["iteration"] for r in records if "iteration" in r] == list(range(1, steps + 1))
    plans = (tmp_path / "first" / "perseus" / "frontier.csv").read_text().splitlines()[1:]
    assert records[-2]["phase"] == "run"
    assert records[-2]["plan"] == len(plans) - 1
