"""Choice of the clocks to measure."""

from hypothesis import given, settings
from hypothesis import strategies as st
from true_profiles import truth

from perseus_ds.gpu.device_models import DEVICES
from perseus_ds.profiler.clock_search import AdaptiveSampler, Sweep


def run(sampler, profile):
    asked, rows = [], []
    while clocks := sampler.next_clocks(rows):
        assert clocks == sorted(clocks, reverse=True)
        asked += clocks
        rows += [m for m in profile.measurements if m.clock_mhz in clocks]
    return asked


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(sorted(DEVICES)), st.integers(3, 20), st.integers(0, 60))
def test_the_adaptive_sampler_returns_each_clock_once_and_keeps_its_budget(name, budget, lowest):
    model = DEVICES[name]
    clocks = model.clocks_mhz[lowest:]
    asked = run(AdaptiveSampler(clocks, blocking_power_w=model.blocking_power_w, budget=budget), truth(name, clocks))
    assert len(asked) == len(set(asked)) <= budget
    assert set(asked) <= set(clocks)
    assert asked[0] == clocks[-1]


def test_a_sweep_stops_when_energy_keeps_rising():
    model = DEVICES["a100-sxm"]
    profile = truth("a100-sxm", model.clocks_mhz)
    for stride in (1, 4):
        asked = run(Sweep(model.clocks_mhz[::-1][::stride]), profile)
        assert asked == list(model.clocks_mhz[::-1][::stride][: len(asked)])
        assert 5 < len(asked) < len(model.clocks_mhz[::stride])


def test_between_the_highest_clock_and_the_one_that_a_limited_gpu_reaches_nothing_is_measured_first():
    model = DEVICES["h100-sxm"]
    reached = round(model.reached_clock_mhz(model.top_clock_mhz))
    sampler = AdaptiveSampler(model.clocks_mhz, blocking_power_w=model.blocking_power_w, budget=8, default_mhz=reached)
    highest, second, *_ = asked = run(sampler, truth("h100-sxm", model.clocks_mhz))
    assert highest == model.top_clock_mhz
    assert abs(second - reached) <= model.clock_step_mhz
    assert min(asked) < 0.6 * reached
