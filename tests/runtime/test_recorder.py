"""What is written, sent and printed of iterations, operation by operation for some; nothing of it can end training."""

import math
import threading

import pytest
from virtual.job import LoneCommunicator, reports_of

from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_records import (
    ClockRefused,
    Drifted,
    Failed,
    IterationRecord,
    RecordFollower,
    Started,
    from_line,
    read_records,
    to_line,
)
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.clocks.events import PassedEvent
from perseus_ds.clocks.timers import FinishedIteration, Span
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Load, Transfer
from perseus_ds.policy.decisions import Forecast
from perseus_ds.protocol.layout import IterationEnergy
from perseus_ds.ranks import PipelineTopology
from perseus_ds.report.sources import read_history
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration
from perseus_ds.runtime.progress import JobLog
from perseus_ds.runtime.recorder import IterationContext, Recorder, RecordWriter, TimelineLog


class Monitor:
    """Keeps what it is told, and then fails if it has an error."""

    def __init__(self, error=None):
        self.events, self._error = [], error

    def write_events(self, event_list):
        self.events += event_list
        if self._error is not None:
            raise self._error


def under_plan(number):
    forecast = Forecast(time_s=1.0, energy_j=75.0, default_time_s=1.0, default_energy_j=100.0)
    return IterationContext(number, number * 8, "run", plan=4, forecast=forecast)


def reports(energy_j=80.0, **fields):
    return reports_of({"time_s": 1.1, "energy_j": energy_j, "clock_changes": 6, "clock_skips": 2, **fields})


@pytest.fixture
def recorder(tmp_path):
    """Rank 0's, of a job that has started."""
    made = Recorder(LoneCommunicator(), tmp_path, simulated=False)
    made.start(Started())
    return made


def records_of(recorder, tmp_path):
    """Close a recorder; return the iterations that it has recorded, and the record of the end."""
    recorder.close()
    _, *iterations, end = read_records(tmp_path)
    return iterations, end


def test_what_is_said_holds_no_control_characters_and_a_closed_standard_output_is_no_error(
    recorder, capsys, monkeypatch
):
    recorder.say("\x1b]0;PWNED\x07")
    assert capsys.readouterr().out == "perseus: \\x1b]0;PWNED\\x07\n"
    monkeypatch.setattr("builtins.print", lambda *_, **__: 1 / 0)
    recorder.say("nobody reads this")


def test_an_iteration_reaches_the_file_the_monitor_and_the_terminal(tmp_path, capsys):
    monitor = Monitor()
    recorder = Recorder(LoneCommunicator(), tmp_path, simulated=True, monitor=monitor, steps_per_print=2)
    recorder.start(Started())
    recorder.add(IterationContext(1, 8, "observe"), reports_of({}))
    recorder.add(under_plan(2), reports(drift=0.02))
    recorder.add(under_plan(3), reports())
    recorder.close()
    told = {tag: value for tag, value, samples in monitor.events if samples == 16}
    assert told == {
        "Perseus/simulated/iteration_time_s": 1.1,
        "Perseus/simulated/iteration_energy_j": 80.0,
        "Perseus/simulated/average_power_w": pytest.approx(80 / 1.1),
        "Perseus/simulated/plan": 4.0,
        "Perseus/simulated/saved": pytest.approx(0.2),
        "Perseus/simulated/late": pytest.approx(0.1),
        "Perseus/simulated/drift": 0.02,
        "Perseus/simulated/clock_changes": 6.0,
        "Perseus/simulated/clock_skips": 2.0,
    }
    _, first, second, _, end = read_records(tmp_path)
    assert (first.saved, first.late, first.drift) == (None, None, None)
    assert (second.default_energy_j, second.default_time_s, second.drift, second.clock_skips) == (100.0, 1.0, 0.02, 2)
    assert (end.iterations, end.energy_j, end.saved) == (3, 260.0, pytest.approx(0.2))
    step, summary = capsys.readouterr().out.splitlines()[1:3]
    assert step == "perseus: step 2: run, 1.100 s, 80.00 J (plan 4: 1.000 s, 75.00 J), simulated GPUs"
    assert "3 iterations, 3.200 s, 260.0 J (0.07222 Wh), 12 clock changes, 4 skipped; 2 under plans" in summary
    assert "20.0 % less energy and 10.0 % more time than at default clocks, by the profile" in summary


def test_training_does_not_wait_for_the_printed_records_while_those_of_earlier_starts_are_read(
    tmp_path, capsys, monkeypatch
):
    is_read = threading.Event()

    def read(follower):
        assert is_read.wait(60)
        return []

    monkeypatch.setattr(RecordFollower, "read", read)
    recorder = Recorder(LoneCommunicator(), tmp_path, simulated=False, steps_per_print=1)
    recorder.start(Started())
    recorder.add(under_plan(1), reports())  # would wait here, as nobody reads the earlier records
    assert "step 1" not in capsys.readouterr().out
    is_read.set()
    recorder.close()
    assert "step 1: run, 1.100 s, 80.00 J" in capsys.readouterr().out


def test_the_slowest_rank_counts_and_energies_are_summed_by_pipeline(recorder, tmp_path):
    ranks = [{"time_s": 1.0 + n, "energy_j": 10.0 * (n + 1), "failed": n == 2, "clock_changes": n} for n in range(4)]
    recorder.add(IterationContext(1, 8, "observe"), reports_of(*ranks, pipelines=(0, 0, 1, 1)))
    (record,), _ = records_of(recorder, tmp_path)
    assert (record.time_s, record.energy_j, record.energy_by_pipeline_j) == (4.0, 100.0, (30.0, 70.0))
    assert record.energy_by_rank_j == (10.0, 20.0, 30.0, 40.0)
    assert (record.failed_ranks, record.clock_changes) == ((2,), 6)


def test_many_ranks_have_figures_by_rank_in_some_records_that_lose_no_energy(recorder, tmp_path):
    for number in range(1, 9):
        ranks = [{"energy_j": math.nan if number == 3 else float(number), "asked_mhz": 1400.0} for _ in range(200)]
        recorder.add(IterationContext(number, 8, "run"), reports_of(*ranks))
    records, _ = records_of(recorder, tmp_path)
    assert [record.iteration for record in records if record.energy_by_rank_j is not None] == [4, 8]
    assert (records[3].energy_by_rank_j, records[7].energy_by_rank_j) == ((7.0,) * 200, (26.0,) * 200)
    assert [record.iteration for record in records if record.clocks_asked_mhz is not None] == [4, 8]
    assert records[0].energy_j == 200.0
    assert read_history(tmp_path).by_rank[0] == (33.0, pytest.approx(33.0 / 7))


def test_energy_that_cannot_be_read_is_left_out_and_said_to_be(tmp_path, capsys):
    monitor = Monitor()
    recorder = Recorder(LoneCommunicator(), tmp_path, simulated=False, monitor=monitor)
    recorder.start(Started())
    recorder.add(under_plan(1), reports(energy_j=math.nan))
    recorder.add(under_plan(2), reports())
    (first, _), end = records_of(recorder, tmp_path)
    assert (first.energy_j, first.power_w, first.saved) == (None, None, None)
    assert "NaN" not in (tmp_path / "run.jsonl").read_text()
    assert all(math.isfinite(value) for _, value, _ in monitor.events)
    assert (end.energy_j, end.saved) == (80.0, pytest.approx(0.2))
    assert "not counting 1 iterations" in capsys.readouterr().out


def test_drift_is_that_of_the_last_look_until_the_job_profiles_again(recorder, tmp_path):
    recorder.add(under_plan(1), reports(drift=0.03))
    recorder.add(under_plan(2), reports())
    recorder.add(IterationContext(3, 24, "warm-up"), reports())
    recorder.add(under_plan(4), reports())
    records, _ = records_of(recorder, tmp_path)
    assert [record.drift for record in records] == [0.03, 0.03, None, None]


def test_a_rank_sends_its_events_and_writes_nothing(tmp_path):
    class SecondRank(LoneCommunicator):
        is_rank_0 = False

    communicator = SecondRank(PipelineTopology(1, (0, 1)))
    recorder = Recorder(communicator, tmp_path, simulated=False)
    recorder.start(Started())
    recorder.event(Drifted(drift=0.1))
    recorder.own_event(ClockRefused(rank=1, clock_mhz=1400, reached_mhz=1200))
    recorder.add(IterationContext(1, 8, "run"), reports_of({}))
    recorder.add_events_of_others()
    communicator.start_exchange([1.0], lambda numbers: None).result()
    ((age_s, line),) = communicator.received_events()
    assert (from_line(line).clock_mhz, age_s >= 0) == (1400, True)
    recorder.close()
    assert not (tmp_path / "run.jsonl").exists()


def test_events_of_other_ranks_are_dated_by_the_clock_of_rank_0s_node(tmp_path, monkeypatch):
    """Clocks of nodes may be minutes apart, so a message tells how long ago something happened."""
    communicator, now_s = LoneCommunicator(), 500.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    recorder = Recorder(communicator, tmp_path, simulated=False)
    recorder.start(Started())
    communicator.send_event(to_line(ClockRefused(rank=1, clock_mhz=1400, reached_mhz=1200)).encode())
    now_s = 510.0
    communicator.start_exchange([1.0], lambda numbers: None).result()
    now_s = 512.0
    recorder.add_events_of_others()
    recorder.close()
    (refused,) = [record for record in read_records(tmp_path) if isinstance(record, ClockRefused)]
    assert refused.time == 988.0


def test_a_record_names_sixteen_failed_ranks_and_counts_the_others(recorder, tmp_path):
    recorder.add(IterationContext(1, 8, "run"), reports_of(*({"failed": rank > 1} for rank in range(22))))
    recorder.add(IterationContext(2, 16, "run"), reports_of({}, {"failed": True}))
    (many, few), _ = records_of(recorder, tmp_path)
    assert (many.failed_ranks, many.more_failed_ranks) == (tuple(range(2, 18)), 4)
    assert (few.failed_ranks, few.more_failed_ranks) == ((1,), 0)


def test_a_monitor_that_fails_is_told_no_more(tmp_path, caplog):
    monitor = Monitor(OSError("No space left on device"))
    recorder = Recorder(LoneCommunicator(), tmp_path, simulated=True, monitor=monitor)
    recorder.start(Started())
    for number in (1, 2):
        recorder.add(under_plan(number), reports())
    recorder.close()
    assert {samples for _, _, samples in monitor.events} == {8}
    assert caplog.text.count("monitor failed (No space left on device)") == 1
    assert len(read_records(tmp_path)) == 4


def test_a_record_that_cannot_be_written_is_left_out_and_those_after_it_are_not(tmp_path, caplog):
    writer = RecordWriter(tmp_path, JobLog("job"))
    writer.write_soon(lambda: Failed(error=object()))
    writer.write(Failed.model_construct(event="failure", rank=[object()]))
    writer.write(Failed(error="/data/\udcff: no such file"))
    writer.flush()
    (record,) = read_records(tmp_path)
    assert record.error == "/data/?: no such file"
    assert caplog.text.count("cannot be made") == 2


def test_what_could_not_be_written_is_written_once_that_is_possible(tmp_path, caplog):
    (tmp_path / "folder").write_text("")
    recorder = Recorder(LoneCommunicator(), tmp_path / "folder", simulated=True)
    recorder.start(Started())
    recorder.add(under_plan(1), reports())
    assert recorder.last.iteration == 1
    (tmp_path / "folder").unlink()
    recorder.add(under_plan(2), reports())
    recorder.close()
    found = read_records(tmp_path / "folder")
    assert [r.iteration for r in found if isinstance(r, IterationRecord)] == [1, 2]
    assert caplog.text.count("cannot be written") == 1
    assert caplog.text.count("can be written again") == 1


def test_a_line_of_which_only_a_part_could_be_written_is_taken_back(recorder, tmp_path, disk_with):
    assert recorder.last is None
    with disk_with((tmp_path / "run.jsonl").stat().st_size + 20):
        recorder.add(under_plan(1), reports())
        assert recorder.last.iteration == 1
    assert len(read_records(tmp_path)) == 1
    recorder.add(under_plan(2), reports())
    records, _ = records_of(recorder, tmp_path)
    assert [record.iteration for record in records] == [1, 2]


def test_a_job_that_does_not_start_leaves_no_record_and_one_that_does_begins_with_it(tmp_path):
    recorder = Recorder(LoneCommunicator(), tmp_path, simulated=True)
    recorder.event(Drifted(drift=0.1))
    recorder.close()
    assert not (tmp_path / "run.jsonl").exists()
    recorder.start(Started(mode="run"))
    recorder.close()
    assert [record.event for record in read_records(tmp_path)] == ["start", "drift"]


FORWARD = Instruction(0, Kind.FORWARD, 0)
SPANS = [
    Span(Load(stage=0, micro_batch=0), 0.0, 0.1),
    Span(Compute(FORWARD), 0.1, 0.4),
    Span(Exchange((Transfer("activation", 0, 1, 0),)), 0.4, 0.5),
]


def ran(plan):
    return NextIteration("run", plan=plan)


def seen(number, *, spans=SPANS, clock_mhz=()):
    """A measured iteration of 1 s."""
    marks = [(span.operation, PassedEvent(span.start_s), PassedEvent(span.end_s)) for span in spans]
    finished = FinishedIteration(PassedEvent(0.0), PassedEvent(1.0), marks)
    known = lambda waits=False: IterationEnergy(0.0, 100.0)  # noqa: E731
    return IterationMeasurement(finished, known, (0.0, 1.0), dict(clock_mhz), failed=False, number=number)


class TwoRanks(LoneCommunicator):
    """Rank 0, and a second rank whose iteration began 10 ms later."""

    def ahead_s(self, timebase):
        return 0.0

    def pipeline_gather(self, value):
        begun_s, spans, clocks, memory_bytes = value
        return [value, (begun_s + 0.01, spans, clocks, memory_bytes)]


@pytest.fixture
def log(tmp_path):
    return TimelineLog(TwoRanks(), tmp_path, gpu="A100", job=ProfileInfo(simulated=True))


def test_the_second_iteration_of_each_plan_is_wanted_and_six_in_all(log):
    wanted = [log.wants("run", plan) for plan in range(8) for _ in range(3)]
    assert wanted[:6] == [False, True, False, False, True, False]
    assert not log.wants("profile", None)
    for number in range(6):
        log.keep(ran(number), seen(number), 5)
    assert not any(log.wants("run", 99) for _ in range(5))


def test_operations_of_all_ranks_lie_on_the_first_ones_axis(log, tmp_path):
    log.keep(ran(plan=3), seen(7, clock_mhz={FORWARD: 1200}), 5)
    (kept,) = TimelineFile.load(tmp_path / "timeline.json").iterations
    assert (kept.iteration, kept.plan) == (7, 3)
    first, second = kept.ranks
    assert [operation.kind for operation in first] == ["load", "forward", "activation"]
    assert [operation.start_s for operation in first] == [0.0, 0.1, 0.4]
    assert [operation.start_s for operation in second] == pytest.approx([0.01, 0.11, 0.41])
    assert [operation.clock_mhz for operation in first] == [None, 1200, None]
    assert first[2].target == 1


def test_what_could_not_be_read_again_is_not_written(log, tmp_path, monkeypatch):
    monkeypatch.setattr("perseus_ds.runtime.recorder.MOST_OPERATIONS", 9)
    for number in range(3):
        log.keep(ran(number), seen(number), 5)
    log.keep(ran(plan=3), seen(3, spans=SPANS[:1]), 5)
    kept = TimelineFile.load(tmp_path / "timeline.json").iterations
    assert [(iteration.iteration, iteration.operations) for iteration in kept] == [(0, 6), (3, 2)]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = TimelineLog(LoneCommunicator(), tmp_path / "file", gpu="A100", job=ProfileInfo(simulated=True))
    for number in range(3):
        log.keep(ran(number), seen(number), 5)
    assert caplog.text.count("cannot be written") == 1


def test_ranks_of_other_pipelines_keep_nothing_and_send_nothing(tmp_path):
    log = TimelineLog(
        LoneCommunicator(PipelineTopology(2, (2, 3), 1, 2)), tmp_path, gpu="A100", job=ProfileInfo(simulated=True)
    )
    assert not any(log.wants("run", 1) for _ in range(3))
