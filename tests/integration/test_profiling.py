"""Profiles measured on real ranks. Unusual jobs and failures must not change training."""

import json
import math

import pytest
from job import QUICK_PROFILE, assert_same_without_perseus, run

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.main import main
from perseus_ds.pipeline.instruction import Kind

pytestmark = [pytest.mark.integration, pytest.mark.extended]


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
    # profile.csv omits tails that draw no more power than waiting; whether they do depends on the measurement.
    measured = StageProfile.load(tmp_path / "profile" / "perseus" / "measured.csv")
    for stage in (0, 1):
        clocks = [measured.options(stage, kind).clock_mhz.tolist() for kind in (Kind.TAIL, Kind.FORWARD)]
        assert clocks[0] == clocks[1], "a heavy tail is measured at every clock"

    out = tmp_path / "frontier"
    assert main(["optimize", "--profile", f"{tmp_path}/profile/perseus/profile.csv", "--out", f"{out}"]) == 0
    block = {
        "mode": "run",
        "frontier": str(out),
        "simulated": heavy,
        "goal": {"max_slowdown": 0.1},
    }
    running = run(tmp_path / "run", perseus=block, steps=1000, until=["run", 4], **job)
    records = running.iterations("run")
    assert records
    # The job's energy is that of both pipelines.
    plan = json.loads((out / "frontier.json").read_text())["plans"][records[0]["plan"]]
    assert records[0]["predicted_energy_j"] == pytest.approx(2 * plan["energy_j"], abs=0.01)
    for record in records:
        assert record["simulated"] is True
        assert record["failed_ranks"] == []
        assert record["energy_j"] == pytest.approx(sum(record["energy_by_pipeline_j"]), abs=0.01)
        assert len(record["energy_by_pipeline_j"]) == 2


# The phase that follows profiling.
AFTER = {"profile": "observe", "auto": "optimizing"}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}, "zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
FROZEN = {"frozen_layers": 2, "checkpoint_every": 1, "deepspeed": {"gradient_clipping": 0.0}}


@pytest.mark.parametrize(
    ("folder", "mode", "job"),
    [
        ("a frozen first stage with activation checkpointing", "auto", FROZEN),
        ("a loss that is not a number: lr=0.1, {ß} 'x'", "auto", {"nan_step": 2}),
        ("fp16 whose loss scale skips steps", "auto", {"deepspeed": FP16}),
        ("bf16 with ZeRO-1 as on GPUs", "profile", {"deepspeed": BF16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_odd_job_is_profiled_and_trains_the_same(tmp_path, folder, mode, job):
    block = {"mode": mode, "profile": QUICK_PROFILE, "simulated": {"longest_instruction_s": 0.02}}
    folder = tmp_path / folder
    finished = run(folder / mode, 2, perseus=block, steps=1000, until=[AFTER[mode], 2], **job)
    assert_same_without_perseus(finished, 2, **job)
    kinds = {kind for _, kind in StageProfile.load(finished.folder / "perseus").keys}
    assert kinds >= {Kind.FORWARD, Kind.BACKWARD}
    if "nan_step" in job:
        assert math.isnan(finished.ranks[0]["losses"][-1])
    if "deepspeed" in job and "fp16" in job["deepspeed"]:
        assert finished.ranks[0]["skipped_steps"] > 3
