"""Clients with habits of their own train bit for bit as without Perseus, on two real ranks, in every mode."""

import json
from pathlib import Path

import pytest
from forked import run_ranks
from job import ENVIRONMENT, QUICK_PROFILE, SIMULATED

SCRIPT = Path(__file__).parents[1] / "support" / "client_job.py"

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def run(folder, client, steps=None, ranks=2, **block):
    folder.mkdir()
    if block:
        block = {"device": "simulated", "output_dir": str(folder / "perseus"), "simulated": SIMULATED, **block}
    (folder / "job.json").write_text(json.dumps({"client": client, "perseus": block, "steps": steps}))
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
    returncode, output = run_ranks(folder, ranks, environment, [str(SCRIPT), str(folder)])
    assert returncode == 0, output[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)], output


def records(folder):
    return [json.loads(line) for line in (folder / "perseus" / "run.jsonl").read_text().splitlines()]


def assert_same(ours, theirs):
    for rank, other in zip(ours, theirs, strict=True):
        assert {k: rank[k] for k in ("losses", "weights", "random", "calls")} == {
            k: other[k] for k in ("losses", "weights", "random", "calls")
        }


def test_a_zero_bubble_schedule_with_commands_of_its_own_is_planned(tmp_path):
    """As Megatron-DeepSpeed's; the schedule and its global live in the script alone, and one command is unknown."""
    ours, output = run(
        tmp_path / "auto", "zero-bubble", mode="auto", profile={"sampling": "stride", "clock_stride": 24}
    )
    assert all(rank["finished"] for rank in ours), output[-4000:]
    plain, _ = run(tmp_path / "plain", "zero-bubble", steps=len(ours[0]["losses"]))
    assert_same(ours, plain)
    assert ours[0]["calls"]["backward_only"] == ours[0]["calls"]["weight_pass"] > 0
    phases = {record["phase"] for record in records(tmp_path / "auto") if "iteration" in record}
    assert phases >= {"warm-up", "profile", "plan"}
    assert [record for record in records(tmp_path / "auto") if record.get("event") == "failure"] == []
    assert output.count("does not know: Compress") == 1
    profile = (tmp_path / "auto" / "perseus" / "profile.csv").read_text()
    assert {line.split(",")[1] for line in profile.splitlines()[1:]} >= {
        "forward",
        "backward",
        "backward_input",
        "backward_weight",
    }
    said = json.loads((tmp_path / "auto" / "perseus" / "profile.json").read_text())
    assert {other["command"] for other in said["others"]} == {"Compress"}
    frontier = json.loads((tmp_path / "auto" / "perseus" / "frontier.json").read_text())
    assert "backward_input" in json.dumps(frontier)


def test_patched_steps_own_engine_tied_layers_and_zero_1_are_left_as_they_are(tmp_path):
    """As diffusion-pipe's steps, which load before they receive, and its patch after initialize."""
    ours, output = run(tmp_path / "profile", "patched", mode="profile", profile=QUICK_PROFILE)
    assert all(rank["finished"] for rank in ours), output[-4000:]
    plain, _ = run(tmp_path / "plain", "patched", steps=len(ours[0]["losses"]))
    assert_same(ours, plain)
    assert ours[0]["calls"]["reduce_grads"] == ours[0]["calls"]["own train_batch"] == len(ours[0]["losses"])
    assert "it could not put back" not in output
    assert "passes cannot be repeated" not in output


@pytest.mark.extended
def test_tensor_parallel_layers_and_their_tracker_of_generators_are_left_as_they_are(tmp_path):
    """As Megatron-DeepSpeed: a topology of its own, and dropout from states that the tracker keeps."""
    ours, output = run(tmp_path / "profile", "three dimensions", ranks=4, mode="profile", profile=QUICK_PROFILE)
    assert all(rank["finished"] for rank in ours), output[-4000:]
    plain, _ = run(tmp_path / "plain", "three dimensions", ranks=4, steps=len(ours[0]["losses"]))
    assert_same(ours, plain)
    assert "it could not put back" not in output
    said = json.loads((tmp_path / "profile" / "perseus" / "profile.json").read_text())
    assert (said["pipeline_ranks"], said["tensor_parallel"]) == (2, 2)
