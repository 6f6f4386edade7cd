import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import lowtime_frontier, stage_profile

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ConfigError, FrontierError
from perseus_ds.optimizer.emulation import BusyTotals, Curve, EmulatedJob, busy_at_highest_clock, emulate
from perseus_ds.pipeline.instruction import Instruction, Kind

STAGES = 8
POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
PIPELINES = {12: 128, 24: 64, 48: 32, 96: 16}
INTRINSIC = {"a100-sxm": [15.2, 14.2, 13.6, 13.3], "a40": [11.8, 10.2, 9.3, 8.9]}


def published(gpu, micro_batches, slowdowns):
    time_s, energy_j = np.loadtxt(lowtime_frontier(gpu, micro_batches), delimiter=",", skiprows=1, unpack=True)
    streams = [
        [Instruction(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches)]
        for stage in range(STAGES)
    ]
    busy = busy_at_highest_clock(StageProfile.load(stage_profile(gpu)), streams)
    job = EmulatedJob(PIPELINES[micro_batches], 8, POWER_W[gpu], time_scale=10, energy_scale=10)
    return emulate(Curve(time_s, energy_j), busy, job, slowdowns)


@pytest.mark.parametrize("gpu", list(POWER_W))
@pytest.mark.parametrize("case", range(4))
def test_the_published_savings_without_a_straggler_come_out(gpu, case):
    micro_batches = list(PIPELINES)[case]
    assert published(gpu, micro_batches, []).intrinsic * 100 == pytest.approx(INTRINSIC[gpu][case], abs=0.1)


@pytest.mark.parametrize(("gpu", "percent"), [("a100-sxm", 27.0), ("a40", 23.6)])
def test_the_published_savings_with_a_straggler_come_out(gpu, percent):
    result = published(gpu, 96, [1.2])
    assert result.stragglers[0].saving * 100 == pytest.approx(percent, abs=0.1)


# One rank, to compute by hand: two plans, 10 s at 1000 J and 12 s at 900 J; at the highest clock 8 s busy, 1100 J.
HAND = (Curve(np.array([12.0, 10.0]), np.array([900.0, 1000.0])), BusyTotals(1, 8.0, 1100.0))


def test_the_accounting_by_hand():
    result = emulate(*HAND, EmulatedJob(pipelines=3, gpus_per_stage=2, blocking_power_w=50.0), [1.0, 1.3])
    baseline = 2 * (1100 + 50 * (10 - 8))
    assert result.baseline_j == baseline
    assert result.intrinsic == pytest.approx(1 - 2000 / baseline)
    assert result.stragglers[0].saving == pytest.approx(result.intrinsic)
    ours = 1.3 * 2000 + 2 * (1800 + 100 * (13 - 12))
    without = 1.3 * baseline + 2 * (baseline + 100 * (13 - 10))
    assert result.stragglers[1].saving == pytest.approx(1 - ours / without)
    assert (result.shortest_s, result.t_star_s) == (10.0, 12.0)


def test_a_plan_that_ends_exactly_with_the_straggler_is_in_time():
    result = emulate(*HAND, EmulatedJob(2, 1, 50.0), [1.2])
    # The straggler ends after 12 s, which is when the plan of 900 J ends: no pipeline waits.
    ours, without = 1.2 * 1000 + 900, 1.2 * 1200 + 1200 + 50 * (12 - 10)
    assert result.stragglers[0].saving == pytest.approx(1 - ours / without)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.1, 100), st.lists(st.floats(1.0, 2.0), min_size=1, max_size=4), st.integers(1, 64))
def test_scaling_time_and_energy_alike_changes_no_saving(scale, slowdowns, pipelines):
    plain = emulate(*HAND, EmulatedJob(pipelines, 1, 50.0), slowdowns)
    scaled = emulate(*HAND, EmulatedJob(pipelines, 8, 50.0, time_scale=scale, energy_scale=scale), slowdowns)
    assert scaled.intrinsic == pytest.approx(plain.intrinsic)
    assert [s.saving for s in scaled.stragglers] == pytest.approx([s.saving for s in plain.stragglers])
    assert scaled.t_star_s == pytest.approx(plain.t_star_s * scale)


@pytest.mark.parametrize("slowdown", [0.9, float("nan")])
def test_a_straggler_is_not_faster(slowdown):
    with pytest.raises(ConfigError, match="straggler="):
        emulate(*HAND, EmulatedJob(2, 1, 50.0), [slowdown])


@pytest.mark.parametrize(
    "job", [(0, 1, 50.0), (1, 0, 50.0), (1, 1, -1.0), (1, 1, 50.0, 0.0), (1, 1, 50.0, 1.0, float("nan"))]
)
def test_an_impossible_job_is_refused(job):
    with pytest.raises(ConfigError):
        EmulatedJob(*job)


@pytest.mark.parametrize("times", [[], [0.0], [float("nan")]])
def test_an_impossible_frontier_is_refused(times):
    with pytest.raises(FrontierError, match="at least one plan, with positive times and energies"):
        Curve(np.array(times), np.ones(len(times)))
