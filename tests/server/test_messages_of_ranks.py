"""Lost, duplicate, late and reordered messages affect only the evidence of their iterations."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_descriptions import KEY, described
from virtual.time import VirtualTime

from perseus_ds.artifacts.run_events import Failed
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.artifacts.run_records import read_records
from perseus_ds.protocol.job_messages import (
    Follow,
    GpuFacts,
    Joined,
    Left,
    Measured,
    RankReport,
    Report,
    SetProfiledLimit,
    Spans,
    Summarised,
)
from perseus_ds.server.job import Job
from perseus_ds.server.server import JobServer

RANKS = 2
ITERATIONS = 12


class FakeJob:
    """A job with fake ranks, which follow received messages and report iterations of one second."""

    def __init__(self, folder, of_ranks=(), **block):
        self.folder = folder
        self.received = [[] for _ in range(RANKS)]
        description = described(output_dir=str(folder), of_ranks=of_ranks, **block)
        self.server = JobServer(Job.of(description), self._send, timebase=VirtualTime())
        self.server.start()
        for rank in range(RANKS):
            self.server.receive(rank, Measured(0.1, 0.1, 80.0))
            self.server.receive(rank, Joined())

    def _send(self, rank, message):
        self.received[rank].append(message)

    def follow(self, rank, iteration, *, without_last=0):
        """Return the message that a rank follows in an iteration, without the last ones received."""
        follows = [each for each in self.received[rank] if isinstance(each, Follow) and each.program.number == 0]
        follows = follows[: len(follows) - without_last]
        return next((each for each in reversed(follows) if each.from_iteration <= iteration), None)

    def report(self, rank, iteration, *, without_last=0, client_without_last=None, **fields):
        """Return the report of an iteration, as completed by the rank's agent."""
        own = self.follow(rank, iteration, without_last=without_last)
        theirs = own if client_without_last is None else self.follow(rank, iteration, without_last=client_without_last)
        serial_of = lambda follow: 0 if follow is None else follow.serial  # noqa: E731
        report = Report(iteration, 0, serial_of(theirs), key=KEY, time_s=1.0, issued=iteration, **fields)
        return RankReport(report, serial=serial_of(own), begun_s=float(iteration), energy_j=300.0)

    def run(self, iterations):
        """Run iterations whose messages all arrive in order."""
        for iteration in iterations:
            for rank in range(RANKS):
                self.server.receive(rank, self.report(rank, iteration))

    def end(self):
        """End the job and return its iterations."""
        for rank in range(RANKS):
            self.server.receive(rank, Left())
        self.server.tick()
        assert self.server.is_over
        assert sum(isinstance(message, Summarised) for message in self.received[0]) == 1
        return [record for record in read_records(self.folder) if isinstance(record, IterationRecord)]


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Return a function that starts a job."""
    return lambda **block: FakeJob(tmp_path_factory.mktemp("job"), **block)


REPORTS = [*product(range(1, ITERATIONS + 1), range(RANKS))]


@st.composite
def deliveries(draw):
    """Draw iteration and rank of reports in order of arrival. Some are lost, duplicate or late."""
    arriving = []
    for place, report in enumerate(REPORTS):
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2]))):
            arriving.append((place + draw(st.sampled_from([0, 0, 0, 1, 3, 9])), report))  # noqa: PERF401
    return [report for _, report in sorted(arriving)]


def complete(arriving):
    """Return the iterations that are complete before any later one."""
    found, seen = [], set()
    for iteration, rank in arriving:
        seen.add((iteration, rank))
        if iteration > max(found, default=0) and all((iteration, each) in seen for each in range(RANKS)):
            found.append(iteration)
    return found


@settings(deadline=None, max_examples=40)
@given(deliveries())
def test_an_iteration_is_recorded_and_one_step_if_all_its_reports_arrive_before_those_of_a_later_one(play, arriving):
    job, same = (play(mode="profile", profile={"warm_up": 30}) for _ in range(2))
    for iteration, rank in arriving:
        job.server.receive(rank, job.report(rank, iteration))
    same.run(complete(arriving))
    assert (job.server.next.phase, job.server.control.steps) == (same.server.next.phase, same.server.control.steps)
    same.end()
    records = job.end()
    assert [record.iteration for record in records] == complete(arriving)
    assert {(record.time_s, record.energy_j) for record in records} <= {(1.0, 600.0)}


@pytest.mark.parametrize(("rank", "side"), [(0, "without_last"), (1, "client_without_last")], ids=["agent", "client"])
def test_an_iteration_in_which_a_program_came_late_somewhere_is_no_evidence(play, rank, side):
    """It is recorded, but not used for the measurement."""
    job = play(mode="profile", profile={"warm_up": 3})
    iteration = 0
    while job.server.next.phase != "profile":
        iteration += 1
        job.run([iteration])
    ran, advance = [], job.server._advance
    job.server._advance = lambda seen: ran.append(seen.run) or advance(seen)
    job.run([iteration + 1])  # it had begun before
    for each in range(RANKS):
        job.server.receive(each, job.report(each, iteration + 2, **({side: 1} if each == rank else {})))
    job.run([iteration + 3])
    assert [run is None for run in ran] == [False, True, False]
    assert len(job.end()) == iteration + 3


def test_a_rank_of_which_nothing_arrives_for_long_costs_no_memory(play):
    job = play(mode="observe")
    for iteration in range(1, 1000):
        job.server.receive(0, job.report(0, iteration))
        job.server.receive(0, Spans(iteration, b"x" * 18))
    assert len(job.server._open) < 100
    job.run(range(1000, 1005))
    job.server.receive(0, Spans(1004, b"x" * 18))  # of an iteration that is over
    assert job.server._open == {}
    assert [record.iteration for record in job.end()] == [1000, 1001, 1002, 1003, 1004]


def test_a_mode_that_always_fails_is_restarted_at_growing_intervals(play, monkeypatch):
    def fail(context):
        raise OSError("it always fails")

    monkeypatch.setattr("perseus_ds.server.modes.calibrate", fail)
    job = play(mode="observe")
    job.run(range(1, 101))
    job.end()
    failed = [record for record in read_records(job.folder) if isinstance(record, Failed)]
    assert len(failed) == 3, "at the start, and after 10 and 40 more iterations"


def test_a_rank_that_joins_again_is_told_what_to_run_from_an_iteration_on_that_nobody_has_begun(play):
    """A rank joins again with a new agent."""
    job = play(mode="profile", profile={"warm_up": 3})
    iteration = 0
    while job.server.next.phase != "profile":
        iteration += 1
        job.run([iteration])
    job.received[1].clear()
    job.server.receive(1, Joined(iteration + 5))
    found = job.follow(1, iteration + 7)
    assert found.program.first_mhz == job.server.next.clock_mhz
    assert found.from_iteration == iteration + 7
    assert job.follow(1, iteration + 6) is None


def test_no_rank_is_told_to_change_an_iteration_that_one_has_begun(play):
    job = play(mode="profile", profile={"warm_up": 3})
    for iteration in range(1, 40):
        for rank in range(RANKS):
            before = len(job.received[rank])
            job.server.receive(rank, job.report(rank, iteration))
            for message in job.received[rank][before:]:
                assert not isinstance(message, Follow) or message.from_iteration > iteration + 1
    job.end()


def test_a_lost_program_is_sent_again(play):
    job = play(mode="observe")
    job.received[1].clear()
    job.run(range(1, 9))
    assert job.follow(1, 8).serial == job.follow(0, 8).serial
    assert len({message.serial for message in job.received[1] if isinstance(message, Follow)}) == 1
    sent = 0
    for iteration in range(9, 49):
        job.received[1].clear()
        job.run([iteration])
        sent += any(isinstance(message, Follow) for message in job.received[1])
    assert sent == 4, "at each tenth iteration"
    job.end()


def test_a_rank_that_joins_again_is_told_the_power_limit_of_the_profile(play):
    job = play(mode="observe")
    for power_w, told in ((300.0, [SetProfiledLimit(300.0)]), (None, [])):
        job.server._context.send_all(SetProfiledLimit(power_w))
        job.received[1].clear()
        job.server.receive(1, Joined())
        assert [message for message in job.received[1] if isinstance(message, SetProfiledLimit)] == told
    job.end()


@pytest.mark.parametrize(
    ("counters", "nodes", "energies_j"),
    [
        (("", ""), ("a", "a"), (300.0, 300.0)),
        (("zeus:0000:c1:00.0", "zeus:0000:c1:00.0"), ("a", "a"), (300.0, 0.0)),
        (("zeus:0000:c1:00.0", "zeus:0000:c9:00.0"), ("a", "a"), (300.0, 300.0)),
        (("zeus:0000:c1:00.0", "zeus:0000:c1:00.0"), ("a", "b"), (300.0, 300.0)),
    ],
    ids=["own counters", "two dies of a card", "dies of two cards", "cards of two nodes"],
)
def test_a_counter_that_two_ranks_share_is_counted_once(tmp_path, counters, nodes, energies_j):
    gpus = [GpuFacts(name="simulated", counter=counter, simulated=True) for counter in counters]
    job = FakeJob(tmp_path, [{"gpu": gpu, "node": node} for gpu, node in zip(gpus, nodes, strict=True)])
    job.run((1, 2, 3))
    assert job.server.job.gpus_per_rank == sum(energies_j) / 600.0
    iterations = job.end()
    assert [record.energy_by_rank_j for record in iterations] == [energies_j] * 3
    assert [record.energy_j for record in iterations] == [sum(energies_j)] * 3


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_whose_rank_was_killed_has_not_just_ended(tmp_path, killed):
    job = FakeJob(tmp_path, mode="observe")
    job.run([1, 2])
    job.server.receive(0, Left(killed=True))
    job.server.receive(0, Joined())  # its agent, which was stopped, was wrong
    job.server.receive(1, Left(killed=killed))
    job.server.receive(0, Left())
    job.server.tick()
    end = list(read_records(tmp_path))[-1]
    assert end.killed == killed
    assert end.in_words().startswith("killed. ") == killed
