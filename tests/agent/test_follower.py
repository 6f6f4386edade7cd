"""Programs are followed by marks of the CPU, or of a GPU on which passes are only launched; in virtual time."""

import pytest
from virtual.agent import clocks_of
from virtual.gpu import RecordingGpu, VirtualCuda
from virtual.time import VirtualTime

from perseus_ds.protocol.latencies import LatencyTable
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, IDLE_S
from perseus_ds.protocol.job_messages import Follow, Program

LATENCY_S = 0.015
A_WHILE_S = 10.0


@pytest.fixture
def now():
    return VirtualTime()


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", lock_latency_s=LATENCY_S, timebase=now)


@pytest.fixture(params=["host", "cuda"])
def cuda(request, now, gpu):
    return VirtualCuda(now, gpu) if request.param == "cuda" else None


@pytest.fixture
def clocks(gpu, now, cuda):
    made = clocks_of(gpu, now, cuda)
    yield made
    made.close()


@pytest.fixture
def iterate(clocks, now, cuda):
    """A function that runs an iteration whose passes take 0.3 s; returns its number."""

    def iterate(program, passes=3, end=True):
        number = clocks.begin_iteration(program)
        for position in range(passes):
            clocks.mark(2 * position)
            cuda.idle(0.3) if cuda else now.sleep(0.3)
            clocks.mark(2 * position + 1)
        if end:
            clocks.end_iteration(number)
        return number

    return iterate


def changes(gpu, since_s, first=0):
    return [(clock_mhz, pytest.approx(at_s - since_s, abs=1e-6)) for clock_mhz, at_s in gpu.set_at[first:]]


def test_each_clock_is_set_as_soon_as_the_gpu_has_done_the_pass_before(clocks, gpu, now, iterate):
    begin_s = now.now_s()
    iterate(clocks.program(Program(0, 1410, (1200, 1305, 1110))))
    now.sleep(1.0)
    assert changes(gpu, begin_s) == [(1200, 0.0), (1305, 0.3), (1110, 0.6), (1200, 0.9)]


def test_the_energy_of_an_iteration_is_that_between_its_marks(clocks, gpu, now, iterate):
    before_j = gpu.true_energy_j
    numbers = [iterate(DEFAULT_CLOCKS) for _ in range(3)]
    now.sleep(2.7)
    recorded = [clocks.recorded(number) for number in numbers]
    assert [each.begun_s for each in recorded] == pytest.approx([100.0, 100.9, 101.8])
    assert sum(each.energy_j for each in recorded) == pytest.approx(gpu.model.blocking_power_w * 2.7, rel=0.05)
    assert clocks.recorded(numbers[-1] + 1) is None
    assert before_j == 0.0


def test_a_clock_is_requested_early_by_its_latency_as_soon_as_that_is_known(clocks, gpu, now, iterate):
    spans_s = ((0.0, 0.3), (0.3, 0.6), (0.6, 0.9))
    program = clocks.program(Program(0, 1410, (1110, 1110, 1410), spans_s, 0.9))
    for _ in range(12):
        iterate(program)
        now.sleep(2.0)
    clocks.poll()
    assert clocks.latencies.latest_s(1410, rises=True) == pytest.approx(LATENCY_S, abs=0.002)
    made, begin_s = len(gpu.set_at), now.now_s()
    iterate(program)
    now.sleep(1.0)
    (raised,) = [at_s - begin_s for clock_mhz, at_s in gpu.set_at[made:] if clock_mhz == 1410]
    assert 0.6 - raised == pytest.approx(LATENCY_S, abs=0.002)


def test_a_pass_that_begins_while_the_driver_is_busy_is_not_taken_to_begin_later(clocks, gpu, now, iterate):
    """Else clocks that are requested early, from the begin of a pass on, would come late."""
    clocks._link._clocks._clocks.readback.latencies = LatencyTable({(1410, True): (0.1,) * 3})
    spans_s = ((0.0, 0.3), (0.3, 0.6), (0.6, 0.9))
    begin_s = now.now_s()
    iterate(clocks.program(Program(0, 1110, (1200, 1110, 1410), spans_s, 0.9)))  # 1110 is being set at 0.3 s
    now.sleep(1.0)
    assert (1410, pytest.approx(0.5, abs=1e-6)) in [(clock_mhz, at_s - begin_s) for clock_mhz, at_s in gpu.set_at]


def test_an_iteration_that_names_a_program_before_the_agent_knows_it_follows_it_from_then_on(clocks, gpu, now):
    number = clocks.begin_iteration(3)
    now.sleep(0.1)
    assert gpu.clocks_set == []
    clocks._link.send(Program(3, 1200))
    now.sleep(0.1)
    assert gpu.clocks_set == [1200]
    clocks.end_iteration(number)


def test_the_rest_of_an_iteration_can_run_under_another_program(clocks, gpu, now, iterate):
    number = iterate(clocks.program(Program(0, 1410, (1200, 1305, 1110))), passes=1, end=False)
    now.sleep(0.5)
    clocks.change_program(DEFAULT_CLOCKS)
    now.sleep(0.5)
    assert gpu.clocks_set == [1200, 1305, None]
    clocks.change_program(clocks.program(Program(0, 1110)))
    now.sleep(0.5)
    clocks.end_iteration(number)
    now.sleep(1.0)
    assert gpu.clocks_set == [1200, 1305, None, 1110]
    assert clocks.recorded(number).energy_j > 0, "it is read once, from the begin to the end"


def test_a_rank_that_is_idle_returns_to_the_default_clock_once_the_gpu_is_done(clocks, gpu, now, iterate):
    begin_s = now.now_s()
    iterate(clocks.program(Program(0, 1200)))
    now.sleep(A_WHILE_S)
    assert changes(gpu, begin_s) == [(1200, 0.0), (None, 0.9 + IDLE_S)]


def test_work_outside_iterations_runs_at_the_default_clock_at_once(clocks, gpu, now, iterate):
    program = clocks.program(Program(0, 1200))
    iterate(program)
    now.sleep(1.0)
    clocks.pause()
    now.sleep(0.1)
    assert gpu.clocks_set == [1200, None], "once the GPU is done with the iteration"
    iterate(program)
    now.sleep(0.1)
    assert gpu.clocks_set == [1200, None, 1200]


def test_an_iteration_that_is_broken_off_leaves_nothing_to_wait_for(clocks, gpu, now, iterate):
    iterate(clocks.program(Program(0, 1410, (1200, 1305, 1110))), passes=1)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set[-1] is None


def test_iterations_that_begin_while_the_driver_hangs_are_recorded_without_energies(clocks, gpu, now, iterate):
    energy_j = gpu.energy_j
    gpu.energy_j = lambda: now.sleep(20.0) or energy_j()
    number = iterate(DEFAULT_CLOCKS)
    now.sleep(5.0)
    assert "has not answered for" in str(clocks.problem)
    gpu.energy_j = energy_j
    assert clocks.recorded(number, waits=True).energy_j != clocks.recorded(number, waits=True).energy_j
    now.sleep(60.0)
    assert clocks.problem is None
    number = iterate(DEFAULT_CLOCKS)
    now.sleep(1.0)
    assert clocks.recorded(number).energy_j > 0


def test_more_programs_than_there_are_numbers_reuse_the_numbers(clocks, gpu, now, iterate):
    for clock_mhz in gpu.supported_clocks_mhz() * 4:
        iterate(clocks.program(Program(0, clock_mhz, (), (), clock_mhz / 7 + len(gpu.set_at))), passes=1)
        now.sleep(0.3)
    assert gpu.clocks_set[-1] == gpu.supported_clocks_mhz()[-1]
