"""Iterations replayed by a CUDA graph, without passes in Python, in virtual time."""

import statistics
from types import SimpleNamespace

import pytest
import torch
from frontiers import save_mixed_plan
from virtual.cuda import VirtualCuda, wait_for_event
from virtual.gpu import RecordingGpu
from virtual.job import SLOWER, in_order
from virtual.time import VirtualTime

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import Failed, PlanJudged
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.client.operations import CapturedIteration, OperationHooks
from perseus_ds.client.timers import CudaExecution
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.protocol.job_messages import Follow, Program
from perseus_ds.protocol.layout import DEFAULT_CLOCKS

TAIL_S = 0.04


@pytest.fixture
def plain(start):
    """Return a job without graphs."""
    return run_to_the_plan(start("plain", cuda=True, mode="auto", tail_s=TAIL_S, **SLOWER))


def run_to_the_plan(job):
    job.train_until_compared()
    job.train(10)
    job.close()
    return job


@pytest.mark.parametrize(
    "in_graph_s",
    [0.015, pytest.param(0.0, marks=pytest.mark.extended)],
    ids=["part of the tail in the graph", "tail after the graph"],
)
def test_replayed_iterations_are_profiled_and_planned_like_others(start, plain, in_graph_s):
    tail_s = TAIL_S - in_graph_s
    job = run_to_the_plan(start("graphs", graph_tail_s=in_graph_s, mode="auto", tail_s=tail_s, **SLOWER))
    assert job.events(Failed) == []
    assert in_order([phase for phase, _, _ in job.taken])[:5] == in_order([phase for phase, _, _ in plain.taken])[:5]
    assert job.events(PlanJudged)[0].kept
    profiles = [StageProfile.load(of.folder) for of in (job, plain)]
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.TAIL):
        graph, eager = (profile.at_highest_clock(0, kind) for profile in profiles)
        assert graph.time_s == pytest.approx(eager.time_s, rel=0.02)
        if kind is not Kind.TAIL or not in_graph_s:
            assert graph.energy_j == pytest.approx(eager.energy_j, rel=0.05)
    time_s, plain_s = (statistics.median(taken[1] for taken in of.taken[-10:]) for of in (job, plain))
    assert time_s == pytest.approx(plain_s, rel=0.01)


@pytest.fixture
def mixed(start, tmp_path):
    """Return the path of a frontier with a plan in which the clock changes at each instruction."""
    job = start("profile", cuda=True, mode="profile", tail_s=TAIL_S)
    job.train_until("observe")
    job.close()
    save_mixed_plan(tmp_path / "mixed", job.schedule, StageProfile.load(job.folder))
    return str(tmp_path / "mixed")


def test_each_pass_of_a_replay_runs_at_its_clock(start, mixed):
    changes = []
    for keys in ({"cuda": True}, {"graph_tail_s": 0.0}):
        job = start(str(keys), mode="run", frontier=mixed, gpu_class=RecordingGpu, tail_s=TAIL_S, **keys)
        job.train(30)
        job.close()
        under_plan = [r for r in job.records() if isinstance(r, IterationRecord) and r.phase == "run"]
        assert under_plan
        changes.append((job.gpu.clocks_set, [at_s for _, at_s in job.gpu.set_at]))
    (eager, eager_s), (graph, graph_s) = changes
    assert len(set(eager)) > 3
    assert graph == eager
    assert graph_s == pytest.approx(eager_s, abs=0.002)


def test_times_are_those_of_their_replay_even_if_the_host_is_ahead():
    time = VirtualTime()
    cuda = VirtualCuda(time)
    clocks = SimpleNamespace(mark=print, begin_iteration=lambda order, positions: 1, change_program=print)
    timers = CudaExecution(torch.device("cuda", 0), cuda, wait_for_event)
    hooks, captured = OperationHooks(timers, clocks), CapturedIteration(clocks, timers.graph_times())
    lengths_s, seen = iter([0.1, 0.2, 0.3]), []
    forward = Compute(Instruction(0, Kind.FORWARD, 0))
    timed = Follow(Program(DEFAULT_CLOCKS), 0, 0, 0, "observe", times="passes")
    graph = cuda.CUDAGraph()
    with cuda.graph(graph), captured.operation(forward):
        cuda.enqueue(lambda: time.sleep(next(lengths_s)))
    for number in range(1, 4):
        hooks.start_iteration(timed, number, (forward,))
        hooks.replay(captured, graph.replay)
        seen.append(timers.finish_iteration())
    assert [span.time_s for finished in seen for span in finished.spans()] == pytest.approx([0.1, 0.2, 0.3])


def test_waiting_for_a_slower_pipeline_within_the_graph_is_no_part_of_the_tail(start):
    job = start(graph_tail_s=0.015, mode="profile", pipelines=2, tail_s=TAIL_S)
    job.slowdowns[1] = 1.2
    job.train_until("observe")
    job.close()
    profile = StageProfile.load(job.folder)
    assert profile.at_highest_clock(0, Kind.TAIL).time_s == pytest.approx(0.015 + 1.2 * TAIL_S, rel=0.03)
    assert profile.info.tail_s[0] == pytest.approx(0.015 + 1.2 * TAIL_S, rel=0.2)
