"""A loop like the agent's checks a GPU's marks often enough, in virtual time."""

import pytest
from virtual.agent import actor_of
from virtual.gpu import RecordingGpu

from perseus_ds.agent.rank_clocks import RankClocks
from perseus_ds.protocol.job_messages import Follow, Program
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, RankMemory
from perseus_ds.timebase import Flag

PASS_S = 0.03
BY_GPU = 5e-324
"""As a number of 8 bytes, the 1 that a GPU writes."""


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", timebase=now)


@pytest.fixture
def memory():
    return RankMemory.create()


@pytest.fixture
def clocks(gpu, memory, now):
    made = RankClocks(actor_of(gpu, now), memory, lambda message: None, lambda message: None, now)
    yield made
    made.leave()


def test_an_iteration_that_has_just_begun_is_checked_soon(clocks, memory):
    assert clocks.timeline.advance() > 0.01, "no mark is awaited"
    memory.begin_iteration(DEFAULT_CLOCKS)
    assert clocks.timeline.advance() <= 0.001


@pytest.mark.parametrize("varies", [0.0, -0.1, 0.1])
def test_a_mark_is_found_soon_although_passes_vary(clocks, memory, gpu, now, varies):
    is_over, notifier = Flag(now), now.notifier()

    def loop():
        while not is_over.is_set():
            notifier.wait(max(1e-6, clocks.timeline.advance()))  # virtual time must advance

    now.thread(loop, "loop").start()
    program = Program(0, None, (1110, 1410) * 5)
    clocks.receive_from_server(Follow(program, serial=1, from_iteration=0, shown_from=0, phase="run"))
    for factor in (1.0, 1.0 + varies):
        iteration, ends = memory.begin_iteration(0), []
        clocks.timeline.advance()
        memory.mark_begun(iteration, 0.0, 10)
        notifier.notify()  # as the client wakes the agent
        for position in range(10):
            memory.slots[2 * position] = BY_GPU
            now.sleep(PASS_S * factor)
            memory.slots[2 * position + 1] = BY_GPU
            ends.append(now.now_s())
        memory.end_iteration()
        memory.mark_ended(iteration, 0.0)
        now.sleep(PASS_S)
    is_over.set()
    asked_s = [at_s for _, at_s in gpu.set_at if at_s > ends[0]]
    late_s = [at_s - end_s for at_s, end_s in zip(asked_s[:9], ends[:9], strict=True)]
    assert all(0 <= each_s <= PASS_S * abs(varies) + 0.002 for each_s in late_s[:2]), "before the variation is known"
    assert all(0 <= each_s <= 0.003 for each_s in late_s[2:]), late_s
