"""Whatever the order of programs, marks, errors, signals and ends, a rank leaves its GPU at the default clock."""

from hostile_gpu import MOODS, HostileGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual.agent import actor_of
from virtual.time import VirtualTime

from perseus_ds.agent.rank_clocks import RankClocks
from perseus_ds.protocol.job_messages import Follow, Program
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, RankMemory

PASSES = 3
OF_THE_RANK = ["begin", "mark", "mark", "mark", "end", "unmarked", "other program", "idle", "pause", "nothing"]
ACTIONS = st.sampled_from(
    [*OF_THE_RANK, "program", "one clock", "log of the counter", "server is lost", "stall", "signal"]
)
PAUSES_S = st.sampled_from([0.0, 0.002, 0.02, 0.5, 5.0])


class RankInTrouble:
    """A rank, its memory and its agent in virtual time.

    Attributes:
        locks: Number of calls that locked a clock up to the first signal. None before it.
    """

    def __init__(self, moods):
        self.time = VirtualTime()
        self.gpu = HostileGpu(self.time, moods)
        self.actor = actor_of(self.gpu, self.time)
        self.memory = RankMemory.create()
        self.clocks = RankClocks(self.actor, self.memory, lambda message: None, lambda message: None, self.time)
        self.locks = None
        self._serial = self._slot = 0

    def act(self, action):
        memory, now_s = self.memory, self.time.now_s()
        if action in ("program", "one clock", "log of the counter"):
            self._serial += 1
            several = (1410, 900, 1200) if action == "program" else ()
            spans_s = ((0.0, 0.1), (0.1, 0.2), (0.2, 0.3)) if several else ()
            program = Program(0, 1200, several, spans_s, 0.3)
            logs = action == "log of the counter"
            self.clocks.receive_from_server(Follow(program, self._serial, 0, 0, "run", logs_energy=logs))
        elif action == "begin":
            memory.mark_begun(memory.begin_iteration(0), now_s, PASSES)
            self._slot = 0
        elif action == "mark" and self._slot < 2 * PASSES:
            memory.slots[self._slot] = now_s
            self._slot += 1
        elif action == "end" and memory.iteration:
            memory.end_iteration()
            memory.idle_since_s = now_s
            memory.mark_ended(memory.iteration, now_s)
        elif action == "unmarked":
            memory.unmarked = memory.iteration
        elif action == "other program" and memory.iteration:
            memory.change_program(DEFAULT_CLOCKS)
        elif action in ("idle", "pause"):
            memory.idle_since_s = now_s if action == "idle" else -1.0
        elif action == "server is lost":
            self.clocks.forget_server()
        elif action == "stall":
            self.actor.reset()
        elif action == "signal":
            self.clocks.revoke()
            self.actor.reset()
            if self.locks is None:
                self.locks = self.gpu.locks
        self.look()

    def wait(self, seconds):
        """Let time pass, in which the agent does what is due."""
        end_s = self.time.now_s() + seconds
        while (left_s := end_s - self.time.now_s()) > 0:
            self.time.sleep(min(left_s, max(0.001, self.look())))

    def look(self):
        self.clocks.update()
        return self.clocks.timeline.advance()

    def leave(self):
        """End the lease as the agent does, and wait for the reset."""
        self.clocks.leave()
        self.actor.reset()
        while not self.actor.is_reset:
            self.time.sleep(1.0)
        self.time.sleep(60.0)
        self.actor.close()
        self.time.sleep(1.0)


@settings(deadline=None, max_examples=40)
@given(st.lists(MOODS, max_size=8), st.lists(st.tuples(ACTIONS, PAUSES_S), max_size=20))
def test_a_rank_leaves_its_gpu_at_the_default_clock_and_its_driver_has_one_caller(moods, actions):
    rank = RankInTrouble(moods)
    for action, pause_s in [("program", 0.0), ("begin", 0.0), *actions]:
        rank.act(action)
        rank.wait(pause_s)
    rank.leave()
    assert rank.gpu.clock_mhz_now is None
    assert rank.gpu.callers <= 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(ACTIONS, PAUSES_S), max_size=20))
def test_no_clock_is_set_after_a_termination_signal(actions):
    rank = RankInTrouble([])
    for action, pause_s in [("program", 0.0), ("begin", 0.0), ("signal", 0.0), *actions]:
        rank.act(action)
        rank.wait(pause_s)
    assert rank.gpu.locks == rank.locks
    rank.leave()
    assert rank.gpu.clock_mhz_now is None
