"""Profiles of lengths that were not measured, estimated from measured lengths."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import synthetic_profile

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.lengths import fit_by_length, profile_for_length, typical_error

AT_1 = synthetic_profile(2, load_s={0: 0.01}, blocking_power_w=80.0)


def factor(length, fixed=0.1, attention=0.15):
    """Return the time of a pass relative to that at length 1."""
    return fixed + (1 - fixed - attention) * length + attention * length**2


def profile_at(length, noise=0.0, draw=None, **parts):
    """Return the profile of a length, with random errors given by its quality."""
    rows, quality = [], []
    for row in AT_1.measurements:
        of_time, of_energy = 1 + noise * (draw.standard_normal(2) if draw else np.zeros(2))
        times = factor(length, **parts)
        rows.append(replace(row, time_s=row.time_s * times * of_time, energy_j=row.energy_j * times * of_energy))
        place = {"stage": row.stage, "kind": row.kind, "clock_mhz": row.clock_mhz}
        quality.append(RowQuality(**place, samples=9, time_relative_error=noise, energy_relative_error=noise))
    info = AT_1.info.model_copy(update={"rows": quality, "load_s": {0: 0.01 * length}})
    return StageProfile(rows, info)


def errors(found, length, **parts):
    """Return the relative errors of the times of a profile."""
    truth = {(m.stage, m.kind, m.clock_mhz): m.time_s for m in profile_at(length, **parts).measurements}
    return np.array([m.time_s / truth[m.stage, m.kind, m.clock_mhz] - 1 for m in found.measurements])


@given(
    fixed=st.floats(0, 0.4),
    attention=st.floats(0, 0.5),
    lengths=st.lists(st.integers(1, 20), min_size=3, max_size=5, unique=True),
    wanted=st.floats(1, 20),
)
@settings(max_examples=30, deadline=None)
def test_what_follows_the_formula_is_predicted_exactly(fixed, attention, lengths, wanted):
    parts = {"fixed": fixed, "attention": attention}
    found = profile_for_length({length / 10: profile_at(length / 10, **parts) for length in lengths}, wanted / 10)
    assert np.abs(errors(found, wanted / 10, **parts)).max() < 1e-6
    assert found.info.load_s[0] == pytest.approx(0.001 * wanted, rel=1e-6)
    assert found.keys == AT_1.keys


def test_errors_of_the_profiles_become_error_bars_which_are_as_large_as_the_errors():
    draw = np.random.default_rng(3)
    known = {length: profile_at(length, 0.01, draw) for length in (0.5, 0.75, 1.0, 1.5)}
    for length in (0.6, 1.2, 2.0):
        found = profile_for_length(known, length)
        bars = np.array([row.time_relative_error for row in found.info.rows])
        assert 0.5 < np.sqrt(np.mean((errors(found, length) / bars) ** 2)) < 1.3
        assert {row.samples for row in found.info.rows} == {0}
    inside, outside = (typical_error(profile_for_length(known, length)) for length in (0.9, 3.0))
    assert inside < 0.01
    assert outside > 3 * inside
    # As if a longer input needed another kernel.
    follows = {length: profile_at(length) for length in (0.5, 0.7, 0.9, 1.1, 1.3)}
    jumps = {**follows, 0.9: profile_at(0.9 * 1.15)}
    assert typical_error(profile_for_length(jumps, 1.0)) > 4 * typical_error(profile_for_length(follows, 1.0))


def test_a_clock_that_one_length_lacks_has_no_row_and_tails_are_those_of_the_nearest_length():
    tail = Measurement(0, Kind.TAIL, 1410, 0.01, 2.0)
    profiles = {}
    for length in (0.5, 1.0, 1.5):
        full = profile_at(length)
        kept = [row for row in full.measurements if length != 1.0 or row.clock_mhz != 900]
        of_length = replace(tail, time_s=0.01 * length)
        rows = [row for row in full.info.rows if length != 1.0 or row.clock_mhz != 900]
        profiles[length] = StageProfile([*kept, of_length], ProfileInfo(rows=rows))
    found = profile_for_length(profiles, 1.1)
    assert 900 not in {row.clock_mhz for row in found.measurements}
    assert found.at(0, Kind.TAIL, 1410).time_s == 0.01


@given(fixed=st.floats(0, 0.4), attention=st.floats(0, 0.5), wanted=st.floats(50, 300))
@settings(max_examples=30, deadline=None)
def test_passes_of_mixed_lengths_tell_how_they_depend_on_them_also_if_some_are_held_up(fixed, attention, wanted):
    draw = np.random.default_rng(4)
    lengths = draw.uniform(50, 300, 40)
    times_s = 0.1 * factor(lengths / 150, fixed, attention) * draw.normal(1, 0.003, 40)
    times_s[::13] *= 1.5
    found = fit_by_length({(0, Kind.FORWARD): [*zip(lengths, times_s, strict=True)]}, 150)
    assert found.factors(150) == {(0, Kind.FORWARD): pytest.approx(1)}
    expected = factor(wanted / 150, fixed, attention)
    assert found.factors(wanted)[0, Kind.FORWARD] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("lengths", [[], [100.0, 100.1] * 20, [80, 120]])
def test_lengths_that_hardly_vary_or_are_few_tell_nothing(lengths):
    assert fit_by_length({(0, Kind.FORWARD): [(length, length) for length in lengths]}, 100) is None


def test_lengths_with_which_passes_have_nothing_to_do_explain_nothing():
    draw = np.random.default_rng(5)
    times = [*zip(draw.uniform(50, 150, 200), 0.1 * draw.uniform(0.5, 1.5, 200), strict=True)]
    found = fit_by_length({(0, Kind.FORWARD): times}, 100)
    assert found is None or found.factors(150)[0, Kind.FORWARD] == pytest.approx(1, abs=0.15)
