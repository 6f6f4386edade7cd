"""Profiling where something is odd or goes wrong: training is what it would have been, no profile is corrupt."""

import math

import pytest
from job import run

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.instruction import Kind

pytestmark = [pytest.mark.integration, pytest.mark.extended]
PROFILE = {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8, "max_window_s": 0.2}
SIMULATED = {"longest_instruction_s": 0.02}
JOB = {"ranks": 2, "work": [3] * 4, "steps": 26}


def both(folder, mode, simulated=None, **job):
    """Run a job without Perseus and with it; return both."""
    block = {"mode": mode, "profile": PROFILE, "simulated": {**SIMULATED, **(simulated or {})}}
    return run(folder / "without", **{**JOB, **job}), run(folder / mode, perseus=block, **{**JOB, **job})


def assert_same_training(without, perseus):
    for ours, theirs in zip(perseus.ranks, without.ranks, strict=True):
        assert repr(ours["losses"]) == repr(theirs["losses"])  # NaNs are equal by their names only
        assert ours["weights"] == theirs["weights"]
        assert ours["random"] == theirs["random"]


def test_one_micro_batch_and_a_slow_energy_counter(tmp_path):
    without, perseus = both(tmp_path, "profile", {"counter_period_s": 0.3}, micro_batches=1, steps=64)
    assert_same_training(without, perseus)
    profile = StageProfile.load(tmp_path / "profile" / "perseus")
    assert profile.info.micro_batches == 1
    assert {kind for _, kind in profile.keys} >= {Kind.FORWARD, Kind.BACKWARD}


def test_a_frozen_first_stage_with_activation_checkpointing(tmp_path):
    without, perseus = both(tmp_path, "auto", frozen_layers=2, checkpoint_every=1, deepspeed={"gradient_clipping": 0.0})
    assert_same_training(without, perseus)
    StageProfile.load(tmp_path / "auto" / "perseus")


def test_a_loss_that_is_not_a_number_in_a_folder_with_an_odd_name(tmp_path):
    tmp_path = tmp_path / "lr=0.1, {ß} 'x'"
    without, perseus = both(tmp_path, "auto", nan_step=2)
    assert_same_training(without, perseus)
    assert math.isnan(perseus.ranks[0]["losses"][-1])
    StageProfile.load(tmp_path / "auto" / "perseus")


def test_fp16_whose_loss_scale_skips_steps_while_profiling(tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    without, perseus = both(tmp_path, "auto", deepspeed={"fp16": fp16, "zero_optimization": {"stage": 1}})
    assert_same_training(without, perseus)
    assert perseus.ranks[0]["skipped_steps"] == without.ranks[0]["skipped_steps"] > 3
    StageProfile.load(tmp_path / "auto" / "perseus")


def test_bf16_with_zero_1_as_on_gpus(tmp_path):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    without, perseus = both(tmp_path, "profile", deepspeed=config)
    assert_same_training(without, perseus)
    StageProfile.load(tmp_path / "profile" / "perseus")


def test_a_full_disk(tmp_path):
    without, perseus = both(tmp_path, "auto", file_limit_bytes=600)
    assert_same_training(without, perseus)
    assert not (tmp_path / "auto" / "perseus" / "profile.csv").exists()
    assert perseus.output.count("Training goes on at default clocks") == 2  # once on each rank


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    block = {"mode": "profile", "profile": PROFILE, "simulated": SIMULATED}
    whole = run(tmp_path / "job", perseus=block, **JOB)
    assert whole.ranks
    folder = tmp_path / "job" / "perseus"
    first = StageProfile.load(folder / "measured.csv")
    # As if killed after the last clock of a second search, but before its profile was written.
    (folder / "measured.csv").touch()
    again = run(tmp_path / "job", perseus=block, **JOB)
    assert again.ranks
    assert "already measured" in again.output
    passes = [m for m in StageProfile.load(folder / "measured.csv").measurements if m.kind is not Kind.TAIL]
    assert passes == [m for m in first.measurements if m.kind is not Kind.TAIL]
