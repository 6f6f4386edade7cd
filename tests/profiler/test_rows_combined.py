"""Rows of ranks that share a stage, by data or tensor parallelism, are combined."""

import pytest

from perseus_ds.artifacts.profile_csv import Measurement
from perseus_ds.artifacts.profile_metadata import RowQuality
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.rows import MeasuredRow, combine_rows


def row(stage, time_s, energy_j, *, samples=9, error=0.01, reached=None):
    quality = RowQuality(
        stage=stage,
        kind=Kind.FORWARD,
        clock_mhz=1200,
        samples=samples,
        time_relative_error=0.002 * samples,
        energy_relative_error=error,
        reached_mhz=reached,
    )
    return MeasuredRow(Measurement(stage, Kind.FORWARD, 1200, time_s, energy_j), quality)


def test_the_slowest_time_and_the_mean_energy_of_all_ranks_of_a_stage():
    # Two pipelines of two stages, each stage on two tensor-parallel ranks.
    ranks = [
        row(0, 0.10, 30.0),
        row(0, 0.11, 32.0, samples=5),
        row(0, 0.10, 34.0),
        row(0, 0.09, 28.0),
        row(1, 0.2, 50.0),
    ]
    first, second = combine_rows(ranks)
    assert first.measurement == Measurement(0, Kind.FORWARD, 1200, 0.11, 31.0)
    assert first.quality.samples == 5
    assert first.quality.time_relative_error == pytest.approx(0.01)  # the slowest rank's
    assert first.quality.energy_relative_error == pytest.approx(0.005)  # that of a mean of four
    assert second.measurement == ranks[-1].measurement


def test_a_clock_counts_as_not_reached_if_one_rank_did_not_reach_it():
    (found,) = combine_rows([row(0, 0.1, 30.0), row(0, 0.12, 30.0, reached=1100)])
    assert found.quality.reached_mhz == 1100


def test_the_error_is_unknown_if_it_is_unknown_on_one_rank():
    (found,) = combine_rows([row(0, 0.1, 30.0), row(0, 0.1, 30.0, error=None)])
    assert found.quality.energy_relative_error is None
