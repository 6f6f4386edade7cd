import numpy as np
import pytest
from emulation import emulate
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import lowtime_frontier, stage_profile

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.pipeline.instruction import Instruction, Kind

STAGES = 8
POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
PIPELINES = {12: 128, 24: 64, 48: 32, 96: 16}
INTRINSIC = {"a100-sxm": [15.2, 14.2, 13.6, 13.3], "a40": [11.8, 10.2, 9.3, 8.9]}


def published(gpu, micro_batches, slowdowns):
    plans = np.loadtxt(lowtime_frontier(gpu, micro_batches), delimiter=",", skiprows=1)
    streams = [
        [Instruction(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches)]
        for stage in range(STAGES)
    ]
    return emulate(
        plans,
        StageProfile.load(stage_profile(gpu)),
        streams,
        blocking_power_w=POWER_W[gpu],
        pipelines=PIPELINES[micro_batches],
        gpus_per_stage=8,
        slowdowns=slowdowns,
        time_scale=10,
        energy_scale=10,
    )


@pytest.mark.parametrize("gpu", list(POWER_W))
@pytest.mark.parametrize("case", range(4))
def test_the_published_savings_without_a_straggler_come_out(gpu, case):
    micro_batches = list(PIPELINES)[case]
    assert published(gpu, micro_batches, []).intrinsic * 100 == pytest.approx(INTRINSIC[gpu][case], abs=0.1)


@pytest.mark.parametrize(("gpu", "percent"), [("a100-sxm", 27.0), ("a40", 23.6)])
def test_the_published_savings_with_a_straggler_come_out(gpu, percent):
    result = published(gpu, 96, [1.2])
    assert result.with_straggler[1.2] * 100 == pytest.approx(percent, abs=0.1)


# One rank, for manual calculation: plans with 10 s, 1000 J and 12 s, 900 J; at the highest clock 8 s busy, 1100 J.
HAND = (
    np.array([(12.0, 900.0), (10.0, 1000.0)]),
    StageProfile([Measurement(0, Kind.FORWARD, 1410, 8.0, 1100.0)]),
    [[Instruction(0, Kind.FORWARD, 0)]],
)


def test_the_accounting_by_hand():
    result = emulate(*HAND, blocking_power_w=50.0, pipelines=3, gpus_per_stage=2, slowdowns=[1.0, 1.3])
    baseline = 2 * (1100 + 50 * (10 - 8))
    assert result.baseline_j == baseline
    assert result.intrinsic == pytest.approx(1 - 2000 / baseline)
    assert result.with_straggler[1.0] == pytest.approx(result.intrinsic)
    ours = 1.3 * 2000 + 2 * (1800 + 100 * (13 - 12))
    without = 1.3 * baseline + 2 * (baseline + 100 * (13 - 10))
    assert result.with_straggler[1.3] == pytest.approx(1 - ours / without)
    assert (result.shortest_s, result.t_star_s) == (10.0, 12.0)


def test_a_plan_that_ends_exactly_with_the_straggler_is_in_time():
    result = emulate(*HAND, blocking_power_w=50.0, pipelines=2, slowdowns=[1.2])
    # The straggler ends after 12 s, exactly when the plan of 900 J ends, so no pipeline waits.
    ours, without = 1.2 * 1000 + 900, 1.2 * 1200 + 1200 + 50 * (12 - 10)
    assert result.with_straggler[1.2] == pytest.approx(1 - ours / without)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.1, 100), st.lists(st.floats(1.0, 2.0), min_size=1, max_size=4), st.integers(1, 64))
def test_scaling_time_and_energy_alike_changes_no_saving(scale, slowdowns, pipelines):
    job = {"blocking_power_w": 50.0, "pipelines": pipelines, "slowdowns": slowdowns}
    plain = emulate(*HAND, **job)
    scaled = emulate(*HAND, **job, gpus_per_stage=8, time_scale=scale, energy_scale=scale)
    assert scaled.intrinsic == pytest.approx(plain.intrinsic)
    assert scaled.with_straggler == pytest.approx(plain.with_straggler)
    assert scaled.t_star_s == pytest.approx(plain.t_star_s * scale)
