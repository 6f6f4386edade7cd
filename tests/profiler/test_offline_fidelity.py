"""Offline rows compared with the model of simulated GPUs, in virtual time: noise, slow counter, limits, outliers."""

import math

import pytest
from virtual_time import VirtualTime

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.moments import PassedMoment
from perseus_ds.device.timers import FinishedIteration, Span
from perseus_ds.errors import GpuError, ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.denoise import denoise
from perseus_ds.profiler.offline import OfflineProfiler
from perseus_ds.profiler.profile_config import ProfileConfig
from perseus_ds.profiler.rows import reached_only, typical


class Rank:
    """GPU, instructions and timer of one rank, in virtual time."""

    def __init__(self, work_s, device="a100-sxm", gap_s=0.0, **gpu):
        self.now = VirtualTime()
        self.gpu = SimulatedGpu(DEVICES[device], lock_latency_s=0.015, timebase=self.now, **gpu)
        self.work_s = work_s
        self.gap_s = gap_s
        self.runs = 0
        self.stutter_every = 0
        self.prepare_s = 0.0
        self.fails_at = 0
        self._spans = []

    @property
    def instructions(self):
        return tuple(self.work_s)

    def prepare(self, stage, kind):
        self.now.sleep(self.prepare_s)

    def run(self, stage, kind):
        self.runs += 1
        if self.fails_at == self.runs:
            raise RuntimeError("out of memory")
        self.gpu.begin_work()
        self.gpu.finish_work(self.work_s[stage, kind])
        if self.stutter_every and self.runs % self.stutter_every == 0:
            self.now.sleep(self.work_s[stage, kind])

    def set_and_wait(self, clock_mhz):
        self.gpu.reset_clock() if clock_mhz is None else self.gpu.lock_clock(clock_mhz)

    def has_settled(self):
        return True

    def stage_max(self, value):
        return value

    def start_iteration(self):
        self.now.sleep(self.gap_s)
        self._spans = []

    def begin(self, operation):
        self._began_s = self.now.now_s()

    def end(self, operation):
        self._spans.append(Span(operation, self._began_s, self.now.now_s()))

    def finish_iteration(self):
        end = PassedMoment(self.now.now_s())
        return FinishedIteration(end, end, lambda: 0.0, lambda: self._spans)

    def profiler(self, **settings):
        return OfflineProfiler(
            gpu=self.gpu,
            clocks=self,
            execution=self,
            work=self,
            peers=self,
            config=ProfileConfig(**settings),
            blocking_power_w=self.gpu.model.blocking_power_w,
            counter_period_s=0.1,
            timebase=self.now,
        )


def measure(rank, clocks, **settings):
    profiler = rank.profiler(**settings)
    return [row for clock in clocks for row in profiler.measure(clock)]


CLOCKS = DEVICES["a100-sxm"].clocks_mhz[::-4][:12]


@pytest.mark.parametrize("forward_s", [0.002, 0.02, 0.1, 0.25])
def test_rows_agree_with_the_simulated_gpu(forward_s):
    """With 1 % noise on time, 2 % on power, a counter refreshed every 100 ms and a lock that takes 15 ms."""
    work_s = {(0, Kind.FORWARD): forward_s, (0, Kind.BACKWARD): 2 * forward_s}
    rank = Rank(work_s, gap_s=0.0003, time_noise=0.01, power_noise=0.02, seed=5)
    rows = measure(rank, CLOCKS)
    info = ProfileInfo(rows=[row.quality for row in rows])
    profile = denoise(StageProfile([row.measurement for row in rows], info), CLOCKS)
    model = rank.gpu.model
    for row in profile.measurements:
        time_s = work_s[row.stage, row.kind] * model.slowdown(row.clock_mhz)
        # Repetitions end at a standard error of 1 %, so some rows deviate by a little more.
        assert row.time_s == pytest.approx(time_s, rel=0.015)
        assert row.energy_j == pytest.approx(time_s * model.power_w(row.clock_mhz), rel=0.025)


@pytest.mark.parametrize(("forward_s", "gap_s"), [(0.02, 0.0003), (0.1, 0.0), (0.033, 0.02)])
def test_rows_hold_where_the_counter_looks_at_power_a_quarter_of_the_time(forward_s, gap_s):
    work_s = {(0, Kind.FORWARD): forward_s, (0, Kind.BACKWARD): 2 * forward_s}
    rank = Rank(work_s, gap_s=gap_s, conditions=["sampled-counter"])
    for row in measure(rank, CLOCKS[::4]):
        power_w = rank.gpu.model.power_w(row.measurement.clock_mhz)
        assert row.measurement.energy_j / row.measurement.time_s == pytest.approx(power_w, rel=0.02)


def test_rows_tell_temperature_and_power_state():
    rows = measure(Rank({(0, Kind.FORWARD): 0.1}, conditions=["warming"]), CLOCKS[:2], relative_error=1e-9)
    first, second = (row.quality for row in rows)
    assert second.temperature_c > first.temperature_c > 35
    assert first.power_state == "P0"


class LateGpu(SimulatedGpu):
    """A GPU whose clock follows 0.8 s after the driver has accepted it."""

    def lock_clock(self, clock_mhz):
        self._time.thread(lambda: (self._time.sleep(0.8), super(LateGpu, self).lock_clock(clock_mhz)), "late").start()


def test_a_clock_that_follows_late_is_waited_for():
    rank = Rank({(0, Kind.FORWARD): 0.002})
    rank.gpu = LateGpu(DEVICES["a100-sxm"], timebase=rank.now)
    clocks = ClockController(rank.gpu, pytest.fail, timebase=rank.now)
    rank.set_and_wait, rank.has_settled = clocks.set_and_wait, clocks.has_settled
    (row,) = measure(rank, [705])
    model = rank.gpu.model
    assert row.measurement.time_s == pytest.approx(0.002 * model.slowdown(705), rel=0.001)
    assert row.measurement.energy_j / row.measurement.time_s == pytest.approx(model.power_w(705), rel=0.01)
    assert row.quality.reached_mhz is None


class LateCounter(SimulatedGpu):
    """A GPU whose driver takes 1.5 s for its first answer: refreshes are seen at the end of a window only."""

    answers = 0

    def energy_j(self):
        self.answers += 1
        if self.answers == 1:
            self._time.sleep(1.5)
        return super().energy_j()


@pytest.mark.parametrize(("max_window_s", "is_known"), [(0.3, True), (0.19, False)])
def test_an_error_that_readings_do_not_show_yet_is_waited_for_and_else_left_open(max_window_s, is_known):
    rank = Rank({(0, Kind.FORWARD): 0.25})
    rank.gpu = LateCounter(DEVICES["a100-sxm"], timebase=rank.now)
    (row,) = measure(rank, [1410], max_window_s=max_window_s)
    assert (row.quality.energy_relative_error is not None) is is_known


def test_repetitions_end_when_the_error_is_small_enough():
    noisy, exact = (Rank({(0, Kind.FORWARD): 0.02}, time_noise=n, power_noise=n, seed=1) for n in (0.2, 0.0))
    (loud,), (calm,) = measure(noisy, CLOCKS[:1]), measure(exact, CLOCKS[:1])
    assert loud.quality.samples > 2 * calm.quality.samples
    assert loud.quality.time_relative_error == pytest.approx(0.01, abs=0.02)
    (short,) = measure(Rank({(0, Kind.FORWARD): 0.02}, time_noise=0.2, seed=1), CLOCKS[:1], max_window_s=0.5)
    assert short.quality.samples < loud.quality.samples


def test_outliers_do_not_change_the_time():
    rank = Rank({(0, Kind.FORWARD): 0.02}, time_noise=0.002)
    rank.stutter_every = 7
    (row,) = measure(rank, CLOCKS[:1])
    assert row.measurement.time_s == pytest.approx(0.02 * rank.gpu.model.slowdown(CLOCKS[0]), rel=0.01)


def test_equal_samples_have_no_error():
    assert typical([0.1, 0.1, 0.1, 0.1]) == (0.1, 0.0)


def test_clocks_beyond_the_power_limit_are_marked_and_only_the_lowest_of_them_is_kept():
    rank = Rank({(0, Kind.FORWARD): 0.05}, device="a40")
    rows = measure(rank, (1740, 1650, 1545, 1440, 1200))
    reached = [row.quality.reached_mhz for row in rows]
    limit = rank.gpu.model.reached_clock_mhz(1740)
    assert reached[:3] == [pytest.approx(limit, abs=1)] * 3
    assert reached[3:] == [None, None]
    kept, left_out = reached_only(rows)
    assert sorted(row.measurement.clock_mhz for row in kept) == [1200, 1440, 1545]
    assert sorted(row.measurement.clock_mhz for row in left_out) == [1650, 1740]


def test_a_counter_that_is_never_refreshed_is_an_error():
    rank = Rank({(0, Kind.FORWARD): 0.02}, counter_period_s=1000.0)
    with pytest.raises(GpuError, match="refreshed only 0 times"):
        measure(rank, CLOCKS[:1], max_window_s=0.2)


@pytest.mark.parametrize("answer", range(1, 6))
def test_a_rank_stops_when_a_peer_of_its_stage_gives_up(answer):
    """Peers compute together: if one of them gives up, at whichever exchange, all of them stop."""
    rank = Rank({(0, Kind.FORWARD): 0.02, (0, Kind.BACKWARD): 0.04})
    asked = []

    def stage_max(value):
        asked.append(value)
        gives_up = len(asked) >= answer and value in (0.0, 1.0)
        return math.inf if gives_up else value

    rank.stage_max = stage_max
    with pytest.raises(ProfileError, match="has this rank's stage"):
        measure(rank, CLOCKS[:1])


def test_a_rank_that_gives_up_informs_its_peers_first():
    rank = Rank({(0, Kind.FORWARD): 0.02}, counter_period_s=9.0)
    answers = []
    rank.stage_max = lambda value: answers.append(value) or value
    with pytest.raises(GpuError, match="refreshed only"):
        measure(rank, CLOCKS[:1], max_window_s=0.1)
    assert answers[-1] == math.inf


@pytest.mark.parametrize("run", [1, 3, 4, 12])
def test_a_pass_that_fails_ends_the_measurement_on_all_ranks_of_the_stage(run):
    """At whichever repetition: while settling, at the first one that is counted, and after it."""
    rank = Rank({(0, Kind.FORWARD): 0.02})
    rank.fails_at = run
    answers = []
    rank.stage_max = lambda value: answers.append(value) or value
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(rank, CLOCKS[:1])
    assert answers[-1] == math.inf
    assert math.inf not in answers[:-1]


def test_copies_of_the_inputs_are_not_part_of_a_pass():
    rank = Rank({(0, Kind.FORWARD): 0.1})
    rank.prepare_s = 0.05
    (row,) = measure(rank, CLOCKS[:1])
    assert row.measurement.time_s == pytest.approx(0.1 * rank.gpu.model.slowdown(CLOCKS[0]), rel=1e-6)


def test_what_noise_puts_below_waiting_is_measured_for_longer():
    """A backward shorter than its forward, in windows of a fifth of a second, on a GPU with 50 % noise on power."""
    distinct = 0
    for seed in range(30):
        rank = Rank({(0, Kind.FORWARD): 0.06, (0, Kind.BACKWARD): 0.03}, power_noise=0.5, seed=seed)
        try:
            rows = [row.measurement for row in measure(rank, CLOCKS[-3:], max_window_s=0.2)]
        except ProfileError:  # less than nothing
            continue
        distinct += all(row.energy_j > rank.gpu.model.blocking_power_w * row.time_s for row in rows)
    assert distinct > 26


class ContendedRank(Rank):
    """A rank whose forwards take three times as long while they are repeated alone: the host was busy then."""

    last = None

    def run(self, stage, kind):
        alone = kind is self.last is Kind.FORWARD
        self.last = kind
        self.gpu.begin_work()
        self.gpu.finish_work(self.work_s[stage, kind] * (3 if alone else 1))


def test_the_energy_of_a_backward_does_not_depend_on_how_long_its_forward_took_before():
    work_s = {(0, Kind.FORWARD): 0.05, (0, Kind.BACKWARD): 0.1}
    _, backward = measure(ContendedRank(work_s), CLOCKS[:1])
    model = DEVICES["a100-sxm"]
    time_s = 0.1 * model.slowdown(CLOCKS[0])
    assert backward.measurement.time_s == pytest.approx(time_s)
    assert backward.measurement.energy_j == pytest.approx(time_s * model.power_w(CLOCKS[0]), rel=0.02)


@pytest.mark.parametrize(("forward_s", "backward_s", "clock_mhz"), [(0.1, 0.2, 1410), (0.06, 0.03, 810)])
def test_what_is_clearly_above_waiting_is_measured_for_one_window(forward_s, backward_s, clock_mhz):
    for seed in range(6):
        rank = Rank({(0, Kind.FORWARD): forward_s, (0, Kind.BACKWARD): backward_s}, power_noise=0.02, seed=seed)
        begin_s = rank.now.now_s()
        measure(rank, [clock_mhz], max_window_s=4.0)
        assert rank.now.now_s() - begin_s < 2 * 4.0 + 2.0, seed
