"""Choice of the clocks to measure, and estimates from few or noisy rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import WORK_S, truth

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler import estimates
from perseus_ds.profiler.clock_search import AdaptiveSampler, Sweep
from perseus_ds.profiler.estimates import denoise, estimate_all
from perseus_ds.simulation.device_models import DEVICES


def errors(profile, true):
    return np.array(
        [
            (m.time_s / t.time_s - 1, m.energy_j / t.energy_j - 1)
            for m in profile.measurements
            for t in [true.at(m.stage, m.kind, m.clock_mhz)]
        ]
    )


def noisy(profile, rng):
    """Return a profile with noise of 1 % in times and 2 % in energies."""
    rows = []
    for m in profile.measurements:
        time, energy = 1 + rng.standard_normal(2) * (0.01, 0.02)
        rows.append(replace(m, time_s=m.time_s * time, energy_j=m.energy_j * energy))
    known = {"samples": 1, "time_relative_error": 0.01, "energy_relative_error": 0.02}
    quality = [RowQuality(stage=m.stage, kind=m.kind, clock_mhz=m.clock_mhz, **known) for m in rows]
    return StageProfile(rows, ProfileInfo(rows=quality))


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_rows_are_kept_without_noise_and_estimated_between_measured_clocks(name):
    clocks = DEVICES[name].clocks_mhz[40:]
    true = truth(name, clocks, {**WORK_S, (0, Kind.TAIL): 0.05})
    assert np.abs(errors(denoise(true, clocks), true)).max() < 0.002
    completed = denoise(truth(name, clocks[::4]), clocks)
    assert {m.clock_mhz for m in completed.measurements} > set(clocks[::4])
    # On the H100, power drops most where its limit ends, between two of the clocks measured here.
    assert np.abs(errors(completed, true)).max() < (0.04 if name == "h100-sxm" else 0.015)
    samples = {row.clock_mhz: row.samples for row in completed.info.rows}
    assert all((samples[c] == 0) == (c not in clocks[::4]) for c in samples)


@settings(max_examples=5, deadline=None)
@given(st.sampled_from(sorted(DEVICES)), st.integers(0, 10_000))
def test_noise_is_reduced(name, seed):
    clocks = DEVICES[name].clocks_mhz[40:]
    true = truth(name, clocks)
    raw = noisy(true, np.random.default_rng(seed))
    before, after = (np.sqrt((errors(p, true) ** 2).mean(axis=0)) for p in (raw, denoise(raw, clocks)))
    assert (after < 0.7 * before).all()


def test_estimates_differ_from_the_truth_by_about_their_error_bars():
    clocks, off = DEVICES["a100-sxm"].clocks_mhz[40:], []
    for seed in range(4):
        found = estimate_all(noisy(truth("a100-sxm", clocks[::4]), np.random.default_rng(seed)), clocks)
        stated = [(row.time_relative_error, row.energy_relative_error) for row in found.info.rows]
        off.append(errors(found, truth("a100-sxm", clocks)) / stated)
    assert np.sqrt((np.concatenate(off) ** 2).mean(axis=0)) == pytest.approx([1.0, 1.0], abs=0.4)


def test_an_outlier_does_not_change_rows_at_other_clocks():
    clocks = DEVICES["a100-sxm"].clocks_mhz[40:]
    true = truth("a100-sxm", clocks)
    wrong = [
        replace(m, time_s=1.3 * m.time_s) if (m.stage, m.clock_mhz) == (0, clocks[20]) else m for m in true.measurements
    ]
    found = denoise(StageProfile(wrong), clocks)
    others = StageProfile([m for m in found.measurements if m.clock_mhz != clocks[20]])
    assert np.abs(errors(others, true)[:, 0]).max() < 0.03


def with_a_power_limit(clocks, limit_w=400.0):
    """Return rows of an A100 with matrix products.

    The voltage is constant up to 980 MHz and then rises linearly. The power limit is reached at about 1365 MHz; the
    board then draws 8 % more than one locked at the clock that it reaches.
    """
    rows = []
    for clock in clocks:
        power_w = 54 + 0.134 * clock * (1 + 0.00097 * max(0, clock - 980)) ** 2
        reached, drawn_w = (1290, limit_w) if power_w > 0.98 * limit_w else (clock, power_w)
        rows.append(Measurement(0, Kind.FORWARD, clock, 80.0 / reached, 80.0 / reached * drawn_w))
    return StageProfile(rows)


def test_a_third_of_the_clocks_is_enough_to_predict_the_rest_of_a_sweep_with_a_power_limit():
    clocks = list(range(210, 1411, 75))
    found = estimate_all(with_a_power_limit(clocks[::3] + clocks[-1:]), clocks)
    off = np.abs(errors(found, with_a_power_limit(clocks)))
    assert off.mean() < 0.015
    assert off.max() < 0.06


def test_where_rows_do_not_tell_the_voltage_error_bars_say_so():
    clocks = [210, 360, 660, 1365]
    found = estimate_all(with_a_power_limit(clocks, limit_w=600.0), range(210, 1366, 15))
    error = {row.clock_mhz: row.energy_relative_error for row in found.info.rows}
    assert error[450] < 0.03 < error[1110]


def test_stages_with_few_rows_have_the_voltage_of_all_stages_in_any_order():
    few, many = [210, 360, 660, 1365], list(range(210, 1411, 75))

    def error_of_few(*clocks_by_stage):
        rows = [
            replace(row, stage=stage)
            for stage, clocks in enumerate(clocks_by_stage)
            for row in with_a_power_limit(clocks, limit_w=600.0).measurements
        ]
        found = estimate_all(StageProfile(rows), range(210, 1366, 15))
        return found.info.quality[clocks_by_stage.index(few), Kind.FORWARD, 1110].energy_relative_error

    together = error_of_few(few, many)
    assert together < 0.7 * error_of_few(few)
    assert together == pytest.approx(error_of_few(many, few), rel=1e-3)


def test_rows_whose_covariance_lapack_cannot_factorise_are_an_error(monkeypatch):
    clocks = DEVICES["a100-sxm"].clocks_mhz[::8]
    monkeypatch.setattr(estimates, "dpotrf", lambda matrix, **options: (matrix, 1))
    with pytest.raises(ProfileError, match="determine no estimates"):
        denoise(truth("a100-sxm", clocks), clocks)


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


def test_the_adaptive_sampler_ends_when_no_clock_may_improve_plans():
    model = DEVICES["a100-sxm"]
    sampler = AdaptiveSampler(model.clocks_mhz, blocking_power_w=model.blocking_power_w, budget=len(model.clocks_mhz))
    assert len(run(sampler, truth("a100-sxm", model.clocks_mhz))) < 0.6 * len(model.clocks_mhz)


def test_the_adaptive_sampler_continues_below_the_least_energy_while_passes_save_more_than_waiting_draws():
    clocks, waiting_w = range(700, 1401, 25), 100.0
    rows = []
    for clock in clocks:
        time_s, effective_j = 1400 / clock, 100.0 * clock / 1400
        rows.append(Measurement(0, Kind.FORWARD, clock, time_s, effective_j + waiting_w * time_s))
    profile = StageProfile(rows)
    assert min(rows, key=lambda row: row.energy_j).clock_mhz > 1300
    assert min(run(AdaptiveSampler(clocks, blocking_power_w=waiting_w, budget=8), profile)) == 700


def test_a_sweep_stops_when_energy_keeps_rising_at_clocks_with_all_rows():
    descending = DEVICES["a100-sxm"].clocks_mhz[::-1][::4]
    profile = truth("a100-sxm", descending)
    asked = run(Sweep(descending), profile)
    assert asked == list(descending[: len(asked)])
    assert 5 < len(asked) < len(descending)
    # A clock at which an instruction has no row is ignored, so one more clock is measured.
    part = profile.where(lambda stage, kind, clock: (kind, clock) != (Kind.BACKWARD, asked[-3]))
    assert run(Sweep(descending), part) == list(descending[: len(asked) + 1])


def test_between_the_highest_clock_and_the_one_that_a_limited_gpu_reaches_nothing_is_measured_first():
    model = DEVICES["h100-sxm"]
    reached = round(model.reached_clock_mhz(model.top_clock_mhz))
    sampler = AdaptiveSampler(model.clocks_mhz, blocking_power_w=model.blocking_power_w, budget=8, default_mhz=reached)
    highest, second, *_ = asked = run(sampler, truth("h100-sxm", model.clocks_mhz))
    assert highest == model.top_clock_mhz
    assert abs(second - reached) <= model.clock_step_mhz
    assert min(asked) < 0.6 * reached
