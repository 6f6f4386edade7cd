"""Several jobs under one limit: the caps that they get, and the order in which these change."""

import fcntl
import itertools
import os
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from frontiers import save_true_frontier
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_selector import FRONTIER
from virtual.job import VirtualJob
from virtual.time import VirtualTime

from perseus_ds.artifacts.run_records import Ended, IterationRecord, PolicyChanged, PowerCapChanged, Started, to_line
from perseus_ds.cli.main import main
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.decisions import MARGIN
from perseus_ds.policy.share import CAP_FILE, Share, SharingJob, SpeedOfCap, allocate


def frontier_of(times, energies):
    """A frontier of plans with these times and energies; the baseline is the fastest plan."""
    plans = tuple(
        replace(FRONTIER.plans[0], time_s=time_s, energy_j=energy_j)
        for time_s, energy_j in zip(sorted(times), sorted(energies, reverse=True), strict=True)
    )
    return replace(FRONTIER, plans=plans, baseline=plans[0], t_min_s=plans[0].time_s)


@st.composite
def frontiers(draw):
    count = draw(st.integers(1, 5))
    numbers = st.integers(100, 200)
    times, energies = (draw(st.lists(numbers, min_size=count, max_size=count, unique=True)) for _ in range(2))
    return frontier_of([time / 100 for time in times], [5.0 * energy for energy in energies])


@given(st.lists(st.tuples(frontiers(), st.floats(0.5, 2.0)), min_size=1, max_size=3), st.floats(0.8, 2.5))
@settings(max_examples=200)
def test_no_choice_of_plans_under_the_limit_is_faster_than_the_caps(jobs, fraction):
    speeds = [SpeedOfCap.of(frontier, 2.0, weight) for frontier, weight in jobs]
    plans = [  # of each job: the cap under which each plan runs, and what its speed counts
        [(2 * p.mean_power_w / (1 - MARGIN), weight * frontier.baseline.time_s / p.time_s) for p in frontier.plans]
        for frontier, weight in jobs
    ]
    limit_w = fraction * sum(speed.caps_w[0] for speed in speeds)
    caps_w = allocate(speeds, limit_w)
    if fraction < 1:
        assert caps_w == [speed.caps_w[0] for speed in speeds]
        return
    assert sum(caps_w) <= limit_w + 1e-6

    def value(choice):
        return sum(value for _, value in choice)

    under_limit = [c for c in itertools.product(*plans) if sum(cap_w for cap_w, _ in c) <= limit_w]
    best = max(map(value, under_limit), default=0.0)
    promised = sum(speed.at(cap_w) for speed, cap_w in zip(speeds, caps_w, strict=True))
    # Caps are multiples of 0.1 W.
    rounding = sum(0.2 * max(np.diff(s.values) / np.diff(s.caps_w), default=0.0) for s in speeds)
    assert promised >= best - rounding - 1e-9
    # The fastest plan under its cap is what a job runs.
    done = value(
        max((p for p in own if p[0] <= cap_w + 1e-9), key=lambda p: p[1])
        for own, cap_w in zip(plans, caps_w, strict=True)
    )
    widest = max((max(np.diff(speed.values), default=0.0) for speed in speeds), default=0.0)
    assert done >= promised - widest - 1e-9


def test_a_job_that_counts_more_gets_more():
    light, heavy = (SpeedOfCap.of(FRONTIER, 10.0, weight) for weight in (1.0, 3.0))
    light_w, heavy_w = allocate([light, heavy], 0.5 * (light.caps_w[0] + light.caps_w[-1]) * 2)
    assert heavy_w > light_w
    assert allocate([light, light], 2000 * 10) == [10_000, 10_000]  # more than they can use


class FollowingJob:
    """A job that writes records as a real one does, and follows its cap file as ``PlanSelector`` does.

    A cap that it reads at the end of an iteration counts from the iteration after the next one; the record of an
    iteration is written when the next one ends.

    Attributes:
        may_draw_w: The most that the present iteration draws.
    """

    SCALE = 10.0

    def __init__(self, folder, time, *, time_s=1.0, plans=True):
        self.folder, self._time, self._time_s = folder, time, time_s
        self.frontier = frontier_of(
            [time_s * plan.time_s for plan in FRONTIER.plans[::4]], [plan.energy_j for plan in FRONTIER.plans[::4]]
        )
        self.has_plans = plans
        self.cap_file = folder / CAP_FILE
        self.default_w = self.SCALE * self.frontier.baseline.mean_power_w
        self.ended = True
        self.phase = "run"
        self.limited = False
        self._step = 0

    def start(self, policy=None, frontier=None):
        self.folder.mkdir(exist_ok=True)
        if self.has_plans:
            self.frontier.save(self.folder if frontier is None else frontier)
        signal = {"name": "power_cap", "signal": str(self.cap_file)}
        mode = "auto" if frontier is None else "run"
        named = None if frontier is None else str(frontier)
        self._write(Started(mode=mode, policy=policy or signal, frontier=named, time=self._now_s))
        self.ended = False
        self._caps_w = [None, None, None]  # of the iteration before, the present one, and the next one
        return self

    @property
    def may_draw_w(self):
        return self._draws_w(self._caps_w[1])

    @property
    def speed(self):
        return self.frontier.baseline.time_s / self._plan(self._caps_w[1]).time_s

    def make_plans(self):
        self.has_plans = True
        self.frontier.save(self.folder)

    def iterate(self):
        before, present, following = self._caps_w
        decided = float(self.cap_file.read_text()) if self.has_plans else None
        if decided != following:
            self._write(PowerCapChanged(watts=decided, source=str(self.cap_file), time=self._now_s))
        if self._step:
            plan = self._plan(before)
            default = self.frontier.baseline
            fields = {"plan": self.frontier.plans.index(plan), "default_time_s": default.time_s} if before else {}
            fields |= {"default_energy_j": self.SCALE * default.energy_j} if before else {}
            if self.limited:  # under other plans, whose numbers mean nothing on its frontier
                fields |= {"plan": len(self.frontier.plans) - 1 - fields["plan"], "limited": True}
            self._write(
                IterationRecord(
                    iteration=self._step,
                    phase=self.phase if before else "optimizing",
                    time_s=plan.time_s,
                    energy_j=self.SCALE * plan.energy_j,
                    ended=self._now_s,
                    **fields,
                )
            )
        self._step += 1
        self._caps_w = [present, following, decided]

    def end(self):
        self._write(Ended(time=self._now_s))
        self.ended = True

    def order(self, policy):
        self._write(PolicyChanged(policy=policy, time=self._now_s))

    def _plan(self, cap_w):
        if cap_w is None:
            return self.frontier.baseline
        plans = self.frontier.plans
        return next((p for p in plans if self.SCALE * p.mean_power_w <= cap_w * (1 - MARGIN)), plans[-1])

    def _draws_w(self, cap_w):
        return self.SCALE * self._plan(cap_w).mean_power_w

    @property
    def _now_s(self):
        return self._time.date().timestamp()

    def _write(self, record):
        with open(self.folder / "run.jsonl", "a") as file:
            file.write(to_line(record))


class World:
    """Jobs, and a process that shares a limit among them, which may end at any moment and begin again."""

    def __init__(self, folder, limit_w, jobs=3, plans=True):
        self.time = VirtualTime()
        self.limit_w = limit_w
        self.jobs = [FollowingJob(folder / f"job{n}", self.time, time_s=1 + 0.2 * n, plans=plans) for n in range(jobs)]
        self.said = []
        self.restart()

    def restart(self, weights=(1.0, 1.0, 1.0, 1.0)):
        following = [SharingJob(job.folder, weight) for job, weight in zip(self.jobs, weights, strict=False)]
        self.share = Share(following, self.limit_w, self.said.append, self.time)

    def steps(self, count=10):
        """Let everything go on for a while."""
        for _ in range(count):
            self.share.step()
            for job in self.jobs:
                if not job.ended:
                    job.iterate()
            self.time.seconds += 1.0

    @property
    def caps_w(self):
        return [float(job.cap_file.read_text()) for job in self.jobs]

    @property
    def drawn_w(self):
        return sum(job.may_draw_w for job in self.jobs if not job.ended)


def capped_world(folder, limit_w=2500.0, **keys):
    """All jobs run under caps."""
    world = World(folder, limit_w, **keys)
    world.share.step()
    for job in world.jobs:
        job.start()
    world.steps()
    return world


class CrashError(Exception):
    pass


@given(
    st.lists(
        st.one_of(
            *[st.tuples(st.just("iterate"), st.integers(0, 3))] * 4,
            st.tuples(st.just("share"), st.integers(0, 3)),
            st.tuples(st.just("restart"), st.permutations([0.2, 0.3, 4.0, 5.0])),
            st.tuples(st.just("end"), st.integers(0, 3)),
        ),
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_the_limit_is_kept_whatever_ends_and_in_whatever_order(tmp_path_factory, happens):
    world = capped_world(tmp_path_factory.mktemp("jobs"), limit_w=2600.0, jobs=4)
    assert world.drawn_w <= world.limit_w
    for what, which in happens:
        world.time.seconds += 0.5
        if what == "restart":
            world.restart(which)
            world.share.step()
        elif what == "share":
            step_and_crash(world, after=which)
        elif world.jobs[which].ended:
            continue
        elif what == "end":
            world.jobs[which].end()
        else:
            world.jobs[which].iterate()
        # The present iteration, the next one, and those that follow once the job has read its file.
        may_draw_w = [
            max(map(job._draws_w, (*job._caps_w[1:], float(job.cap_file.read_text()))))
            for job in world.jobs
            if not job.ended
        ]
        assert sum(may_draw_w) <= world.limit_w
    world.restart()
    world.steps(20)
    assert world.share.jobs[0].problem == ""
    running = [job for job in world.jobs if not job.ended]
    speeds = [SpeedOfCap.of(job.frontier, job.SCALE) for job in running]
    best = sum(s.at(cap_w) for s, cap_w in zip(speeds, allocate(speeds, world.limit_w), strict=True))
    assert sum(job.speed for job in running) >= 0.98 * best


def step_and_crash(world, after):
    """One step of the process that shares, which dies after it has written so many caps."""
    left = after
    real = SharingJob.give

    def give(job, cap_w):
        nonlocal left
        if left == 0:
            raise CrashError
        left -= 1
        real(job, cap_w)

    with mock.patch.object(SharingJob, "give", give):
        try:
            world.share.step()
        except CrashError:
            world.restart()


def test_a_cap_is_raised_only_once_another_has_been_lowered_and_followed(tmp_path):
    world = capped_world(tmp_path)
    before_w = world.caps_w
    world.restart(weights=(5.0, 1.0, 1.0, 1.0))
    world.share.step()
    lowered_w = world.caps_w
    assert lowered_w[0] == before_w[0]
    assert sum(lowered_w) < sum(before_w)
    for job in world.jobs:
        job.iterate()  # the cap is recorded, and an iteration runs under the old plan
    world.share.step()
    assert world.caps_w == lowered_w
    for _ in range(3):
        for job in world.jobs:
            job.iterate()
    world.share.step()
    assert world.caps_w[0] > before_w[0]
    assert world.caps_w[1:] == lowered_w[1:]


def test_a_job_without_plans_has_its_power_at_default_clocks_reserved(tmp_path):
    world = World(tmp_path, 2500.0, jobs=2)
    first, second = world.jobs
    world.share.step()
    assert all(cap_w <= 1250 for cap_w in world.caps_w)
    first.start()
    world.steps()
    second.has_plans = False
    second.start()
    world.steps()
    assert "job1 833.4 W reserved" in world.said[-1]
    assert world.caps_w[1] == pytest.approx(second.default_w, rel=0.03)
    assert world.drawn_w <= world.limit_w
    second.make_plans()
    world.steps()
    assert "reserved" not in world.said[-1]
    assert world.drawn_w <= world.limit_w


def test_a_job_that_ends_frees_its_share_and_takes_it_again_when_it_returns(tmp_path):
    world = capped_world(tmp_path)
    shared_w = world.caps_w
    world.jobs[0].end()
    world.steps()
    assert all(now_w > before_w for now_w, before_w in zip(world.caps_w[1:], shared_w[1:], strict=True))
    assert world.caps_w[0] < shared_w[0]  # with which it begins
    world.jobs[0].start()
    world.steps(20)
    assert world.caps_w == pytest.approx(shared_w, rel=0.02)
    assert world.drawn_w <= world.limit_w


@pytest.mark.parametrize(("phase", "is_reserved"), [("default", False), ("observe", False), ("pause", True)])
def test_a_job_that_is_compared_or_has_dropped_its_plan_keeps_its_cap_and_a_paused_one_does_not(
    tmp_path, phase, is_reserved
):
    world = capped_world(tmp_path)
    world.jobs[2].phase = phase
    world.steps()
    assert ("reserved" in world.said[-1]) == is_reserved
    assert world.drawn_w <= world.limit_w


def test_plans_of_run_mode_are_those_of_the_file_that_it_names_not_those_of_an_earlier_run(tmp_path):
    world = World(tmp_path, 2500.0, jobs=1)
    [job] = world.jobs
    world.share.step()
    job.folder.mkdir(exist_ok=True)
    frontier_of([2.0], [100.0]).save(job.folder)
    job.start(frontier=tmp_path / "plans")
    world.steps()
    assert world.share.jobs[0].speed == SpeedOfCap.of(job.frontier, job.SCALE)
    (tmp_path / "plans" / "frontier.json").unlink()
    world.steps()
    assert any("its plans, " in text and "are not found here" in text for text in world.said)
    assert "reserved" in world.said[-1]


def test_plans_under_limits_of_gpus_do_not_change_what_the_job_is_taken_to_draw_without_them(tmp_path):
    world = capped_world(tmp_path)
    speed = world.share.jobs[0].speed
    world.jobs[0].limited = True
    world.steps(40)
    assert world.share.jobs[0].speed == speed


def test_a_job_that_was_killed_frees_its_share_after_ten_minutes(tmp_path):
    world = capped_world(tmp_path)
    shared_w = world.caps_w
    world.jobs[0].ended = True
    world.steps(500)
    assert world.caps_w == shared_w
    world.steps(120)
    assert world.caps_w[1] > shared_w[1]


def test_a_limit_below_what_jobs_draw_at_least_is_said_each_time(tmp_path):
    world = capped_world(tmp_path, limit_w=1300.0)
    assert "the limit of 1.300 kW cannot be kept: these jobs draw up to 1.440 kW." in world.said[-1]
    least_w = [SpeedOfCap.of(job.frontier, job.SCALE).caps_w[0] for job in world.jobs]
    assert all(cap_w <= least for cap_w, least in zip(world.caps_w, least_w, strict=True))
    assert [job.speed for job in world.jobs] == pytest.approx([1 / 1.28] * 3)
    world.jobs[0].end()
    world.steps()
    assert "cannot be kept" not in world.said[-1]
    world.jobs[0].start()
    world.steps(20)
    assert "cannot be kept" in world.said[-1]


def test_a_second_process_that_shares_with_a_job_is_refused(tmp_path, capsys):
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert main(["share", "limit=1kW", f"jobs=[{tmp_path}]"]) != 0
    finally:
        os.close(lock)
    assert "another perseus-ds share gives" in capsys.readouterr().err


def test_a_job_that_follows_no_cap_is_named_with_what_to_do(tmp_path):
    world = capped_world(tmp_path, limit_w=2800.0)
    job = world.jobs[2]
    job.order({"name": "energy_optimal"})
    world.steps()
    text = next(text for text in world.said if "does not follow" in text)
    assert f"{job.folder}: the job does not follow {job.cap_file}" in text
    assert f'"policy": {{"name": "power_cap", "signal": "{job.cap_file}"}}' in text
    assert "job2 714.3 W reserved" in world.said[-1]


def test_a_job_under_a_lower_cap_of_its_own_frees_the_rest_of_its_share(tmp_path):
    world = capped_world(tmp_path)
    shared_w = world.caps_w
    job = world.jobs[0]
    cap_file = job.cap_file
    job.cap_file = tmp_path / "of_the_job"  # as while a reduction is in force
    job.cap_file.write_text("700.0")
    world.steps(40)
    assert "job0 7" in world.said[-1]
    assert "reserved" in world.said[-1]
    assert all(now_w > before_w for now_w, before_w in zip(world.caps_w[1:], shared_w[1:], strict=True))
    assert world.drawn_w <= world.limit_w
    job.cap_file = cap_file
    world.steps(40)
    assert world.caps_w == pytest.approx(shared_w, rel=0.02)


@pytest.mark.parametrize("text", ["", "nan", "-5", "watts", "1e9"])
def test_a_damaged_cap_file_is_written_again(tmp_path, text):
    world = capped_world(tmp_path)
    shared_w = world.caps_w
    world.jobs[1].cap_file.write_text(text)
    world.share.step()
    world.share.step()
    assert world.caps_w == pytest.approx(shared_w, rel=0.01)


def test_a_cap_that_cannot_be_written_is_a_message_and_not_the_end(tmp_path):
    world = World(tmp_path, 2500.0, jobs=1)
    (tmp_path / "job0").write_text("a file where the folder should be")
    world.share.step()
    assert "job0" in world.said[0]
    assert "cannot be written" in world.said[0]


def test_real_jobs_draw_no_more_than_the_limit_while_their_shares_change(tmp_path, monkeypatch):
    for name in ("profiler.counter_log.dist", "runtime.frontiers.OptimizeWorker"):
        monkeypatch.setattr(f"perseus_ds.{name}", None)  # jobs at the same time patch them in any order: put them back
    plans = save_true_frontier(tmp_path / "frontier", stages=1, micro_batches=3, forward_s=0.1).plans
    time, limit_w = VirtualTime(), 1.7 * plans[0].mean_power_w
    folders = [tmp_path / "a", tmp_path / "b"]
    jobs, energies_j = [], []

    def share_by(*weights):
        sharing = [SharingJob(folder, weight) for folder, weight in zip(folders, weights, strict=True)]
        return Share(sharing, limit_w, lambda text: None, time)

    def train(job, until_s):
        while time.now_s() < until_s:
            job.train()

    def follow(share, seconds):
        for _ in range(seconds):
            for job in jobs:
                job.records()  # which waits until they are written
            share.step()
            energies_j.append(sum(job.gpu.true_energy_j for job in jobs))
            time.sleep(1.0)
        return [job.events(PowerCapChanged)[-1].watts for job in jobs]

    share_by(1.0, 1.0).step()
    work_s = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.1 * (2 - 1 / 6), Kind.TAIL: 0.01}
    for folder in folders:
        policy = {"name": "power_cap", "signal": str(folder / CAP_FILE)}
        block = {"mode": "run", "frontier": str(tmp_path / "frontier"), "policy": policy}
        jobs.append(VirtualJob(folder, work_s=dict(work_s), time=time, **block))
    jobs[1].slowdowns[0] = 4.0  # the job that is lowered takes longest to follow
    threads = [time.thread(lambda job=job: train(job, time.now_s() + 85), job.folder.name) for job in jobs]
    for thread in threads:
        thread.start()
    before = follow(share_by(1.0, 1.0), 40)
    after = follow(share_by(5.0, 1.0), 40)
    for thread in threads:
        thread.join()
    for job in jobs:
        job.close()
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert [float((folder / CAP_FILE).read_text()) for folder in folders] == after
    powers_w = [(end_j - begin_j) / 3 for begin_j, end_j in zip(energies_j, energies_j[3:], strict=False)]
    assert max(powers_w) <= 1.005 * limit_w
