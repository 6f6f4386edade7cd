"""Profiling where something is odd or goes wrong: training is what it would have been, no profile is corrupt."""

import math

import pytest
from job import assert_same_training, run

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.instruction import Kind

pytestmark = [pytest.mark.integration, pytest.mark.extended]
PROFILE = {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8}
SIMULATED = {"longest_instruction_s": 0.02}
JOB = {"ranks": 2}
# The phase that follows profiling.
AFTER = {"profile": "observe", "auto": "optimizing"}


def both(folder, mode, simulated=None, after=None, **job):
    """Run a job with Perseus until it has profiled, check that one without trains the same, and return the former."""
    block = {"mode": mode, "profile": PROFILE, "simulated": {**SIMULATED, **(simulated or {})}}
    perseus = run(folder / mode, perseus=block, steps=1000, until=[after or AFTER[mode], 2], **JOB, **job)
    without = run(folder / "without", steps=len(perseus.ranks[0]["losses"]), **JOB, **job)
    assert_same_training(perseus, without)
    return perseus


def profile_of(finished):
    return StageProfile.load(finished.folder / "perseus")


def test_one_micro_batch_and_a_slow_energy_counter(tmp_path):
    profile = profile_of(both(tmp_path, "profile", {"counter_period_s": 0.3}, micro_batches=1))
    assert profile.info.micro_batches == 1
    assert {kind for _, kind in profile.keys} >= {Kind.FORWARD, Kind.BACKWARD}


def test_a_frozen_first_stage_with_activation_checkpointing(tmp_path):
    frozen = {"frozen_layers": 2, "checkpoint_every": 1, "deepspeed": {"gradient_clipping": 0.0}}
    assert profile_of(both(tmp_path, "auto", **frozen)).keys


def test_a_loss_that_is_not_a_number_in_a_folder_with_an_odd_name(tmp_path):
    perseus = both(tmp_path / "lr=0.1, {ß} 'x'", "auto", nan_step=2)
    assert math.isnan(perseus.ranks[0]["losses"][-1])
    assert profile_of(perseus).keys


def test_fp16_whose_loss_scale_skips_steps_while_profiling(tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    perseus = both(tmp_path, "auto", deepspeed={"fp16": fp16, "zero_optimization": {"stage": 1}})
    assert perseus.ranks[0]["skipped_steps"] > 3
    assert profile_of(perseus).keys


def test_bf16_with_zero_1_as_on_gpus(tmp_path):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert profile_of(both(tmp_path, "profile", deepspeed=config)).keys


def test_a_full_disk(tmp_path):
    perseus = both(tmp_path, "auto", after="observe", file_limit_bytes=600)
    assert not (perseus.folder / "perseus" / "profile.csv").exists()
    assert perseus.output.count("Training goes on at default clocks") == 2  # once on each rank


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    block = {"mode": "profile", "profile": PROFILE, "simulated": SIMULATED}
    job = {"perseus": block, "steps": 1000, "until": ["observe", 1], **JOB}
    assert run(tmp_path / "job", **job).ranks
    folder = tmp_path / "job" / "perseus"
    first = StageProfile.load(folder / "measured.csv")
    # As if killed after the last clock of a second search, but before its profile was written.
    (folder / "measured.csv").touch()
    again = run(tmp_path / "job", **job)
    assert again.ranks
    assert "already measured" in again.output
    passes = [m for m in StageProfile.load(folder / "measured.csv").measurements if m.kind is not Kind.TAIL]
    assert passes == [m for m in first.measurements if m.kind is not Kind.TAIL]
