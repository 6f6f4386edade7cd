"""Messages between the ranks of a job and its server.

Before training, the ranks describe themselves to each other, and rank 0 sends the server the description of the job.
Then the agents of the nodes forward messages: the server sends each rank the programs for the iterations of an
order (:class:`Follow`), and each rank reports every iteration (:class:`Report`, to which its agent adds measurements of
the GPU: :class:`RankReport`). Ranks identify an order by a key. The server assigns each order whose schedule it knows a
number from 0 to 253, and informs all ranks. All other orders have the number 254 and run at default clocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

import msgspec

_ENOUGH, _POOLED = 3, 5
"""Minimum number of latencies, and the number up to which those of neighbouring clocks are added."""
_PERCENTILE = 0.9
Times: TypeAlias = Literal["none", "ends", "passes", "all"]
"""Measurements of a rank in an iteration: only its time, the end of its passes, all passes, or all operations."""

# Before training.


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a GPU, as its driver reports them before training."""

    name: str = ""  # of the product
    driver: str | None = None  # its version
    settings: dict[str, Any] | None = None  # fields of artifacts.profile.GpuSettings, if the driver reports them
    counter: str = ""  # address of the GPU with the counter that includes its energy; empty if it has its own
    simulated: bool = False  # its physics is simulated, and all its results are labelled accordingly


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the training on a rank. An engine sets those that it knows, and Perseus adds the others.

    Attributes:
        pipeline: Global ranks of its pipeline, first stage first.
        copies: Global ranks that train the same stages on other data, itself included. None if every pipeline has
            different data.
        fingerprint: Changes with any property that affects the times of this rank's instructions.
        micro_batch_size: Number of samples of a micro-batch, if it is known.
        steps_per_print: Interval of printed iterations. None for never.
        steps: Number of finished training steps. None if the engine does not count them.
        engine: Engine that defines the notation of layouts. None if layers cannot be moved between stages.
        parts: Parts of the model, by stage of this rank (:func:`~perseus_ds.artifacts.layout.encode_parts`). Empty if
            unknown.
        tied: Whether the embedding and the head share a weight.
        key: Added by Perseus: identifies the order that the job starts with.
        schedule: Added: operations of this rank in that order, in JSON. Empty in the description of a job.
        models: Added: classes of the models in this process, the one that trains first. Empty for a user's own loop.
        versions: Added: versions of packages.
        has_monitor: Added: whether a monitor receives the figures of every iteration.
        node: Added: host name, and id of the node's current boot.
        gpu: Added: the GPU on which the rank computes.
        clocks_mhz: Added: clocks that can be locked.
        no_permission: Added: why clocks cannot be set. Empty if they can.
        calibrates: Added: whether passes must be calibrated to take as long as on the simulated GPU.
    """

    # Set by the engine.
    pipeline: tuple[int, ...]
    copies: tuple[int, ...] | None
    fingerprint: str = ""
    micro_batch_size: int | None = None
    steps_per_print: int | None = None
    steps: int | None = None
    engine: str | None = None
    parts: dict[int, bytes] = {}
    tied: bool = False
    # Added by Perseus.
    key: int = 0
    schedule: bytes = b""
    models: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    has_monitor: bool = False
    node: str = ""
    gpu: GpuFacts = GpuFacts()
    clocks_mhz: tuple[int, ...] = ()
    no_permission: str = ""
    calibrates: bool = False


class JobDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a job."""

    config: bytes  # the perseus block of rank 0, in JSON
    folder: str = "."  # the current folder of rank 0, to which paths are relative
    ranks: tuple[RankFacts, ...]
    schedules: tuple[bytes, ...]  # the different schedules of ranks
    schedule_of: tuple[int, ...]  # index of each rank's schedule

    @classmethod
    def of(cls, config: bytes, ranks: Iterable[RankFacts], folder: str = ".") -> JobDescription:
        """Describe a job. Equal schedules of its ranks are stored once."""
        index: dict[bytes, int] = {}
        facts, schedule_of = [], []
        for own in ranks:
            schedule_of.append(index.setdefault(own.schedule, len(index)))
            facts.append(msgspec.structs.replace(own, schedule=b""))
        return cls(
            config=config, folder=folder, ranks=tuple(facts), schedules=tuple(index), schedule_of=tuple(schedule_of)
        )


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks have to know and to measure before training."""

    measures_power: bool = False  # their energy counters and their blocking power
    measures_counter: bool = False  # only the refresh periods of their energy counters


# From the server to a rank.


class Program(msgspec.Struct, tag=True, frozen=True):
    """The clocks of a rank in the iterations of an order."""

    number: int  # of the order, from 0 to 254
    first_mhz: int | None = None  # clock of the whole iteration without ``clocks_mhz``; None for the default
    clocks_mhz: tuple[int, ...] = ()  # of each instruction, by its position in the rank's schedule
    spans_s: tuple[tuple[float, float], ...] = ()  # predicted start and end of each instruction; empty if unknown
    time_s: float = 0.0  # predicted time of the iteration


class Follow(msgspec.Struct, tag=True, frozen=True):
    """The program and the measurements of the iterations of an order, from one iteration on."""

    program: Program  # without clocks, it means default clocks
    serial: int  # number of this message in the job, which reports refer to
    from_iteration: int
    # Iteration from which the phase is shown to the user's code. By then all ranks have received the message, so the
    # code may end training because of it.
    shown_from: int
    phase: str  # as in ``run.jsonl``
    plan: int | None = None  # index on the frontier
    times: Times = "none"  # measured in iterations with a number that is a multiple of ``every``
    every: int = 1
    otherwise: Times = "none"  # measured in other iterations
    logs_energy: bool = False  # refreshes of the energy counter are reported
    slots: tuple[int, ...] = ()  # of the marks that the agent awaits, which it adds for the client


class Follows:
    """The :class:`Follow` messages that a rank has received.

    Client and agent select from them by the same rule. One thread may add messages while another one selects.
    """

    def __init__(self) -> None:
        # By the number of an order. The last one applies to future iterations.
        self._of_order: dict[int, list[Follow]] = {}

    def add(self, follow: Follow) -> None:
        """Add a message."""
        self._of_order.setdefault(follow.program.number, []).append(follow)

    def clear(self) -> None:
        """Forget all messages."""
        self._of_order.clear()

    def held(self) -> Iterator[Follow]:
        """Return the messages that may apply to later iterations, oldest first for each order."""
        return chain.from_iterable(self._of_order.values())

    def latest(self, number: int) -> Follow | None:
        """Return the last message about an order, if any."""
        return self._of_order[number][-1] if number in self._of_order else None

    def select(self, number: int, iteration: int) -> Follow | None:
        """Return the message that applies to an iteration of an order, if any.

        Messages that apply to no later iteration are forgotten.
        """
        follows = self._of_order.get(number, [])
        while len(follows) > 1 and follows[1].from_iteration <= iteration:
            del follows[0]
        return follows[0] if follows and follows[0].from_iteration <= iteration else None


class OrderNumbers(msgspec.Struct, tag=True, frozen=True):
    """The numbers of orders."""

    numbers: tuple[tuple[int, int], ...]  # key and number
    others: int  # number of all other orders


class ReadSchedule(msgspec.Struct, tag=True, frozen=True):
    """Request to report the schedule of an order when an iteration of that order begins."""

    key: int


class Calibrate(msgspec.Struct, tag=True, frozen=True):
    """Durations of passes on a simulated GPU."""

    seconds_per_flop: float  # at the top clock
    flops: tuple[int, ...]  # of each pass, as in the rank's own list


class Say(msgspec.Struct, tag=True, frozen=True):
    """Request to print a line, or to log it as a warning."""

    text: str
    warns: bool = False


class Observed(msgspec.Struct, tag=True, frozen=True):
    """Figures of an iteration for a monitor, such as DeepSpeed's."""

    figures: tuple[tuple[str, float], ...]  # tag and value
    samples: int  # that the job has processed after the iteration


class Summarised(msgspec.Struct, tag=True, frozen=True):
    """All lines of a finished job were sent."""


class WatchDefaultClocks(msgspec.Struct, tag=True, frozen=True):
    """Request to check for a minute whether the GPU is kept below its highest clock at default clocks."""


class SetProfiledLimit(msgspec.Struct, tag=True, frozen=True):
    """The power limit with which the agent compares the current one."""

    power_w: float | None  # as recorded in the profile; None for the one that is read next


# From a rank to the server.


class Spans(msgspec.Struct, tag=True, frozen=True):
    """Operations of an iteration, sent before its report. See :mod:`perseus_ds.pipeline.schedule`."""

    iteration: int
    content: bytes


class Report(msgspec.Struct, tag=True, frozen=True):
    """An iteration as measured by a rank's client."""

    iteration: int  # number in this process, from 1
    order: int  # number of its order
    serial: int  # of the :class:`Follow` that the client applied
    key: int  # of its order
    time_s: float
    stopped_s: float = 0.0  # time of the host between the end of the previous iteration and the start of this one
    issued: int = 0  # number of the last iteration that the host has begun
    ended: float = 0.0  # end for the host [Unix seconds]
    samples: int = 0  # that the job has processed after it
    tokens: int = 0  # in its inputs, as far as this rank reads them; 0 if unknown
    computed_s: float = 0.0  # from the start to the end of the last pass; 0 if not measured
    tail_s: float = 0.0  # duration of the tail, waiting included; 0 if not measured
    memory_bytes: int = 0  # peak of tensors on the GPU; 0 if unknown or not read in this iteration
    is_calibrated: bool = True  # passes take as long as on the simulated GPU


class ClockStatus(msgspec.Struct, frozen=True):
    """Clock changes and readings of a GPU by its agent."""

    changes: int = 0  # number of clock changes, in a report since the one before
    skips: int = 0  # number of clock changes that were skipped because a later one was due, counted alike
    asked_mhz: float = math.nan  # requested clock at the last read-back; NaN at default clocks
    reached_mhz: float = math.nan  # clock at the last read-back
    limit_w: float = math.inf  # power limit, if it is lower than profiled
    limit_mhz: float = math.inf  # highest clock that is reached, if it is lower than profiled
    late_s: float = 0.0  # delay with which the agent follows marks
    default_mhz: float = 0.0  # clock of the busy GPU without a lock; 0 if unknown


class RankReport(msgspec.Struct, tag=True, frozen=True):
    """A rank's report with measurements by its agent."""

    report: Report
    serial: int = -1  # of the :class:`Follow` that the agent applied; -1 if unknown
    begun_s: float = math.nan  # start on the GPU, in the node's monotonic time; NaN if unknown
    energy_j: float = math.nan  # NaN if it cannot be read
    status: ClockStatus = ClockStatus()  # at the end of the iteration
    has_failed: bool = False  # the rank has fallen back to default clocks
    refreshes: bytes = b""  # time [s] and energy [J] at each refresh since the last report, as doubles
    clocks: bytes = b""  # time [s] and clock [MHz] of each reading of the clock, as doubles
    temperature_c: float | None = None
    power_state: str | None = None


class ScheduleRead(msgspec.Struct, tag=True, frozen=True):
    """A rank's operations in an order."""

    key: int
    schedule: bytes = b""  # a schedule of one rank as JSON, compressed by zlib
    error: str = ""  # why it cannot be read


class Worked(msgspec.Struct, tag=True, frozen=True):
    """The floating-point operations of the passes of a rank, each with the key of the pass."""

    passes: tuple[tuple[str, int], ...]


class Measured(msgspec.Struct, tag=True, frozen=True):
    """Measurements of a rank's GPU before training."""

    period_s: float  # refresh period of its energy counter
    settle_s: float = 0.0  # time for which the counter still includes power from before a step of power
    blocking_power_w: float = math.nan  # power while the rank waits for another one; NaN if not measured


class Steps(msgspec.Struct, tag=True, frozen=True):
    """Number of training steps of the engine, for example after loading a checkpoint."""

    after: int  # the last iteration that is included in the steps
    steps: int


class MoreSteps(msgspec.Struct, tag=True, frozen=True):
    """A correction of the number of training steps, because iterations are not always steps."""

    after: int  # the last iteration to which it does not apply
    steps: int  # without a reported iteration; negative for iterations that belong to the next one's step


class Command(msgspec.Struct, tag=True, frozen=True):
    """A command of the user as JSON, as ``perseus-ds control`` sends it."""

    content: bytes


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """A rank has fallen back to default clocks."""

    error: str


class RankRecovered(msgspec.Struct, tag=True, frozen=True):
    """A rank has run plans again for some time after a fallback."""


class ClockRefused(msgspec.Struct, tag=True, frozen=True):
    """A requested clock that the GPU does not reach."""

    clock_mhz: int | None  # None for default clocks
    reached_mhz: int
    reasons: tuple[str, ...]  # as reported by the driver, such as ``sw_power_cap``


class LatencyTable(msgspec.Struct, tag=True, frozen=True):
    """Times from the driver's call until the GPU runs at the clock, which agents send to the server.

    Clocks with few or no measurements use the latencies of neighbouring clocks. A latency that timed out is a lower
    bound.
    """

    samples_s: Mapping[tuple[int, bool], Sequence[float]] = {}  # by clock [MHz] and whether it was reached from below

    @property
    def is_known(self) -> bool:
        """True if enough latencies were measured."""
        return sum(map(len, self.samples_s.values())) >= _ENOUGH

    def of_clocks(self, clocks_mhz: Iterable[int], figure: Callable[[int], float]) -> list[float]:
        """Return a figure of each clock: that of the nearest clock with latencies, for which it is computed once."""
        measured = sorted({clock_mhz for clock_mhz, _ in self.samples_s})
        known = {clock_mhz: figure(clock_mhz) for clock_mhz in measured}
        found = []
        for clock_mhz in clocks_mhz:
            place = bisect_left(measured, clock_mhz)
            near = measured[max(0, place - 1) : place + 1]
            found.append(known[min(near, key=lambda each: abs(each - clock_mhz))] if near else figure(clock_mhz))
        return found

    def latest_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return the 90th percentile of the latencies of a clock [s]. 0 if unknown."""
        seen_s = self._near(clock_mhz, rises)
        return seen_s[int(_PERCENTILE * (len(seen_s) - 1))] if seen_s else 0.0

    def soonest_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return the 10th percentile of the latencies of a clock [s]. 0 if unknown."""
        seen_s = self._near(clock_mhz, rises)
        return seen_s[-1 - int(_PERCENTILE * (len(seen_s) - 1))] if seen_s else 0.0

    def lead_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return the time by which a clock is requested in advance [s].

        A higher clock may take effect too early and a lower one too late. Both cost some energy but no time.
        """
        return self.latest_s(clock_mhz, rises=True) if rises else self.soonest_s(clock_mhz, rises=False)

    def dwell_s(self, clock_mhz: int) -> float:
        """Return the minimum time to stay at a clock [s], which is twice its latency."""
        return 2 * max(self.latest_s(clock_mhz, rises=rises) for rises in (False, True))

    def _near(self, clock_mhz: int, rises: bool) -> list[float]:
        own = self.samples_s.get((clock_mhz, rises), ())
        if len(own) >= _POOLED:
            return sorted(own)
        if not self.is_known:
            return []
        same = {clock: seen_s for (clock, rose), seen_s in self.samples_s.items() if rose == rises and seen_s}
        found = list(_nearest(clock_mhz, same))
        if len(found) < _ENOUGH:
            found += _nearest(clock_mhz, {c: seen_s for (c, rose), seen_s in self.samples_s.items() if rose != rises})
        return sorted(found)


def _nearest(clock_mhz: int, by_clock: Mapping[int, Sequence[float]]) -> Iterator[float]:
    """Yield latencies of a clock and of neighbouring clocks, up to the number that is pooled."""
    count = 0
    for clock in sorted(by_clock, key=lambda clock: abs(clock - clock_mhz)):
        if count >= _POOLED:
            return
        yield from by_clock[clock]
        count += len(by_clock[clock])


class Joined(msgspec.Struct, tag=True, frozen=True):
    """A rank follows the server through this agent from now on, without any earlier message."""

    issued: int = 0


class Left(msgspec.Struct, tag=True, frozen=True):
    """A rank no longer follows the server.

    Attributes:
        killed: Whether its process ended without closing Perseus.
    """

    killed: bool = False


ToRank: TypeAlias = (
    Follow
    | OrderNumbers
    | ReadSchedule
    | Calibrate
    | Say
    | Observed
    | Summarised
    | WatchDefaultClocks
    | SetProfiledLimit
)
FromClient: TypeAlias = Spans | Report | ScheduleRead | Worked | Measured | Steps | MoreSteps | Command | Left
"""Messages of a client, which its agent forwards or completes."""
ToServer: TypeAlias = FromClient | RankReport | RankFailed | RankRecovered | ClockRefused | LatencyTable | Joined

encode = msgspec.msgpack.Encoder().encode
# Each raises a ``msgspec.DecodeError`` if the content is invalid.
decode_description = msgspec.msgpack.Decoder(JobDescription).decode
decode_facts = msgspec.msgpack.Decoder(RankFacts).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
