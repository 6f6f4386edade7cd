"""Clocks that follow late, under one rank that never waits: asked for early, no instruction is slower than planned."""

import dataclasses
import statistics

import pytest
from job import run

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import read_schedule, schedule_class

pytestmark = pytest.mark.integration
A40 = DEVICES["a40"]
LATENCY_S = 0.0235
BACKWARD_S = 0.06
# Twelve linear layers: the first one's input needs no gradient.
TOP_CLOCK_S = {Kind.FORWARD: BACKWARD_S * 12 / 23, Kind.BACKWARD: BACKWARD_S}
SHORT_MHZ, LONG_MHZ, TOP_MHZ = 1110, 750, 1740
"""There is time to visit LONG_MHZ for a forward and come back, and none to visit SHORT_MHZ."""


def frontier():
    """Return one plan: backwards at the top, forwards at clocks that are visited for long enough, or not."""
    (stream,) = read_schedule(schedule_class("1f1b"), ranks=1, micro_batches=4).instructions
    stream = tuple(i for i in stream if i.kind is not Kind.TAIL)
    clocks = tuple(TOP_MHZ if i.kind is Kind.BACKWARD else SHORT_MHZ if i.micro_batch < 2 else LONG_MHZ for i in stream)
    times_s = {
        (0, kind, clock): top_s * A40.slowdown(clock)
        for kind, top_s in TOP_CLOCK_S.items()
        for clock in (SHORT_MHZ, LONG_MHZ, TOP_MHZ)
    }
    time_s = sum(times_s[i.stage, i.kind, clock] for i, clock in zip(stream, clocks, strict=True))
    plan = FrequencyPlan((stream,), (clocks,), time_s, 100.0)
    provenance = Provenance(
        schedule="1f1b", micro_batches=4, stages=1, blocking_power_w=70.0, solver="none", simulated=True
    )
    assert times_s[0, Kind.FORWARD, SHORT_MHZ] < 2 * LATENCY_S < times_s[0, Kind.FORWARD, LONG_MHZ]
    return Frontier((plan,), time_s, plan, provenance, times_s)


def records_of(folder, plans):
    plans.save(folder / "frontier")
    simulated = {"gpu": "a40", "longest_instruction_s": BACKWARD_S, "lock_latency_s": LATENCY_S}
    block = {"mode": "run", "frontier": str(folder / "frontier"), "simulated": simulated}
    records = run(folder, 1, perseus=block, steps=8).records()
    return records, [r for r in records if r.get("phase") == "run"][3:]  # once the latency is measured


def test_higher_clocks_are_there_in_time_and_short_visits_left_out(tmp_path):
    # On a machine that is busy with something else nothing is in time: that deserves a second look.
    if not in_time(tmp_path / "first"):
        assert in_time(tmp_path / "second")


def in_time(folder):
    """Run with durations and without; check what is recorded, and return whether the former is faster, as planned."""
    plans = frontier()
    planned_s = plans.plans[0].time_s
    records, early = records_of(folder / "early", plans)
    _, late = records_of(folder / "late", dataclasses.replace(plans, instruction_times_s={}))
    refused = [r for r in records if r.get("event") == "refused"]
    assert [r["clock_mhz"] for r in refused] == [TOP_MHZ], "told once"
    assert refused[0]["reached_mhz"] == round(A40.reached_clock_mhz(A40.top_clock_mhz))
    assert refused[0]["reasons"] == ["sw_power_cap"]
    assert refused[0]["simulated"] is True
    assert statistics.median(r["clock_changes"] + r["clock_skips"] for r in late) == 8

    counts = [(r["clock_changes"], r["clock_skips"]) for r in early]
    early_s, late_s = (min(r["time_s"] for r in runs) for runs in (early, late))
    print(
        f"planned {planned_s:.4f} s, early {early_s / planned_s - 1:+.2%}, late {late_s / planned_s - 1:+.2%}, {counts}"
    )
    return (4, 4) in counts and early_s < 0.97 * late_s and early_s < planned_s
