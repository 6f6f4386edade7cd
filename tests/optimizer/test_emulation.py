"""The accounting of ``benchmarks/emulation.py`` gives the savings that were published with the paper."""

import numpy as np
import pytest
from emulation import emulate
from profiles import lowtime_frontier, stage_profile

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.instruction import Instruction, Kind

STAGES, SLOWDOWN = 8, 1.2
PIPELINES = {12: 128, 24: 64, 48: 32, 96: 16}


@pytest.mark.parametrize(
    ("gpu", "blocking_power_w", "intrinsic", "with_straggler"),
    [("a100-sxm", 83.64, [15.2, 14.2, 13.6, 13.3], 27.0), ("a40", 70.38, [11.8, 10.2, 9.3, 8.9], 23.6)],
)
def test_the_published_savings_come_out(gpu, blocking_power_w, intrinsic, with_straggler):
    found = [
        emulate(
            np.loadtxt(lowtime_frontier(gpu, micro_batches), delimiter=",", skiprows=1),
            StageProfile.load(stage_profile(gpu)),
            [
                [Instruction(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches)]
                for stage in range(STAGES)
            ],
            blocking_power_w=blocking_power_w,
            pipelines=pipelines,
            gpus_per_stage=8,
            slowdowns=[SLOWDOWN],
            time_scale=10,
            energy_scale=10,
        )
        for micro_batches, pipelines in PIPELINES.items()
    ]
    assert [one.intrinsic * 100 for one in found] == pytest.approx(intrinsic, abs=0.1)
    assert found[-1].with_straggler[SLOWDOWN] * 100 == pytest.approx(with_straggler, abs=0.1)
