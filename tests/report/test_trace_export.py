"""Traces for Perfetto, and the measured timelines in them."""

import json
from collections import defaultdict
from itertools import groupby, pairwise

import pytest
from run_folders import MICRO_BATCHES, RANKS, measured, write_auto_run

from perseus_ds.cli.main import main
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Transfer
from perseus_ds.report.timeline import Bar, DrawnTimeline, chrome_trace, measured_timeline, timeline


@pytest.fixture(scope="module")
def trace(tmp_path_factory, job):
    folder = tmp_path_factory.mktemp("run")
    write_auto_run(folder, job)
    assert main(["trace", str(folder)]) == 0
    return json.loads((folder / "trace.json").read_text())


def test_a_measured_iteration_is_divided_into_transfers_and_waiting(job):
    plan = job.frontier.plans[2]
    predicted = timeline(job.dag, job.profile, plan)
    shown = measured_timeline(measured(job, plan, 8, 2))
    assert shown.time_s == pytest.approx(predicted.time_s)
    theirs = [(b.rank, b.work, b.clock_mhz) for b in predicted.bars]
    assert [(b.rank, b.work, b.clock_mhz) for b in shown.bars] == theirs
    for ours, expected in zip(shown.bars, predicted.bars, strict=True):
        assert (ours.start_s, ours.end_s) == pytest.approx((expected.start_s, expected.end_s))
    for rank in range(RANKS):
        found, expected = (
            {wait.awaited: wait.end_s - wait.start_s for wait in each.waits(rank)} for each in (shown, predicted)
        )
        assert any(isinstance(work, Transfer) for work in found) == (rank < 2), "transfers to rank 2 take no time"
        assert found == pytest.approx(expected)


def test_slices_of_a_thread_do_not_overlap(trace):
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert len(threads) >= 4 * RANKS
    # Perfetto merges threads with equal numbers, and regards a process's own number as its main thread.
    assert len({thread for _, thread in threads}) == len(threads)
    assert not {thread for _, thread in threads} & {process for process, _ in threads}
    for events in threads.values():
        assert all(e["dur"] >= 0 for e in events)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in pairwise(sorted(events, key=lambda e: e["ts"])))


def test_a_rank_waits_from_the_end_of_all_that_it_does():
    """A transfer may end before the pass during which it began."""
    forward, later = Instruction(0, Kind.FORWARD, 0), Instruction(0, Kind.FORWARD, 1)
    transfer = Transfer("activation", 0, 1, 0)
    bars = (Bar(0, forward, 0.0, 3.0, 1410), Bar(0, transfer, 1.0, 2.0, None), Bar(0, later, 4.0, 5.0, 1410))
    assert DrawnTimeline(bars, 1, 6.0, 1.0).waits(0) == [(3.0, 4.0, later), (5.0, 6.0, None)]


def test_transfers_at_the_same_time_have_threads_of_their_own():
    bars = [Bar(0, Transfer("activation", 0, 1, m), 1.0 * m, 1.0 * m + 1.5, None) for m in range(4)]
    events = chrome_trace({"overlapping": DrawnTimeline(tuple(bars), 1, 5.0, 1.0)}, {}, None)["traceEvents"]
    begins = defaultdict(list)
    for event in events:
        if event.get("cat") == "transfer":
            begins[event["tid"]].append(event["ts"])
    assert sorted(begins.values()) == [[0.0, 2e6], [1e6, 3e6]]


def test_timelines_ranks_clocks_and_waits_are_named(trace, job):
    events = trace["traceEvents"]
    names = sorted((e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name")
    assert [name for _, name in names][:2] == ["predicted: highest clock, simulated", "predicted: plan 2, simulated"]
    assert any("measured: plan 2, iteration 8" in name for _, name in names)
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"rank 0", "rank 1", "rank 2", "rank 0 transfers", "rank 1 transfers"}
    plan = [e for e in events if e["pid"] == 2]
    waits = [e for e in plan if e.get("cat") == "wait"]
    assert {e["name"] for e in waits} == {"wait"}
    assert any(e["args"]["for"].startswith("grad of micro-batch") for e in waits)
    for rank, clocks in enumerate(job.frontier.plans[2].clocks_mhz):
        counted = [e["args"]["MHz"] for e in plan if e["ph"] == "C" and e["name"] == f"clock of rank {rank}"]
        assert counted == [clock for clock, _ in groupby(clocks)]
    assert trace["otherData"]["simulated"] is True


def test_slices_have_short_names_and_give_clock_power_and_energy(trace, job):
    passes = [e for e in trace["traceEvents"] if e["pid"] == 2 and e.get("cat") in ("forward", "backward")]
    assert len(passes) == 2 * RANKS * MICRO_BATCHES
    assert any(e["args"]["critical"] for e in passes)
    assert {(e["cat"], e["name"]) for e in passes} == {
        (kind, f"{kind[0].upper()}{m}") for kind in ("forward", "backward") for m in range(MICRO_BATCHES)
    }
    slice_ = next(e for e in passes if e["args"]["what"] == "forward of micro-batch 0 on stage 1")
    clock = job.frontier.plans[2].clocks_mhz[1][0]
    row = job.profile.at(1, Kind.FORWARD, clock)
    assert slice_["args"]["clock_mhz"] == clock
    assert slice_["args"]["profile_energy_j"] == pytest.approx(row.energy_j, rel=1e-3)
    assert slice_["args"]["profile_power_w"] == pytest.approx(row.energy_j / row.time_s, rel=1e-3)


def test_a_plan_that_is_not_on_the_frontier_is_an_error(tmp_path, job, capsys):
    write_auto_run(tmp_path, job)
    assert main(["trace", str(tmp_path), "--plan", "500"]) == 2
    assert f"the frontier has plans 0 to {len(job.frontier.plans) - 1}." in capsys.readouterr().err
