"""Records, figures, messages and timelines of iterations, whose errors must not end training."""

import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from seen import seen
from virtual.job import VirtualJob

from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_events import Failed, LimitsChanged, Started
from perseus_ds.artifacts.run_iterations import IterationRecord, SummedIterations
from perseus_ds.artifacts.run_records import read_records, to_line
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Load, Span, Transfer, Wait
from perseus_ds.policy.plans import Forecast, Plans
from perseus_ds.progress.sums import JobsOfFile, fold
from perseus_ds.protocol.job_messages import Observed, RankFacts, Say
from perseus_ds.report.inputs import read_run
from perseus_ds.savings import Default
from perseus_ds.server.iterations import Run
from perseus_ds.server.job import Place, RankState
from perseus_ds.server.recorder import Recorder, RecordWriter, TimelineLog, begin_after_s


@pytest.fixture
def received():
    """Messages to rank 0."""
    return []


def said(received, *, warns=False):
    """Return the lines that rank 0 prints or its warnings."""
    return [each.text for each in received if isinstance(each, Say) and each.warns is warns]


def observed(received):
    """Return the messages with figures for rank 0's monitor."""
    return [each for each in received if isinstance(each, Observed)]


FORECAST = Forecast(time_s=1.0, energy_j=75.0, default_time_s=1.0, default_energy_j=100.0)
AT_DEFAULT_CLOCKS = Default(1.0, 100.0, is_measured=False)
GOOD = TrialState(pairs=6, verdict="good", slowdown_error=0.002, saved_error=0.003)
UNDER_PLAN = Run("run", plans={0: Plans(None, None, 4, (1.0,), (4,), forecast=FORECAST)})
DEFAULT = Run("observe")


def under_plan(number, energy_j=80.0, drift=None):
    """Return an iteration under a plan and its run."""
    report = {"time_s": 1.1, "energy_j": energy_j, "clock_changes": 6, "clock_skips": 2}
    return seen(report, number=number, run=UNDER_PLAN, drift=drift), UNDER_PLAN


@pytest.fixture
def recorder(tmp_path, received):
    """Return the recorder of a job that has started."""
    made = Recorder(tmp_path, simulated=False, send=received.append)
    made.start(Started())
    return made


def records_of(recorder, tmp_path):
    """Close a recorder and return the recorded iterations and the record of the end."""
    recorder.close()
    _, *iterations, end = read_records(tmp_path)
    return iterations, end


def test_heat_that_flickers_is_one_limit_which_ends_after_a_while_without_heat(recorder, tmp_path):
    clocks_mhz = [1200.0, math.inf] * 50 + [1100.0] + [1300.0] * 100 + [math.inf] * 100
    for number, clock_mhz in enumerate(clocks_mhz, start=1):
        recorder.add(seen({"time_s": 1.0, "limit_mhz": clock_mhz}, number=number), DEFAULT)
    records, _ = records_of(recorder, tmp_path)
    events = [event.limits for event in records if isinstance(event, LimitsChanged)]
    assert events == [((0, None, clock_mhz),) for clock_mhz in (1200.0, 1100.0, 1300.0)] + [()]
    iterations = [record for record in records if isinstance(record, IterationRecord)]
    assert [record.limited for record in iterations] == [math.isfinite(clock_mhz) for clock_mhz in clocks_mhz]
    ended = next(number for number, record in enumerate(reversed(records)) if isinstance(record, LimitsChanged))
    assert ended < 75, "not as soon as heat is gone"


def test_an_iteration_reaches_the_file_the_monitor_and_the_terminal(tmp_path, received):
    recorder = Recorder(tmp_path, simulated=True, send=received.append, has_monitor=True, steps_per_print=2)
    recorder.start(Started())
    recorder.add(seen({}), DEFAULT)
    recorder.add(*under_plan(2, drift=0.02), AT_DEFAULT_CLOCKS, GOOD)
    recorder.add(*under_plan(3), AT_DEFAULT_CLOCKS, GOOD)
    recorder.close()
    (told,) = (dict(each.figures) for each in observed(received) if each.samples == 16)
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
    assert (end.iterations, end.energy_j, end.under_plans.saved) == (3, 260.0, pytest.approx(0.2))
    step, summary = said(received)[1:3]
    assert step == "perseus: steps 1-2: 1 at default clocks, 1 under plan 4, 1.050 s, 90.00 J each"
    assert "end. 3 iterations, 3.200 s, 0.07222 Wh. Under plans (2 iterations): -20.0 +/- 0.3 % energy" in summary
    assert "certain, compared with default clocks by the profile" in summary


def test_lines_about_steps_cover_all_steps_since_the_last_one(tmp_path, received):
    recorder = Recorder(tmp_path, simulated=False, send=received.append, steps_per_print=3)
    recorder.start(Started())
    for number, run in enumerate([Run("profile"), Run("profile"), Run("profile"), DEFAULT], start=1):
        recorder.add(seen({"time_s": 1.0, "energy_j": 50.0 * number}, number=number, run=run), run)
    for number in (5, 6, 7, 8, 9):
        recorder.add(*under_plan(number), AT_DEFAULT_CLOCKS, GOOD)
    recorder.close()
    assert said(received)[1:4] == [
        "perseus: steps 1-3: profiling, 1.000 s, 100.0 J each",
        "perseus: steps 4-6: 1 at default clocks, 2 under plan 4, 1.067 s, 120.0 J each",
        "perseus: steps 7-9: plan 4, 1.100 s, 80.00 J each (default clocks: 1.000 s, 100.0 J)",
    ]


def test_a_line_about_steps_compares_the_same_steps(tmp_path, received):
    recorder = Recorder(tmp_path, simulated=False, send=received.append, steps_per_print=3)
    recorder.start(Started())
    checkpoint = seen({"time_s": 31.0, "energy_j": 2000.0}, number=2, run=UNDER_PLAN)
    for iteration in (under_plan(1), (checkpoint, UNDER_PLAN), under_plan(3)):
        recorder.add(*iteration, AT_DEFAULT_CLOCKS, GOOD)
    recorder.add(*under_plan(4))
    for number in (5, 6):
        recorder.add(*under_plan(number), AT_DEFAULT_CLOCKS, GOOD)
    recorder.close()
    assert said(received)[1:3] == [
        "perseus: steps 1-3: plan 4, 1 with stalls not counted, 1.100 s, 80.00 J each "
        "(default clocks: 1.000 s, 100.0 J)",
        "perseus: steps 4-6: plan 4, 1.100 s, 80.00 J each",
    ]


def test_the_slowest_rank_counts_and_energies_are_summed_by_pipeline(recorder, tmp_path):
    ranks = [{"time_s": 1.0 + n, "energy_j": 10.0 * (n + 1), "failed": n == 2, "clock_changes": n} for n in range(4)]
    recorder.add(seen(*ranks, pipelines=(0, 0, 1, 1)), DEFAULT)
    recorder.add(seen(*({"failed": rank > 1} for rank in range(22))), UNDER_PLAN)
    (record, of_many), _ = records_of(recorder, tmp_path)
    assert (record.time_s, record.energy_j, record.energy_by_pipeline_j) == (4.0, 100.0, (30.0, 70.0))
    assert record.energy_by_rank_j == (10.0, 20.0, 30.0, 40.0)
    assert (record.failed_ranks, record.clock_changes) == ((2,), 6)
    assert (of_many.failed_ranks, of_many.more_failed_ranks) == (tuple(range(2, 18)), 4)


def test_many_ranks_have_figures_by_rank_in_some_records_that_lose_no_energy(recorder, tmp_path):
    """On average, 16 ranks are listed in a record."""
    for number in range(1, 27):
        ranks = [{"energy_j": math.nan if number == 3 else float(number), "asked_mhz": 1400.0} for _ in range(200)]
        recorder.add(seen(*ranks, number=number), UNDER_PLAN)
    records, _ = records_of(recorder, tmp_path)
    assert [record.iteration for record in records if record.energy_by_rank_j is not None] == [13, 26]
    of_first, of_second = sum(range(1, 14)) - 3.0, float(sum(range(14, 27)))
    assert (records[12].energy_by_rank_j, records[25].energy_by_rank_j) == ((of_first,) * 200, (of_second,) * 200)
    assert [record.iteration for record in records if record.clocks_asked_mhz is not None] == [13, 26]
    assert records[0].energy_j == 200.0
    total_j = of_first + of_second
    assert read_run(tmp_path).job.history.by_rank[0] == (total_j, pytest.approx(total_j / 25))


def test_many_pipelines_have_energies_in_some_records_of_each_phase_that_lose_no_energy(recorder, tmp_path):
    ranks, pipelines = [{"energy_j": 10.0}] * 65, list(range(65))
    plans = Run("run", plans=UNDER_PLAN.plans)
    for number in range(1, 21):
        run = DEFAULT if number % 2 else plans
        recorder.add(seen(*ranks, number=number, pipelines=pipelines, run=run), run)
    records, _ = records_of(recorder, tmp_path)
    listed = {record.iteration: record.energy_by_pipeline_j for record in records if record.energy_by_pipeline_j}
    assert listed == {9: (50.0,) * 65, 10: (50.0,) * 65, 19: (50.0,) * 65, 20: (50.0,) * 65}
    assert {record.phase for record in records if record.iteration in (9, 19)} == {"observe"}


def test_the_first_iterations_of_a_long_job_are_summed_up(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr("perseus_ds.server.recorder.KEPT", 20)
    monkeypatch.setattr("perseus_ds.server.recorder.MORE", 10)
    recorder._writer._thin_at = 30
    for number in range(1, 71):
        recorder.add(*under_plan(number), AT_DEFAULT_CLOCKS, GOOD)
        recorder.flush()
    records, end = records_of(recorder, tmp_path)
    first, *others = records
    assert [record.iteration for record in others] == list(range(51, 71))
    assert isinstance(first, SummedIterations)
    assert (first.first, first.last, first.total.iterations) == (1, 50, 50)
    assert (end.iterations, end.under_plans.saved_j) == (70, pytest.approx(70 * 20.0))
    assert fold(read_records(tmp_path)).current.under_plans == end.under_plans
    again = JobsOfFile()
    writer = RecordWriter(tmp_path, again, print)
    writer.write(Failed(error="of a later start"))
    writer.flush()
    assert again.current.under_plans == end.under_plans, "a later start has the same sums"


def test_a_disk_too_full_for_sums_leaves_all_records(recorder, tmp_path, received, disk_with, monkeypatch):
    monkeypatch.setattr("perseus_ds.server.recorder.thin", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    recorder._writer._thin_at = 5
    for number in range(1, 8):
        recorder.add(*under_plan(number))
        recorder.flush()
    records, _ = records_of(recorder, tmp_path)
    assert [record.iteration for record in records] == list(range(1, 8))
    warned = [text for text in said(received, warns=True) if "disk full" in text]
    assert len(warned) == 1, "it is tried again later"


def test_a_job_that_ends_while_its_records_are_summed_up_keeps_them_and_its_end(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr("perseus_ds.server.recorder.KEPT", 20)
    monkeypatch.setattr("perseus_ds.progress.thinning._PAUSE_EVERY", 1)
    has_begun = threading.Event()
    pause = SimpleNamespace(sleep=lambda _: has_begun.set() or time.sleep(0.2))
    monkeypatch.setattr("perseus_ds.progress.thinning.time", pause)
    recorder._writer._thin_at = 70
    for number in range(1, 71):
        recorder.add(*under_plan(number))
    recorder._writer.flush(0.0)
    assert has_begun.wait(60.0)
    recorder.add(*under_plan(71))
    records, end = records_of(recorder, tmp_path)
    assert [record.iteration for record in records] == list(range(1, 72))
    assert end.iterations == 71
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def test_energy_that_cannot_be_read_is_left_out_and_said_to_be(tmp_path, received):
    recorder = Recorder(tmp_path, simulated=False, send=received.append, has_monitor=True)
    recorder.start(Started())
    recorder.add(*under_plan(1, energy_j=math.nan), AT_DEFAULT_CLOCKS, GOOD)
    recorder.add(*under_plan(2), AT_DEFAULT_CLOCKS, GOOD)
    (first, _), end = records_of(recorder, tmp_path)
    assert (first.energy_j, first.power_w, first.saved) == (None, None, None)
    assert "NaN" not in (tmp_path / "run.jsonl").read_text()
    assert all(math.isfinite(value) for each in observed(received) for _, value in each.figures)
    assert (end.energy_j, end.under_plans.saved) == (80.0, pytest.approx(0.2))
    assert any("not counting 1 iterations" in line for line in said(received))


def test_drift_is_that_of_the_last_look_until_the_job_profiles_again(recorder, tmp_path):
    recorder.add(*under_plan(1, drift=0.03))
    recorder.add(*under_plan(2))
    recorder.add(seen({}, number=3), Run("warm-up"))
    recorder.add(*under_plan(4))
    records, _ = records_of(recorder, tmp_path)
    assert [record.drift for record in records] == [0.03, 0.03, None, None]


def test_a_profile_that_no_longer_fits_predicts_neither_plans_nor_default_clocks(recorder, tmp_path):
    refuted = Run("run", plans={0: replace(UNDER_PLAN.plans[0], forecast=replace(FORECAST, is_refuted=True))})
    for number, run in ((1, UNDER_PLAN), (2, refuted)):
        recorder.add(seen({"time_s": 1.1}, number=number, run=run), run, AT_DEFAULT_CLOCKS, GOOD)
    records, _ = records_of(recorder, tmp_path)
    assert [(record.predicted_time_s, record.default_time_s) for record in records] == [(1.0, 1.0), (None, None)]


def test_a_record_that_cannot_be_written_is_left_out_and_those_after_it_are_not(tmp_path):
    warnings = []
    writer = RecordWriter(tmp_path, JobsOfFile(), warnings.append)
    writer.write(lambda: Failed(error=object()), may_wait=True)
    writer.write(Failed.model_construct(event="failure", rank=[object()]))
    writer.write(Failed(error="/data/\udcff: no such file"))
    writer.flush()
    (record,) = read_records(tmp_path)
    assert record.error == "/data/?: no such file"
    assert ["cannot be made" in warning for warning in warnings] == [True, True]


def test_what_comes_after_the_end_of_a_job_is_not_waited_for(recorder):
    recorder.close()
    recorder.event(Failed(rank=0, error="late"))
    recorder._writer.flush(3600.0)  # ends at once


def test_what_could_not_be_written_is_written_once_that_is_possible(tmp_path, received):
    (tmp_path / "folder").write_text("")
    recorder = Recorder(tmp_path / "folder", simulated=True, send=received.append)
    recorder.start(Started())
    recorder.add(*under_plan(1))
    recorder.flush()
    (tmp_path / "folder").unlink()
    recorder.add(*under_plan(2))
    recorder.close()
    found = [*read_records(tmp_path / "folder")]
    assert [r.iteration for r in found if isinstance(r, IterationRecord)] == [1, 2]
    warned = "\n".join(said(received, warns=True))
    assert warned.count("cannot be written") == 1
    assert warned.count("can be written again") == 1


def test_a_line_of_which_only_a_part_could_be_written_is_taken_back(recorder, tmp_path, disk_with):
    recorder.flush()
    with disk_with((tmp_path / "run.jsonl").stat().st_size + 20):
        recorder.add(*under_plan(1))
        recorder.flush()
    assert len([*read_records(tmp_path)]) == 1
    recorder.add(*under_plan(2))
    records, _ = records_of(recorder, tmp_path)
    assert [record.iteration for record in records] == [1, 2]


def test_an_error_in_the_sums_of_earlier_starts_does_not_keep_records_from_being_written(tmp_path):
    (tmp_path / "run.jsonl").write_text(to_line(Started(time=1.0)))

    class Broken(JobsOfFile):
        def add(self, records):
            if records:
                raise ArithmeticError("overflow")

    warnings = []
    writer = RecordWriter(tmp_path, Broken(), warnings.append)
    writer.flush()
    writer.write(Failed(time=2.0, error="of this start"))
    writer.flush()
    assert [record.time for record in read_records(tmp_path)][:1] == [1.0]
    assert writer._thread.is_alive()
    assert "earlier starts cannot be read" in warnings[0]


def test_records_are_written_while_those_of_earlier_starts_are_read(tmp_path, monkeypatch):
    """They are then read from the file."""
    (tmp_path / "run.jsonl").write_text("".join(to_line(Started(time=float(number))) for number in range(1, 4)))
    monkeypatch.setattr("perseus_ds.artifacts.run_records.MOST_RECORD_LINE_BYTES", 500)
    begins, may_go_on, added, lines = threading.Event(), threading.Event(), [], []

    class Log(JobsOfFile):
        def add(self, records):
            begins.set()
            assert may_go_on.wait(60.0)
            added.extend(records)
            lines.append((tmp_path / "run.jsonl").read_text().count("\n"))

    writer = RecordWriter(tmp_path, Log(), print)
    assert begins.wait(60.0)
    writer.write(Failed(time=4.0, error="early"))
    may_go_on.set()
    writer.flush()
    writer.write(Failed(time=5.0, error="late"))
    writer.flush()
    assert [record.time for record in read_records(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert lines[:2] == [3, 4]
    assert [record.time for record in added] == [1.0, 2.0, 3.0, 4.0, 5.0]


FORWARD = Instruction(0, Kind.FORWARD, 0)
SPANS = [
    Span(Load(stage=0, micro_batch=0), 0.0, 0.1),
    Span(Compute(FORWARD), 0.1, 0.4),
    Span(Exchange((Transfer("activation", 0, 1, 0),)), 0.4, 0.5),
]


def ran(plan):
    clocks = SimpleNamespace(instructions=((), ()), clocks_mhz=((), ()))
    frontier = SimpleNamespace(plans={plan: clocks})
    return Run("run", plans={0: Plans(frontier, None, plan, (1.0,), (plan,))})


def timed(number, plan):
    """Return an iteration of two ranks on one node, in which the second begins 10 ms later."""
    return seen({"energy_j": 60.0}, {"energy_j": 80.0}, number=number, run=ran(plan), spans=[SPANS, SPANS], begun_s=5.0)


def job_of(*nodes):
    """Return a job of one pipeline with a rank on each of ``nodes``."""
    return SimpleNamespace(
        shown=tuple(range(len(nodes))),
        facts=[
            RankFacts(pipeline=(0, 1), copies=(rank,), key=0, schedule=b"", node=node)
            for rank, node in enumerate(nodes)
        ],
        places=[Place(pipeline=0, pipeline_rank=rank) for rank in range(len(nodes))],
        states=[RankState() for _ in nodes],
    )


@pytest.fixture
def add(tmp_path, received):
    """Return a function that logs iterations and returns whether they were wanted."""
    log = TimelineLog(tmp_path, gpu="A100", job=ProfileInfo(simulated=True), warn=received.append)

    def add(iteration, nodes=("here", "here")):
        wanted = log.wants(iteration.run)
        log.add(iteration, iteration.run, job_of(*nodes))
        return wanted

    return add


def kept(folder):
    return TimelineFile.load(folder / "timeline.json").iterations


def test_the_second_iteration_of_each_plan_is_kept_and_six_in_all(add, tmp_path):
    assert not add(seen({}, run=Run("profile"), spans=[SPANS]))
    for number in (-2, -1):
        add(seen({}, {}, number=number, run=ran(9), spans=[SPANS, []]))
    assert not (tmp_path / "timeline.json").exists(), "a rank has sent no operations"
    wanted = [add(timed(number, plan=number // 3)) for number in range(30)]
    assert wanted[:18] == [True, True, False] * 6
    assert not any(wanted[18:])
    assert [(iteration.iteration, iteration.plan) for iteration in kept(tmp_path)] == [(1 + 3 * n, n) for n in range(6)]


def test_operations_of_all_ranks_lie_on_the_first_ones_axis(add, tmp_path):
    for number in (6, 7):
        add(timed(number, plan=3))
    (iteration,) = kept(tmp_path)
    assert (iteration.iteration, iteration.plan, iteration.energy_j) == (7, 3, 140.0)
    first, second = iteration.ranks
    assert [operation.kind for operation in first] == ["load", "forward", "activation"]
    assert [operation.start_s for operation in first] == [0.0, 0.1, 0.4]
    assert [operation.start_s for operation in second] == pytest.approx([0.01, 0.11, 0.41])
    assert first[2].target == 1


def test_ranks_of_different_nodes_are_aligned_by_the_transfers_between_them(add, tmp_path):
    """Clocks of different nodes are never compared."""
    for number in (6, 7):
        add(timed(number, plan=3), nodes=("here", "there"))
    first, second = kept(tmp_path)[0].ranks
    assert second[2].end_s == first[2].end_s, "both wait for this transfer"


def test_transfers_in_both_directions_that_are_not_waited_for_tell_how_much_later_a_rank_began():
    """They are assumed to take equally long."""
    there, back = Transfer("activation", 0, 1, 0), Transfer("grad", 1, 0, 0)
    first = [Span(Launch((there,)), 0.1, 0.1), Span(Wait((back,)), 0.5, 0.55)]
    second = [Span(Wait((there,)), 0.0, 0.13), Span(Launch((back,)), 0.48, 0.48)]
    assert begin_after_s(first, second) == pytest.approx(0.02)
    assert begin_after_s(first, []) == 0.0


def test_a_timeline_that_cannot_be_written_is_said_once(tmp_path):
    warnings = []
    (tmp_path / "file").write_text("")
    log = TimelineLog(tmp_path / "file", gpu="A100", job=ProfileInfo(simulated=True), warn=warnings.append)
    for number in range(6):
        log.add(timed(number, plan=number // 2), ran(number // 2), job_of("here", "here"))
    (warning,) = warnings
    assert "cannot be written" in warning


def test_records_of_a_start_after_a_crash_begin_on_a_line_of_their_own(tmp_path):
    """The crash of a node may cut off the last line."""
    first = VirtualJob(tmp_path, mode="observe")
    first.train(3)
    first.close()
    with (tmp_path / "run.jsonl").open("ab") as file:
        file.write(b'{"simulated":true,"iteration":4,"en')
    second = VirtualJob(tmp_path, mode="observe")
    second.train(3)
    second.close()
    records = [*read_records(tmp_path)]
    assert sum(isinstance(record, IterationRecord) for record in records) == 6
    assert sum(isinstance(record, Started) for record in records) == 2


def test_the_tokens_of_all_pipelines_are_recorded(start):
    job = start(mode="observe", pipelines=2)
    job.tokens = [100, 200]
    job.train(3)
    job.tokens = [100, 0]
    job.train(2)
    assert [record.tokens for record in job.close()][1:] == [900, 900, None, None]
