"""Long jobs: nothing accumulates, and they can be interrupted and resumed."""

import pytest
from frontiers import save_true_frontier
from job import QUICK_PROFILE, run

pytestmark = [pytest.mark.integration, pytest.mark.extended]
AUTO = {"profile": QUICK_PROFILE, "simulated": {"longest_instruction_s": 0.02}}
# Memory grows by some megabytes until a plan is compared and confirmed, and then by up to 3 MB, without objects.
LOOKS = (2000, 3999)


def test_thousands_of_iterations_use_no_more_of_anything_than_hundreds(tmp_path):
    save_true_frontier(tmp_path / "frontier", micro_batches=2, forward_s=0.0005, linears=1)
    tiny = {"longest_instruction_s": 0.001, "lock_latency_s": 0.0001, "counter_period_s": 0.01}
    block = {"mode": "run", "frontier": str(tmp_path / "frontier"), "simulated": tiny}
    job = {"work": [1] * 2, "micro_batches": 2, "steps": LOOKS[-1] + 1, "look_after": LOOKS}
    finished = run(tmp_path / "job", 2, perseus=block, **job)
    for rank, report in enumerate(finished.ranks):
        early, late = report["resources"]
        print(f"rank {rank}: after {LOOKS[0]} iterations {early}, after {LOOKS[-1]} {late}")
        assert late["threads"] == early["threads"]
        assert late["handles"] == early["handles"]
        # Unfinished work, such as a comparison's blocks and a timeline, has up to about 600 objects.
        assert late["objects"] - early["objects"] < 1000, "fewer than one object per two iterations"
        assert late["memory_bytes"] - early["memory_bytes"] < 6e6, "less than 3 kB per iteration"
    assert len(finished.iterations()) == LOOKS[-1] + 1


def test_a_checkpoint_in_the_middle_of_profiling_is_resumed_with_the_same_losses_and_goal(tmp_path):
    goal = {"max_slowdown": None}
    ending = {"until": ["profile", 3], "save_at_end": True}
    first = run(tmp_path / "first", 2, perseus=AUTO, steps=1000, goal=goal, **ending)
    assert first.iterations()[-1]["phase"] == "profile"
    output = tmp_path / "first" / "perseus"
    resumed = {"resume_from": str(tmp_path / "first" / "checkpoint"), "steps": 1000, "until": ["run", 3]}
    second = run(tmp_path / "second", 2, perseus={**AUTO, "output_dir": str(output)}, **resumed)
    steps = len(first.ranks[0]["losses"]) + len(second.ranks[0]["losses"])
    without = run(tmp_path / "without", 2, steps=steps, save_at_end=True)
    for ours, begun, theirs in zip(second.ranks, first.ranks, without.ranks, strict=True):
        assert begun["losses"] + ours["losses"] == theirs["losses"]
        assert ours["weights"] == theirs["weights"]
    records = first.iterations()  # both runs write to the same file
    assert [r["iteration"] for r in records] == list(range(1, steps + 1))
    plans = (output / "frontier.csv").read_text().splitlines()[1:]
    assert records[-1]["phase"] == "run"
    assert records[-1]["plan"] == len(plans) - 1
