"""Which iterations are kept operation by operation, on one time axis for all ranks."""

import pytest
from virtual.job import LoneCommunicator

from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.clocks.events import PassedEvent
from perseus_ds.clocks.timers import FinishedIteration, Span
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Load, Transfer
from perseus_ds.ranks import PipelineTopology
from perseus_ds.runtime.iterations import IterationMeasurement
from perseus_ds.runtime.timeline_log import Ran, TimelineLog

FORWARD = Instruction(0, Kind.FORWARD, 0)
SPANS = [
    Span(Load(stage=0, micro_batch=0), 0.0, 0.1),
    Span(Compute(FORWARD), 0.1, 0.4),
    Span(Exchange((Transfer("activation", 0, 1, 0),)), 0.4, 0.5),
]


def seen(*, spans):
    """A measured iteration of 1 s."""
    begin, end = PassedEvent(0.0), PassedEvent(1.0)
    finished = FinishedIteration(begin, end, lambda: 1.0, lambda: list(spans))
    return IterationMeasurement(finished, lambda: 100.0, lambda: True, (0.0, 1.0), {}, failed=False)


class TwoRanks(LoneCommunicator):
    """Rank 0, and a second rank whose iteration began 10 ms later."""

    def pipeline_gather(self, value):
        if value is None:  # a barrier
            return []
        elapsed_s, spans, clocks = value
        return [value, ([time_s - 0.01 for time_s in elapsed_s], spans, clocks)]


@pytest.fixture
def log(tmp_path):
    return TimelineLog(TwoRanks(), tmp_path, gpu="A100", simulated=True)


def test_the_second_iteration_of_each_plan_is_wanted_and_six_in_all(log):
    wanted = [log.wants("run", plan) for plan in range(8) for _ in range(3)]
    assert wanted[:6] == [False, True, False, False, True, False]
    assert not log.wants("profile", None)
    for number in range(6):
        log.keep(Ran(number, "run", number, {}), seen(spans=SPANS))
    assert not any(log.wants("run", 99) for _ in range(5))


def test_operations_of_all_ranks_lie_on_the_first_ones_axis(log, tmp_path):
    log.keep(Ran(7, "run", 3, {FORWARD: 1200}), seen(spans=SPANS))
    (kept,) = TimelineFile.load(tmp_path / "timeline.json").iterations
    assert (kept.iteration, kept.plan) == (7, 3)
    first, second = kept.ranks
    assert [operation.kind for operation in first] == ["load", "forward", "activation"]
    assert [operation.start_s for operation in first] == [0.0, 0.1, 0.4]
    assert [operation.start_s for operation in second] == pytest.approx([0.01, 0.11, 0.41])
    assert [operation.clock_mhz for operation in first] == [None, 1200, None]
    assert first[2].target == 1


def test_what_could_not_be_read_again_is_not_written(log, tmp_path, monkeypatch):
    monkeypatch.setattr("perseus_ds.runtime.timeline_log.MOST_OPERATIONS", 9)
    for number in range(3):
        log.keep(Ran(number, "run", number, {}), seen(spans=SPANS))
    log.keep(Ran(3, "run", 3, {}), seen(spans=SPANS[:1]))
    kept = TimelineFile.load(tmp_path / "timeline.json").iterations
    assert [(iteration.iteration, iteration.operations) for iteration in kept] == [(0, 6), (3, 2)]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = TimelineLog(LoneCommunicator(), tmp_path / "file", gpu="A100", simulated=True)
    for number in range(3):
        log.keep(Ran(number, "run", number, {}), seen(spans=SPANS))
    assert caplog.text.count("cannot be written") == 1


def test_ranks_of_other_pipelines_keep_nothing_and_send_nothing(tmp_path):
    log = TimelineLog(LoneCommunicator(PipelineTopology(2, (2, 3), 1, 2)), tmp_path, gpu="A100", simulated=True)
    assert not any(log.wants("run", 1) for _ in range(3))
