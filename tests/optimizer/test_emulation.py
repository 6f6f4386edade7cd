import numpy as np
import pytest
from emulation import emulate
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
