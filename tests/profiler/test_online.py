"""Rows measured during training: energies by kind, their errors, and ranks combined."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual.time import VirtualTime

from perseus_ds.artifacts.profile import Measurement, RowQuality
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Span
from perseus_ds.profiler.online import (
    MeasuredRow,
    OnlineProfiler,
    WaitingPower,
    chosen_power_w,
    combine_rows,
    pooled,
)
from perseus_ds.simulation.device_models import COMPUTE_BOUND, DEVICES, MEMORY_BOUND
from perseus_ds.simulation.gpu import SimulatedGpu

MEASURED_ON_H100 = Path(__file__).parents[1] / "data" / "h100_at_its_power_limit.json"
WORKLOAD = {Kind.FORWARD: COMPUTE_BOUND, Kind.BACKWARD: COMPUTE_BOUND, Kind.TAIL: MEMORY_BOUND}


def run_iteration(gpu, now, rng, work_s, micro_batches):
    """Run instructions with waits, and return spans and refreshes of the counter, up to 2 ms late."""
    spans, readings = [], []

    def pass_time(seconds):
        end_s = now.seconds + seconds
        while (refresh_s := (np.floor(now.seconds / 0.1 + 1e-9) + 1) * 0.1) < end_s:
            now.seconds = refresh_s + 1e-6
            readings.append((now.seconds + rng.uniform(0, 0.002), gpu.energy_j()))
        now.seconds = end_s

    def run(kind, micro_batch):
        begin_s, clock_mhz = now.seconds, gpu.clock_mhz()
        gpu.begin_work(WORKLOAD[kind])
        time_s = work_s[kind] * (1 + 0.01 * rng.standard_normal())
        pass_time(time_s * gpu.model.slowdown(clock_mhz, WORKLOAD[kind]))
        gpu.finish_work(0.0)
        spans.append(Span(Compute(Instruction(0, kind, micro_batch)), begin_s, now.seconds))

    for micro_batch in range(micro_batches):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            pass_time(rng.uniform(0, work_s[Kind.FORWARD]))
            run(kind, micro_batch)
    run(Kind.TAIL, 0)
    return spans, readings


def gpu_in(now, seed, **settings):
    return SimulatedGpu(DEVICES["a100-sxm"], lock_latency_s=0.015, timebase=now, seed=seed, **settings)


@pytest.mark.parametrize(
    ("forward_s", "seed", "conditions"),
    [
        (0.02, 0, ()),
        (0.2, 1, ()),
        (0.05, 0, ("sampled-counter",)),
        (0.05, 0, ("low-clock-waiting",)),
    ],
)
def test_rows_agree_with_the_simulated_gpu(forward_s, seed, conditions):
    now, rng = VirtualTime(), np.random.default_rng(seed)
    gpu = gpu_in(now, seed, power_noise=0.02, conditions=list(conditions))
    model = gpu.model
    work_s = {Kind.FORWARD: forward_s, Kind.BACKWARD: 2 * forward_s, Kind.TAIL: 2 * forward_s}
    profiler = OnlineProfiler(model.blocking_power_w)
    clocks = model.clocks_mhz[::-8][:6]
    for clock in clocks:
        gpu.lock_clock(clock)
        for _ in range(2):
            spans, readings = run_iteration(gpu, now, rng, work_s, micro_batches=8)
            profiler.add(clock, [spans], readings)
    rows = [row.measurement for row in profiler.rows()]
    assert len(rows) == 3 * len(clocks)
    for row in rows:
        time_s = work_s[row.kind] * model.slowdown(row.clock_mhz, WORKLOAD[row.kind])
        power_w = model.power_w(row.clock_mhz, WORKLOAD[row.kind])
        # There is one tail per iteration, so its rows have the largest errors.
        is_tail = row.kind is Kind.TAIL
        assert row.time_s == pytest.approx(time_s, rel=0.03 if is_tail else 0.02)
        assert row.energy_j == pytest.approx(time_s * power_w, rel=0.15 if is_tail else 0.04)


def test_iterations_as_long_as_an_interval_of_the_counter_do_not_hide_that_it_samples_all_the_time():
    """At the highest clock, all intervals have the same mix of instructions and waiting."""
    rng, model = np.random.default_rng(0), DEVICES["a100-sxm"]
    clocks = [1290, 1200, 1110, 1020, 930, 840]
    profiler = OnlineProfiler(model.blocking_power_w)
    for clock in clocks:
        slowdown, power_w = model.slowdown(clock) / model.slowdown(clocks[0]), model.power_w(clock)
        ends_s, powers_w, iterations = [0.0], [], []
        for _ in range(10):
            spans = []
            for kind, work_s in ((Kind.FORWARD, 0.03), (None, 0.02), (Kind.BACKWARD, 0.04), (None, 0.01)):
                begin_s = ends_s[-1]
                ends_s.append(begin_s + (work_s * slowdown if kind else work_s))
                powers_w.append((power_w if kind else model.blocking_power_w) * (1 + 0.01 * rng.standard_normal()))
                if kind:
                    spans.append(Span(Compute(Instruction(0, kind, 0)), begin_s, ends_s[-1]))
            iterations.append(spans)
        energies_j = np.concatenate([[0.0], np.cumsum(np.diff(ends_s) * powers_w)])
        at_s = np.arange(0.05, ends_s[-1], 0.1)
        readings = zip(at_s + rng.uniform(0, 0.002, len(at_s)), np.interp(at_s, ends_s, energies_j), strict=True)
        profiler.add(clock, iterations, list(readings))
    for row in (row.measurement for row in profiler.rows()):
        assert row.energy_j / row.time_s == pytest.approx(model.power_w(row.clock_mhz), rel=0.05)


def test_the_energy_of_an_instruction_that_stalls_is_not_that_of_its_kind():
    model = DEVICES["a100-sxm"]
    profiler = OnlineProfiler(model.blocking_power_w)
    for clock in (1290, 1110, 930):
        power_w = model.power_w(clock)
        ends_s, powers_w, spans = [0.0], [], []
        for number in range(12):
            for time_s, draws_w in ((10.0 if number == 5 else 0.0, model.blocking_power_w), (0.1, power_w)):
                ends_s.append(ends_s[-1] + time_s)
                powers_w.append(draws_w)
            begin_s = ends_s[-3]
            spans.append(Span(Compute(Instruction(0, Kind.FORWARD, number)), begin_s, ends_s[-1]))
        energies_j = np.concatenate([[0.0], np.cumsum(np.diff(ends_s) * powers_w)])
        at_s = np.arange(0.05, ends_s[-1], 0.1)
        readings = zip(at_s, np.interp(at_s, ends_s, energies_j), strict=True)
        profiler.add(clock, [spans], list(readings))
    for row in (row.measurement for row in profiler.rows()):
        assert row.time_s == pytest.approx(0.1)
        assert row.energy_j == pytest.approx(0.1 * model.power_w(row.clock_mhz), rel=0.02)


def test_instructions_with_inputs_of_different_lengths_do_not_stall():
    rng, model = np.random.default_rng(0), DEVICES["a100-sxm"]
    profiler = OnlineProfiler(model.blocking_power_w)
    clocks = (1290, 1110, 930)
    for clock in clocks:
        ends_s, powers_w, spans = [0.0], [], []
        for number in range(600):
            begin_s = ends_s[-1]
            ends_s += [begin_s + 0.002 * rng.lognormal(sigma=0.5)]
            ends_s += [ends_s[-1] + 0.0004]
            powers_w += [model.power_w(clock), model.blocking_power_w]
            spans.append(Span(Compute(Instruction(0, Kind.FORWARD, number)), begin_s, ends_s[-2]))
        energies_j = np.concatenate([[0.0], np.cumsum(np.diff(ends_s) * powers_w)])
        at_s = np.arange(0.05, ends_s[-1], 0.1)
        profiler.add(clock, [spans], list(zip(at_s, np.interp(at_s, ends_s, energies_j), strict=True)))
    rows = [row.measurement for row in profiler.rows()]
    assert [row.clock_mhz for row in rows] == sorted(clocks)
    for row in rows:
        assert row.energy_j / row.time_s == pytest.approx(model.power_w(row.clock_mhz), rel=0.02)


def test_powers_of_waiting_are_pooled_by_their_errors():
    accurate, other, unknown = WaitingPower(90.0, 0.5), WaitingPower(110.0, 1.0), WaitingPower(500.0, math.inf)
    assert pooled([accurate, None, other, unknown]) == pytest.approx((94.0, math.sqrt(0.2)))
    assert pooled([None, unknown]) is None


def test_bubbles_of_ranks_together_say_what_a_waiting_gpu_draws():
    work_s = {Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1, Kind.TAIL: 0.1}
    ranks = []
    for rank in range(4):
        now, rng = VirtualTime(), np.random.default_rng(rank)
        gpu = gpu_in(now, rank, power_noise=0.02)
        profiler = OnlineProfiler(1.3 * gpu.model.blocking_power_w)  # as an incorrect measurement would give
        for clock in gpu.model.clocks_mhz[::-8][:4]:
            gpu.lock_clock(clock)
            for _ in range(3):
                spans, readings = run_iteration(gpu, now, rng, work_s, micro_batches=8)
                profiler.add(clock, [spans], readings)
        ranks.append(profiler.waiting_power_w())
    found = pooled(ranks)
    assert found.power_w == pytest.approx(gpu.model.blocking_power_w, abs=3 * found.error_w)
    assert found.power_w == pytest.approx(gpu.model.blocking_power_w, rel=0.06)
    chosen_w, _ = chosen_power_w(1.3 * gpu.model.blocking_power_w, found)
    assert chosen_w == found.power_w
    assert found.error_w < min(one.error_w for one in ranks)


def test_a_real_gpu_at_its_power_limit_that_hardly_waits():
    """Power varies by 10 % within a second, and 2 % of the time lie outside of instructions."""
    measured = json.loads(MEASURED_ON_H100.read_text())
    profiler = OnlineProfiler(measured["blocking_power_w"])
    for visit in measured["visits"]:
        spans = [
            [Span(Compute(Instruction(0, Kind(kind), n)), *times_s) for n, (kind, *times_s) in enumerate(iteration)]
            for iteration in visit["iterations"]
        ]
        profiler.add(visit["clock_mhz"], spans, visit["readings"])
    assert profiler.waiting_power_w() is None
    for row in profiler.rows():
        power_w = row.measurement.energy_j / row.measurement.time_s
        assert power_w == pytest.approx(690.0, rel=0.05)  # all passes reach the limit
        assert 0.02 < row.quality.energy_relative_error < 0.06


def test_where_nothing_waits_or_nothing_was_seen_waiting_is_not_known():
    assert OnlineProfiler(80.0).waiting_power_w() is None
    busy = OnlineProfiler(80.0)
    spans = [Span(Compute(Instruction(0, Kind.FORWARD, n)), 0.1 * n, 0.1 * (n + 1)) for n in range(20)]
    busy.add(1410, [spans], [(0.1 * n + 0.05, 30.0 * n) for n in range(19)])
    assert chosen_power_w(80.0, busy.waiting_power_w())[0] == 80.0


@pytest.mark.parametrize(
    ("bubbles", "power_w", "said"),
    [
        (WaitingPower(82.0, 0.1), 80.0, None),
        (WaitingPower(279.0, 3.4), 80.0, None),
        (WaitingPower(30.0, 0.1), 80.0, None),
        (WaitingPower(70.0, 0.5), 70.0, r"70.0 \+/- 1.0 W in the bubbles .* for the former"),
        (WaitingPower(70.0, 9.0), 80.0, r"70.0 \+/- 18.0 W .* for the latter, as the former is not certain"),
    ],
)
def test_bubbles_count_where_they_differ_and_are_certain(bubbles, power_w, said):
    chosen_w, why = chosen_power_w(80.0, bubbles)
    assert chosen_w == power_w
    assert why is None if said is None else re.search(said, why)


def test_passes_that_began_before_the_clock_was_reached_count_only_where_there_are_no_others():
    spans = [Span(Compute(Instruction(0, Kind.FORWARD, n)), n, n + length_s) for n, length_s in enumerate((0.1, 0.2))]
    spans.append(Span(Compute(Instruction(0, Kind.BACKWARD, 0)), 0.2, 0.5))
    profiler = OnlineProfiler(80.0)
    profiler.add(1200, [spans], [(0.1 * n, 30.0 * n) for n in range(14)], reached_s=0.5)
    times_s = {row.measurement.kind: row.measurement.time_s for row in profiler.rows()}
    assert times_s == {Kind.FORWARD: pytest.approx(0.2), Kind.BACKWARD: pytest.approx(0.3)}


def passes_and_readings(draw):
    """Draw passes with waits between them, and arbitrary readings of the counter."""
    seconds = st.floats(1e-5, 0.02)
    now_s, spans = 0.0, []
    for micro_batch in range(2):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            begin_s = now_s + draw(seconds)
            now_s = begin_s + draw(seconds)
            spans.append(Span(Compute(Instruction(0, kind, micro_batch)), begin_s, now_s))
    moments_s = sorted(draw(st.sets(st.floats(0, 2 * now_s), max_size=8)))
    used_j = draw(st.lists(st.sampled_from([0.0, 0.001, 1.0]), min_size=8, max_size=8))
    return spans, list(zip(moments_s, np.cumsum(used_j).tolist(), strict=False))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_whatever_the_counter_says_there_is_a_row_of_finite_energy_or_none(data):
    profiler = OnlineProfiler(data.draw(st.sampled_from([0.0, 80.0])))
    for clock_mhz in (1410, 1290):
        spans, readings = passes_and_readings(data.draw)
        profiler.add(clock_mhz, [spans], readings)
    assert all(np.isfinite(row.measurement.energy_j) for row in profiler.rows())


def test_power_that_varies_from_refresh_to_refresh_is_known_less_well():
    now, rng = VirtualTime(), np.random.default_rng(3)
    work_s = {Kind.FORWARD: 0.03, Kind.BACKWARD: 0.07, Kind.TAIL: 0.07}
    spans, readings = run_iteration(gpu_in(now, seed=0), now, rng, work_s, micro_batches=8)
    steady, varying = OnlineProfiler(blocking_power_w=80.0), OnlineProfiler(blocking_power_w=80.0)
    steady.add(1200, [spans], readings)
    noise_j = np.cumsum(rng.normal(0, 10.0, len(readings)))
    noisy = [(moment, j + noise) for (moment, j), noise in zip(readings, noise_j, strict=True)]
    varying.add(1200, [spans], noisy)
    assert steady.power_error(1200) < 0.05 < varying.power_error(1200)
    errors = [min(r.quality.energy_relative_error for r in found.rows()) for found in (steady, varying)]
    assert errors[1] > 2 * errors[0]
    known_before = steady.power_error(1200)
    steady.add(1200, [spans], noisy)
    assert steady.power_error(1200) > 2 * known_before, "what is computed from a clock changes with its iterations"


def test_the_error_of_a_power_that_is_not_above_waiting_is_not_small():
    spans = [Span(Compute(Instruction(0, Kind.FORWARD, n)), n * 0.1, n * 0.1 + 0.05) for n in range(40)]
    readings = [(n * 0.1, n * 0.05 * (70.0 + 80.0)) for n in range(41)]
    profiler = OnlineProfiler(blocking_power_w=80.0)
    profiler.add(1200, [spans], readings)
    assert profiler.power_error(1200) == np.inf
    assert not [r for r in profiler.rows() if r.quality.energy_relative_error is not None]


def row(stage, time_s, energy_j, *, clock_mhz=1200, samples=9, error=0.01):
    errors = {"time_relative_error": 0.002 * samples, "energy_relative_error": error}
    quality = RowQuality(stage=stage, kind=Kind.FORWARD, clock_mhz=clock_mhz, samples=samples, **errors)
    return MeasuredRow(Measurement(stage, Kind.FORWARD, clock_mhz, time_s, energy_j), quality)


def of_ranks(*rows):
    """Return one row of each rank."""
    return {f"rank {rank}": [own] for rank, own in enumerate(rows)}


def test_ranks_of_a_stage_wait_for_the_slowest_which_is_part_of_their_mean_energy():
    # Two pipelines of two stages, each stage on two tensor-parallel ranks.
    ranks = [
        row(0, 0.10, 30.0),
        row(0, 0.11, 32.0, samples=5),
        row(0, 0.10, 34.0),
        row(0, 0.09, 28.0),
        row(1, 0.2, 50.0),
    ]
    (first, second), incomplete = combine_rows(of_ranks(*ranks), blocking_power_w=80.0)
    assert not incomplete
    assert first.measurement == Measurement(0, Kind.FORWARD, 1200, 0.11, pytest.approx(31.0 + 80.0 * 0.01))
    assert first.quality.samples == 5
    assert first.quality.time_relative_error == pytest.approx(0.01)  # of the slowest rank
    assert first.quality.energy_relative_error == pytest.approx(0.005)  # of a mean of four
    assert second.measurement == ranks[-1].measurement
    (found,), _ = combine_rows(of_ranks(row(0, 0.1, 30.0), row(0, 0.1, 30.0, error=None)), 80.0)
    assert found.quality.energy_relative_error is None


def test_a_clock_at_which_a_rank_has_no_row_has_none():
    slow, fast = [row(0, 0.14, 30.0)], [row(0, 0.10, 30.0), row(0, 0.12, 25.0, clock_mhz=900)]
    rows, incomplete = combine_rows({"rank 0": slow, "rank 1": fast}, 80.0)
    assert [(r.measurement.clock_mhz, r.measurement.time_s) for r in rows] == [(1200, 0.14)]
    assert incomplete == {(0, Kind.FORWARD, 900): ["rank 0"]}


def add_lengths(profiler, clock_mhz, *lengths, known=False, exponent=1.0):
    """Add iterations with inputs of these relative lengths, whose times are proportional to a power of them."""
    now_s, iterations, power_w = 0.0, [], 300.0
    for length in lengths:
        spans = []
        for micro_batch in range(8):
            end_s = now_s + 0.05 * 1400 / clock_mhz * length**exponent
            spans.append(Span(Compute(Instruction(0, Kind.FORWARD, micro_batch)), now_s, end_s))
            now_s = end_s
        iterations.append(spans)
    readings = [(at_s, power_w * at_s) for at_s in np.arange(0.0, now_s, 0.1)]
    profiler.add(clock_mhz, iterations, readings, sizes=lengths if known else ())


def times_of(profiler):
    return {row.measurement.clock_mhz: (row.measurement.time_s, row.quality) for row in profiler.rows()}


def test_times_are_means_over_iterations_and_their_variation_is_part_of_the_error():
    profiler = OnlineProfiler(blocking_power_w=80.0)
    add_lengths(profiler, 1400, 1.0, 1.25)
    add_lengths(profiler, 1200, 1.25, 1.0)
    add_lengths(profiler, 1000, 1.25)
    assert profiler.time_error(1000) == np.inf, "three repetitions are needed"
    add_lengths(profiler, 800, 1.0, 1.25, 1.25, 1.0)
    times = times_of(profiler)
    assert (times[1400][0], times[800][0]) == pytest.approx((0.05 * 1.125, 0.05 * 1.75 * 1.125))
    assert 0.1 < profiler.time_error(1000) == times[1000][1].time_relative_error < 0.2
    assert times[800][1].time_relative_error == pytest.approx(times[1000][1].time_relative_error / 2)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_times_are_those_of_one_size_if_the_sizes_of_inputs_are_known(exponent):
    profiler = OnlineProfiler(blocking_power_w=80.0)
    for clock_mhz, *lengths in ((1400, 1.0, 1.25), (1200, 1.25, 1.25, 0.8), (1000, 1.25), (800, 0.8, 0.8)):
        add_lengths(profiler, clock_mhz, *lengths, known=True, exponent=exponent)
    for clock_mhz, (time_s, quality) in times_of(profiler).items():
        assert time_s == pytest.approx(0.05 * 1400 / clock_mhz, rel=0.01)
        assert quality.time_relative_error < 0.01
