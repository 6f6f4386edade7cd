"""Programs follow marks of the CPU, or of a GPU on which passes are only launched, in virtual time."""

import itertools
import math

import pytest
from virtual.agent import clocks_of
from virtual.cuda import VirtualCuda
from virtual.gpu import RecordingGpu

from perseus_ds.errors import GpuError
from perseus_ds.protocol.job_messages import Follow, LatencyTable, Program, RankFailed, RankReport, Report, Say
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, IDLE_S, NEXT_WITHIN_S
from perseus_ds.simulation.gpu import SimulatedGpu

LATENCY_S = 0.015
A_WHILE_S = 10.0


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", lock_latency_s=LATENCY_S, timebase=now)


@pytest.fixture(params=["host", "cuda"])
def cuda(request, now, gpu):
    return VirtualCuda(now, gpu) if request.param == "cuda" else None


@pytest.fixture
def clocks(gpu, now, cuda, told):
    made = clocks_of(gpu, now, cuda, told.append)
    yield made
    made.close()


@pytest.fixture
def runs(agent):
    """A function that sends the program of an order and returns the order's number."""
    serials = itertools.count(1)

    def runs(first_mhz, clocks_mhz=(), spans_s=(), time_s=0.0, *, number=0):
        program = Program(number, first_mhz, clocks_mhz, spans_s, time_s)
        agent.receive_from_server(Follow(program, next(serials), 0, 0, "run"))
        return number

    return runs


@pytest.fixture
def iterate(clocks, now, cuda):
    """A function that runs an iteration with passes of 0.3 s and returns its number."""

    def iterate(order, passes=3, end=True, pass_s=0.3):
        number = clocks.begin_iteration(order, passes)
        for position in range(passes):
            clocks.mark(2 * position)
            cuda.idle(pass_s) if cuda else now.sleep(pass_s)
            clocks.mark(2 * position + 1)
        if end:
            clocks.end_iteration(number)
        return number

    return iterate


def changes(gpu, since_s):
    return [(clock_mhz, pytest.approx(at_s - since_s, abs=1e-6)) for clock_mhz, at_s in gpu.set_at]


def test_each_clock_is_set_as_soon_as_the_gpu_has_done_the_pass_before(clocks, gpu, now, iterate, runs):
    begin_s = now.now_s()
    iterate(runs(1410, (1200, 1305, 1110)))
    now.sleep(1.0)
    assert changes(gpu, begin_s)[:4] == [(1200, 0.0), (1305, 0.3), (1110, 0.6), (1200, 0.9)]


def test_the_energy_of_an_iteration_is_that_between_its_marks(agent, gpu, now, iterate, runs):
    before_j = gpu.true_energy_j
    numbers = [iterate(DEFAULT_CLOCKS) for _ in range(3)]
    now.sleep(2.7)
    recorded = [agent.timeline.record_of(number) for number in numbers]
    assert [each.begun_s for each in recorded] == pytest.approx([100.0, 100.9, 101.8])
    assert sum(each.energy_j for each in recorded) == pytest.approx(gpu.model.blocking_power_w * 2.7, rel=0.05)
    assert agent.timeline.record_of(numbers[-1] + 1) is None
    assert before_j == 0.0


def test_a_clock_is_requested_early_by_its_latency_as_soon_as_that_is_known(agent, told, gpu, now, iterate, runs):
    spans_s = ((0.0, 0.3), (0.3, 0.6), (0.6, 0.9))
    program = runs(1410, (1110, 1110, 1410), spans_s, 0.9)
    for _ in range(12):
        iterate(program)
        now.sleep(2.0)
    (*_, latencies) = [message for message in told if isinstance(message, LatencyTable)]
    assert {clock_mhz for clock_mhz, _ in latencies.samples_s} == {1110, 1410}
    assert agent._actor.readback.latencies.latest_s(1410, rises=True) == pytest.approx(LATENCY_S, abs=0.002)
    made, begin_s = len(gpu.set_at), now.now_s()
    iterate(program)
    now.sleep(1.0)
    (raised,) = [at_s - begin_s for clock_mhz, at_s in gpu.set_at[made:] if clock_mhz == 1410]
    assert 0.6 - raised == pytest.approx(LATENCY_S, abs=0.002)


def test_a_pass_that_begins_while_the_driver_is_busy_is_not_taken_to_begin_later(agent, gpu, now, iterate, runs):
    """Otherwise clocks that are requested early, relative to the beginning of a pass, would be late."""
    agent._actor.readback.latencies = LatencyTable({(1410, True): (0.1,) * 3})
    spans_s = ((0.0, 0.3), (0.3, 0.6), (0.6, 0.9))
    begin_s = now.now_s()
    iterate(runs(1110, (1200, 1110, 1410), spans_s, 0.9))  # 1110 is being set at 0.3 s
    now.sleep(1.0)
    assert (1410, pytest.approx(0.5, abs=1e-6)) in [(clock_mhz, at_s - begin_s) for clock_mhz, at_s in gpu.set_at]


def test_an_iteration_that_has_begun_is_not_changed_by_what_the_server_says_then(
    clocks, agent, gpu, now, iterate, runs
):
    iterate(3, passes=1, end=False)
    now.sleep(0.1)
    runs(1200, number=3)
    now.sleep(1.0)
    assert gpu.clocks_set == []
    clocks.end_iteration(1)
    iterate(3)
    now.sleep(0.003)
    assert gpu.clocks_set == [1200]
    assert [agent.timeline.serial_of(iteration) for iteration in (1, 2, 3)] == [0, 1, -1]


def test_an_order_of_default_clocks_of_which_nothing_was_said_or_whose_server_is_gone_runs_at_them(
    agent, gpu, now, iterate, runs
):
    runs(1200)
    iterate(0, passes=1)
    iterate(7, passes=1)
    now.sleep(1.0)
    assert gpu.clocks_set == [1200, None]
    iterate(0, passes=1)
    now.sleep(1.0)
    agent.forget_server()
    iterate(0, passes=1)
    now.sleep(1.0)
    assert gpu.clocks_set == [1200, None, 1200, None]


def test_a_report_is_completed_once_the_gpu_has_done_its_iteration(clocks, told, now, iterate, runs):
    """The host is ahead of the GPU, and may send the report earlier."""
    runs(1200)
    number = iterate(0)
    clocks.send(Report(number, 0, 1, key=5, time_s=0.9))
    now.sleep(2.0)
    (report,) = [message for message in told if isinstance(message, RankReport)]
    assert (report.report.iteration, report.serial, report.has_failed) == (number, 1, False)
    assert report.begun_s == pytest.approx(100.0, abs=0.001)
    assert report.energy_j > 0
    assert report.status.changes == 1


def test_a_report_counts_the_changes_and_skipped_requests_of_its_own_iteration(clocks, told, now, iterate, runs):
    program = runs(1410, (1200, 1305, 1110))
    for pass_s in (LATENCY_S / 4, 0.3):  # in the first iteration, the last request is due before 1200 is set
        number = iterate(program, pass_s=pass_s)
        now.sleep(1.0)
        clocks.send(Report(number, 0, 1, key=5, time_s=3 * pass_s))
    reports = [message for message in told if isinstance(message, RankReport)]
    assert [report.status.skips for report in reports] == [2, 0]
    # The pause between both has a change to the default clock. The clock of the next iteration is set after the report.
    assert [report.status.changes for report in reports] == [1, 4]


def test_energy_that_the_driver_reads_late_does_not_count(clocks, agent, gpu, now, iterate):
    """The counter has advanced, by the energy of what came after the iteration."""
    number, energy_j = iterate(DEFAULT_CLOCKS, end=False), gpu.energy_j
    now.sleep(1.0)
    gpu.energy_j = lambda: now.sleep(2.0) or energy_j()
    clocks.end_iteration(number)
    now.sleep(3.0)
    gpu.energy_j = energy_j
    assert math.isnan(agent.timeline.record_of(number).energy_j)
    number = iterate(DEFAULT_CLOCKS)
    now.sleep(1.0)
    assert agent.timeline.record_of(number).energy_j > 0


def test_the_rest_of_an_iteration_can_run_under_another_program(clocks, agent, gpu, now, iterate, runs):
    number = iterate(runs(1410, (1200, 1305, 1110)), passes=1, end=False)
    now.sleep(0.5)
    clocks.change_program(DEFAULT_CLOCKS)
    now.sleep(0.5)
    assert gpu.clocks_set == [1200, 1305, None]
    clocks.change_program(runs(1110, number=1))
    now.sleep(0.5)
    clocks.end_iteration(number)
    now.sleep(1.0)
    assert gpu.clocks_set == [1200, 1305, None, 1110, None]
    assert agent.timeline.record_of(number).energy_j > 0, "it is read once at the beginning and once at the end"


def test_the_clock_is_the_default_one_if_the_next_iteration_does_not_follow_at_once(gpu, cuda, now, iterate, runs):
    begin_s, program = now.now_s(), runs(1200)
    for pause_s in (0.003, 0.02, A_WHILE_S):
        iterate(program)
        now.sleep(0.9 + pause_s if cuda else pause_s)
    first_end_s = 0.9 + 0.003 + 0.9
    second_s = first_end_s + 0.02
    assert changes(gpu, begin_s) == [
        (1200, 0.0),
        (None, first_end_s + NEXT_WITHIN_S),
        (1200, second_s),
        (None, second_s + 0.9 + NEXT_WITHIN_S),
    ]


def test_the_users_part_of_a_tail_keeps_its_clock_for_two_seconds(clocks, gpu, now, iterate, runs):
    begin_s = now.now_s()
    number = iterate(runs(1200), end=False)
    clocks.may_idle()
    idle_s = now.now_s()
    now.sleep(A_WHILE_S)
    clocks.end_iteration(number)
    now.sleep(A_WHILE_S)
    assert changes(gpu, begin_s) == [(1200, 0.0), (None, idle_s - begin_s + IDLE_S)]


def test_work_outside_iterations_runs_at_the_default_clock_at_once(clocks, gpu, cuda, now, iterate, runs):
    program = runs(1200)
    iterate(program)
    clocks.pause()
    now.sleep(0.9 + 0.001 if cuda else 0.001)
    assert gpu.clocks_set == [1200, None], "the clock is reset when the GPU has finished the iteration"
    iterate(program)
    now.sleep(0.016 if cuda else 0.003)
    assert gpu.clocks_set == [1200, None, 1200]


def test_an_iteration_that_is_broken_off_leaves_nothing_to_wait_for(clocks, gpu, now, iterate, runs):
    iterate(runs(1410, (1200, 1305, 1110)), passes=1)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set[-1] is None


def test_iterations_that_begin_while_the_driver_hangs_are_reported_without_energies(
    clocks, agent, told, gpu, now, iterate
):
    energy_j = gpu.energy_j
    gpu.energy_j = lambda: now.sleep(20.0) or energy_j()
    iterate(DEFAULT_CLOCKS)
    now.sleep(5.0)
    assert "has not answered for" in str(agent._actor.problem)
    gpu.energy_j = energy_j
    clocks.send(Report(iterate(DEFAULT_CLOCKS), DEFAULT_CLOCKS, 0, key=5, time_s=0.9))
    now.sleep(4.0)
    agent.update()
    (report,) = [message for message in told if isinstance(message, RankReport)]
    assert math.isnan(report.energy_j)
    now.sleep(60.0)
    assert agent._actor.problem is None
    number = iterate(DEFAULT_CLOCKS)
    now.sleep(1.0)
    assert agent.timeline.record_of(number).energy_j > 0


class BrokenMarks:
    """Marks that cannot be written."""

    def fail(self, *_):
        raise GpuError("The GPU cannot write marks: writing a mark failed with CUDA_ERROR_INVALID_HANDLE.")

    begin = mark = end = fail


@pytest.fixture
def iterate_with_failing_marks(clocks, now, cuda):
    """A function that runs an iteration of three passes in which marks fail from a pass on."""

    def iterate(order, first_failing):
        working = clocks._marks
        number = clocks.begin_iteration(order, 3)
        for position in range(3):
            if position == first_failing:
                clocks._marks = BrokenMarks()
            clocks.mark(2 * position)
            cuda.idle(0.3) if cuda else now.sleep(0.3)
            clocks.mark(2 * position + 1)
        clocks.end_iteration(number)
        clocks._marks = working
        return number

    return iterate


def test_a_mark_that_cannot_be_written_resets_the_clock_and_is_reported_and_the_plan_continues_later(
    clocks, agent, told, gpu, now, iterate, iterate_with_failing_marks, runs
):
    program = runs(1410, (1200, 1305, 1110))
    iterate(program)
    now.sleep(1.0)
    assert gpu.clocks_set[-2:] == [1200, None]
    number = iterate_with_failing_marks(program, first_failing=1)
    clocks.send(Report(number, 0, 1, key=5, time_s=0.9))
    now.sleep(0.5)
    assert gpu.clocks_set[-1] is None
    (failed,) = [message for message in told if isinstance(message, RankFailed)]
    assert "a mark could not be written" in failed.error
    (report,) = [message for message in told if isinstance(message, RankReport)]
    assert (report.has_failed, math.isnan(report.energy_j)) == (True, True), "it is not evidence on the plan"
    now.sleep(2.0)
    agent.update()  # the driver is tested
    now.sleep(2.0)
    first = len(gpu.clocks_set)
    number = iterate(program)
    now.sleep(1.0)
    assert gpu.clocks_set[first : first + 3] == [1200, 1305, 1110]
    assert agent.timeline.record_of(number).energy_j > 0


def test_marks_that_can_never_be_written_leave_nothing_to_wait_for(
    agent, told, gpu, now, iterate_with_failing_marks, runs
):
    program = runs(1410, (1200, 1305, 1110))
    for _ in range(100):
        iterate_with_failing_marks(program, first_failing=0)
        now.sleep(0.1)
        agent.update()
    assert gpu.clocks_set[-1] is None
    assert len([message for message in told if isinstance(message, RankFailed)]) == 1, "it is said once"
    assert agent.timeline._iteration == 101


@pytest.mark.parametrize(("late_s", "counts_s"), [(0.001, 0.0), (0.006, 0.006)])
def test_the_delay_until_marks_are_found_on_a_busy_node_is_measured(
    clocks, agent, cuda, now, iterate, runs, late_s, counts_s
):
    expected_s = counts_s if cuda is None else 0.0  # a GPU writes no times
    clocks._link.late_s = late_s
    for _ in range(5):
        number = iterate(runs(1410, (1200, 1305, 1110)))
        now.sleep(1.0)
    assert agent.timeline.record_of(number).status.late_s == pytest.approx(expected_s, abs=1e-6)


def test_a_clock_that_others_change_is_said_once_with_the_usual_causes(clocks, agent, gpu, now, iterate, runs):
    gpu.begin_work()
    iterate(runs(1200), passes=0, end=False)
    for _ in range(5):
        now.sleep(5.0)
        SimulatedGpu.reset_clock(gpu)
    now.sleep(5.0)
    (said,) = [message for message in clocks.received() if isinstance(message, Say)]
    assert "was changed from outside 4 times: 1200 MHz were set" in said.text
    assert "dcgmi config --enforce" in said.text
