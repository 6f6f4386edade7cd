"""Iterations that differ from the profile: its correction, and drift of instructions under plans."""

import statistics
from dataclasses import replace

import pytest
from virtual.job import SLOWER, in_order

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, StageProfile, TransferDuration
from perseus_ds.artifacts.run_records import (
    Drifted,
    Failed,
    PlanJudged,
    Predicted,
    ProfileWritten,
    changes,
    read_records,
)
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Span, Transfer
from perseus_ds.profiler.online import OnlineProfiler
from perseus_ds.server.prediction import PartTimes, difference
from perseus_ds.server.progress import JobLog
from perseus_ds.units import plain


def mean_energy_j(records):
    """Return the mean energy under plans [J], because the counter is refreshed too rarely for single iterations."""
    return statistics.mean(record.energy_j for record in records if record.phase == "run")


def test_a_plan_promises_the_same_wherever_it_is_said_though_the_profile_is_a_little_off(start, frontier, capsys):
    job = start(mode="run", frontier=frontier, **SLOWER)
    job.slowdowns[0] = 1.015
    (judged,) = job.train_until_compared()
    job.train(5)
    records = job.close()
    log = JobLog("job")
    log.add(read_records(job.folder))
    promised = changes(judged.promised_slowdown, judged.promised_saved)
    assert judged.slowdown == pytest.approx(judged.promised_slowdown, abs=0.005)
    assert judged.saved == pytest.approx(judged.promised_saved, abs=0.02)
    plan = log.facts(0.0).plan
    assert changes(plan.promised_slowdown, plan.promised_saving) == promised
    assert changes(records[0].promised_slowdown, records[0].promised_saving) == promised, (
        "also before default clocks were measured"
    )
    assert capsys.readouterr().out.count(f"(promised {plain(promised)})") == 2, "at the start and with the verdict"


def test_instructions_that_have_changed_since_they_were_profiled_are_named_and_corrected(start, capsys):
    job = start(mode="auto", **SLOWER)
    job.train_until("optimizing")
    job.work_s[0][Kind.BACKWARD] *= 1.3
    assert in_order(job.train_until("run")) == ["optimizing", "default", "optimizing"]
    job.train(50)
    records = job.close()
    (predicted,) = job.events(Predicted)
    assert predicted.corrected
    assert predicted.parts == {"backward of stage 0": pytest.approx(1.3, rel=0.01)}
    assert predicted.time_s / predicted.predicted_time_s == pytest.approx(1.2, rel=0.02)
    assert capsys.readouterr().out.count("backward of stage 0 +30.") == 1
    assert records[-1].late == pytest.approx(0.0, abs=0.01)
    assert mean_energy_j(records[-20:]) == pytest.approx(records[-1].predicted_energy_j, rel=0.03)
    assert job.events(Drifted) == []
    assert len(job.events(ProfileWritten)) == 1


def test_energies_that_were_measured_wrong_are_corrected_where_times_are_right(start, monkeypatch):
    measured = OnlineProfiler.rows

    def too_high(profiler):
        power_w = job.gpu.model.blocking_power_w
        return [
            replace(r, measurement=replace(m, energy_j=m.energy_j + 0.2 * (m.energy_j - power_w * m.time_s)))
            for r in measured(profiler)
            for m in [r.measurement]
        ]

    monkeypatch.setattr(OnlineProfiler, "rows", too_high)
    job = start(mode="auto", **SLOWER)
    job.train_until("optimizing")
    assert in_order(job.train_until("run")) == ["optimizing", "default", "optimizing"]
    job.train(50)
    records = job.close()
    (predicted,) = job.events(Predicted)
    assert (predicted.parts, predicted.corrected) == ({}, True)
    assert 1.05 < predicted.predicted_energy_j / predicted.energy_j < 1.2
    assert mean_energy_j(records[-20:]) == pytest.approx(records[-1].predicted_energy_j, rel=0.02)


def test_time_between_instructions_that_no_part_explains_is_said_and_the_profile_stays(start, capsys):
    job = start(mode="auto", **SLOWER)
    job.train_until("optimizing")
    job.wait_s = 0.02
    assert in_order(job.train_until("run")) == ["optimizing", "default"]
    job.close()
    (predicted,) = job.events(Predicted)
    assert (predicted.parts, predicted.corrected) == ({}, False)
    assert "no instruction, transfer or tail differs in time" in capsys.readouterr().out


def test_default_clocks_below_the_highest_of_the_profile_do_not_change_its_rows(start):
    job = start(mode="auto", **SLOWER)
    work = job.work

    def work_slowly_at_default_clocks(rank, instruction):
        at_default = job.phase in ("warm-up", "optimizing", "default")
        job.time.sleep(0.1 * job.work_s[0][instruction.kind] if at_default else 0.0)
        work(rank, instruction)

    job.work = work_slowly_at_default_clocks
    assert in_order(job.train_until("run"))[-2:] == ["optimizing", "default"]
    job.close()
    (predicted,) = job.events(Predicted)
    assert not predicted.corrected
    assert predicted.parts["forward of stage 0"] == pytest.approx(1.1, rel=0.02)


def test_run_mode_says_where_a_plan_from_elsewhere_does_not_predict_default_clocks(start, frontier, capsys):
    job = start(mode="run", frontier=frontier, max_drift=10.0, **SLOWER)
    job.work_s[0][Kind.FORWARD] *= 1.3
    job.train(80)
    job.close()
    (predicted,) = job.events(Predicted)
    assert (set(predicted.parts), predicted.corrected) == ({"forward of stage 0"}, False)
    assert capsys.readouterr().out.count("forward of stage 0 +30.") == 1


@pytest.fixture
def planned(start):
    """Return a job that runs under a plan that was kept."""
    job = start(mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(12)
    return job


def lengthen(job, factors, shapes=2.0):
    """Make the inputs of the next iterations longer."""
    job.shapes = shapes
    for kind, factor in zip((Kind.FORWARD, Kind.BACKWARD, Kind.TAIL), factors, strict=True):
        job.work_s[0][kind] *= factor


def test_a_factor_of_other_shapes_common_to_all_instructions_is_not_drift_and_scales_the_promise(planned):
    lengthen(planned, (1.5, 1.5, 1.0))
    assert set(planned.train(40)) == {"run"}, "must not be compared with default clocks of other shapes"
    lengthen(planned, (1 / 1.5, 1 / 1.5, 1.0), shapes=1.0)
    planned.train(40)
    records = planned.close()
    for last in (records[-42], records[-1]):
        assert last.predicted_time_s == pytest.approx(last.time_s, rel=0.03)
        assert last.default_time_s < last.predicted_time_s
    assert planned.events(Drifted) == []
    assert len(planned.events(ProfileWritten)) == len(planned.events(PlanJudged)) == 1


def test_instructions_that_change_in_proportion_are_drift(planned):
    lengthen(planned, (1.0, 1.6, 1.0))
    planned.train_until("profile", most=60)
    (drifted,) = planned.events(Drifted)
    assert drifted.drift > 0.05


def test_without_other_shapes_a_plan_that_still_saves_energy_stays_when_all_instructions_take_longer(planned):
    lengthen(planned, (1.5, 1.5, 1.0), shapes=planned.shapes)
    _, compared = planned.train_until_compared(times=2)
    planned.train(3)
    last = planned.close()[-1]
    assert compared.kept
    assert ["profiling" in event.then for event in planned.events(Drifted)] == [False]
    assert len(planned.events(ProfileWritten)) == 1
    assert last.predicted_time_s == pytest.approx(last.time_s, rel=0.03), "default clocks must be measured again"


TIME_S = 10.0
CLOCKS = {1000: (1.4, 200.0), 1400: (1.0, 300.0)}
TRANSFERS = [
    TransferDuration(payload=payload, source=source, target=target, time_s=0.1)
    for payload, source, target in (("activation", 0, 1), ("grad", 1, 0))
]


def profile():
    rows = [
        Measurement(stage, kind, clock, (1 + stage) * time_s, (1 + stage) * energy_j)
        for stage in (0, 1)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for clock, (time_s, energy_j) in CLOCKS.items()
    ]
    info = ProfileInfo(blocking_power_w=80.0, micro_batches=4, transfers=TRANSFERS, tail_s={0: 0.5, 1: 0.5})
    return StageProfile(rows, info)


def part_times(backward_s=2.0, transfer_s=0.1, tail_s=0.5):
    """Return the times of two ranks, of which the first waits for the second in its transfer and its tail."""

    def spans(stage, back_s, waits_s):
        times = {Kind.FORWARD: 1.0 + stage, Kind.BACKWARD: back_s, Kind.TAIL: tail_s + waits_s}
        side = {"sends" if stage == 0 else "receives": (Transfer("activation", 0, 1, 0),)}
        spans, end_s = [Span(Exchange(**side), 0.0, transfer_s + waits_s)], transfer_s + waits_s
        for kind, time_s in times.items():
            spans.append(Span(Compute(Instruction(stage, kind, 0)), end_s, end_s + time_s))
            end_s += time_s
        return spans

    return PartTimes.of([[spans(0, 1.0, 0.3)] * 4, [spans(1, backward_s, 0.0)] * 4])


BEFORE = part_times().instructions


def test_more_than_a_factor_of_two_is_not_corrected_and_a_short_difference_is_ignored():
    assert difference(profile(), part_times(backward_s=5.0), BEFORE, TIME_S)[1] is None
    assert difference(profile(), part_times(transfer_s=0.11), BEFORE, TIME_S)[0] == {}


def test_transfers_and_tails_that_differ_are_replaced_and_those_not_seen_are_kept():
    factors, corrected = difference(profile(), part_times(transfer_s=0.3, tail_s=0.8), BEFORE, TIME_S)
    assert factors == {"transfer of activation from stage 0 to 1": pytest.approx(3.0), "tail": pytest.approx(1.6)}
    info = corrected.info
    assert {t.payload: t.time_s for t in info.transfers} == {"activation": pytest.approx(0.3), "grad": 0.1}
    assert info.tail_s == pytest.approx({0: 0.8, 1: 0.8})


def test_instructions_that_differ_from_the_start_are_noticed_while_the_plan_is_tried_out(start, frontier):
    job = start(mode="run", frontier=frontier, **SLOWER)
    job.slowdowns[0] = 0.3
    job.train(40)
    job.close()
    assert len(job.events(Drifted)) == 1
    assert job.events(Failed) == []
