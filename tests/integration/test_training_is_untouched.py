"""Training under Perseus is, bit for bit, training without it."""

import json
import random

import pytest
from job import QUICK_PROFILE, run

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.pipeline.schedule import read_schedule, schedule_class

pytestmark = pytest.mark.integration
WORK = [4, 2, 1, 3]


def save_frontier(folder, schedule, seed=0, clocks=DEVICES["a100-sxm"].clocks_mhz[40:], simulated=True):
    """Write a frontier of one plan with a random clock for every instruction."""
    stages = schedule_class(schedule)
    ranks = 2
    streams = read_schedule(stages, ranks=ranks, micro_batches=4).instructions
    instructions = tuple(tuple(i for i in stream if i.kind.value != "tail") for stream in streams)
    draw = random.Random(seed)
    plan = FrequencyPlan(instructions, tuple(tuple(draw.choice(clocks) for _ in s) for s in instructions), 1.0, 100.0)
    provenance = Provenance(
        schedule=schedule, micro_batches=4, stages=2, blocking_power_w=80.0, solver="none", simulated=simulated
    )
    Frontier((plan,), 1.0, plan, provenance).save(folder)
    return str(folder / "frontier.json")


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_losses_and_weights_are_bit_identical_with_any_plan_and_without_perseus(tmp_path, schedule):
    job = {"ranks": 2, "work": WORK, "dualpipev": schedule == "dualpipev", "evaluate_after": 2}
    without = run(tmp_path / "without", **job).ranks
    longer = {**job, "steps": 30}  # profiling waits until times are steady
    longer_without = run(tmp_path / "longer", **longer).ranks
    frontier = save_frontier(tmp_path / "frontier", schedule)
    blocks = {
        "disabled": {"enabled": False},
        "observe": {"mode": "observe"},
        "run": {"mode": "run", "frontier": frontier},
        "profile": {"mode": "profile", "profile": QUICK_PROFILE},
    }
    for name, block in blocks.items():
        profiling = name == "profile"
        finished = run(tmp_path / name, perseus=block, **(longer if profiling else job))
        for ours, theirs in zip(finished.ranks, longer_without if profiling else without, strict=True):
            assert ours["losses"] == theirs["losses"], name
            assert ours["weights"] == theirs["weights"], name
            assert ours["random"] == theirs["random"], name
        base = "DualPipeVEngine" if schedule == "dualpipev" else "PipelineEngine"
        assert {rank["engine"] for rank in finished.ranks} == {base}  # which some versions of DeepSpeed test
        assert {rank["attached"] for rank in finished.ranks} == {name != "disabled"}
        assert all(base in rank["bases"] for rank in finished.ranks)
    assert len(without[0]["losses"]) == 7
    under_plan = [r for r in run_records(tmp_path / "run") if r.get("phase") == "run"]
    # Every instruction but the first of each rank is preceded by another clock, nearly always.
    assert min(r["clock_changes"] for r in under_plan) > 10
    assert {r["plan"] for r in under_plan} == {0}
    profile = (tmp_path / "profile" / "perseus" / "profile.csv").read_text().splitlines()
    kinds_and_stages = {tuple(line.split(",")[:2]) for line in profile[1:] if ",tail," not in line}
    assert len(kinds_and_stages) == (8 if schedule == "dualpipev" else 4)
    said = json.loads((tmp_path / "profile" / "perseus" / "profile.json").read_text())
    assert said["simulated"] is True
    assert said["gpu"] == "simulated A100-SXM"


def run_records(folder):
    return [json.loads(line) for line in (folder / "perseus" / "run.jsonl").read_text().splitlines()]


def test_a_plan_for_other_micro_batches_is_refused_before_the_first_step(tmp_path):
    frontier = save_frontier(tmp_path / "frontier", "1f1b")
    block = {"mode": "run", "frontier": frontier}
    finished = run(tmp_path / "job", ranks=2, micro_batches=6, perseus=block)
    assert finished.returncode != 0
    assert "Plan does not fit this schedule: rank 0, instruction" in finished.output
    assert not (tmp_path / "job" / "perseus" / "run.jsonl").exists()


def test_clocks_the_gpu_does_not_have_are_refused_before_the_first_step(tmp_path):
    frontier = save_frontier(tmp_path / "frontier", "1f1b", clocks=(1111, 1410))
    finished = run(tmp_path / "job", ranks=2, perseus={"mode": "run", "frontier": frontier})
    assert finished.returncode != 0
    assert "simulated A100-SXM has no 1111 MHz" in finished.output


def test_without_permission_nothing_starts(tmp_path):
    block = {"mode": "profile", "simulated": {"may_lock": False}}
    finished = run(tmp_path / "job", ranks=2, perseus=block)
    assert finished.returncode != 0
    assert "may not set clocks" in finished.output
    assert "CAP_SYS_ADMIN" in finished.output
