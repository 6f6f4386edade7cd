"""Messages between the ranks of a job and its server, which the agents of the nodes forward.

The server sends each rank the programs for the iterations of an order (:class:`Follow`), and each rank reports every
iteration (:class:`Report`, to which its agent adds measurements of the GPU: :class:`RankReport`). The server assigns
each order a number from 0 to 254. All other orders have the number 255 and run at default clocks.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from perseus_ds.protocol.latencies import LatencyTable

Times: TypeAlias = Literal["none", "ends", "passes", "all"]
"""Measurements of a rank in an iteration: only its time, the end of its passes, all passes, or all operations."""

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
    # The only iteration to which the message applies, instead of a message with 0. With 0, iterations without such a
    # message of their own run at default clocks, as if they were of no order. None for all future iterations.
    only_iteration: int | None = None


class Follows:
    """The :class:`Follow` messages that a rank has received.

    Client and agent select from them by the same rule. One thread may add messages while another one selects.
    """

    def __init__(self) -> None:
        # By the number of an order. The last one applies to future iterations.
        self._lasting: dict[int, list[Follow]] = {}
        # Messages for single iterations, by the numbers of order and iteration.
        self._single: dict[tuple[int, int], Follow] = {}

    def add(self, follow: Follow) -> None:
        """Add a message."""
        number = follow.program.number
        if follow.only_iteration:
            self._single[number, follow.only_iteration] = follow
        else:
            self._lasting.setdefault(number, []).append(follow)

    def clear(self) -> None:
        """Forget all messages."""
        self._lasting.clear()
        self._single.clear()

    def latest(self, number: int) -> Follow | None:
        """Return the last message about all future iterations of an order, if any."""
        return self._lasting[number][-1] if number in self._lasting else None

    def select(self, number: int, iteration: int) -> Follow | None:
        """Return the message that applies to an iteration of an order, if any.

        Messages that apply to no later iteration are forgotten.
        """
        for key in [key for key in [*self._single] if key[1] < iteration]:
            self._single.pop(key, None)
        follows = self._lasting.get(number, [])
        while len(follows) > 1 and follows[1].from_iteration <= iteration:
            del follows[0]
        if not follows or follows[0].from_iteration > iteration:
            return None
        return follows[0] if follows[0].only_iteration is None else self._single.get((number, iteration))


class Orders(msgspec.Struct, tag=True, frozen=True):
    """The numbers of orders."""

    numbers: tuple[tuple[int, float, int], ...]  # key, shape of a rank's first inputs (0 for any), and number
    others: int  # number of all other orders


class ReadSchedule(msgspec.Struct, tag=True, frozen=True):
    """Request to report the schedule of an order when an iteration of that order begins."""

    key: int


class Calibrate(msgspec.Struct, tag=True, frozen=True):
    """Durations of passes on a simulated GPU."""

    seconds_per_flop: float  # at the top clock
    flops: tuple[int, ...]  # of each pass, in the order of the rank's own list


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
    first_shape: float = 0.0  # number of the shape of the first forward's inputs; 0 if unknown
    shapes: float = 0.0  # sum of these numbers over all forwards
    length: float = math.nan  # mean length of the inputs of a forward; NaN if unknown
    computed_s: float = 0.0  # from the start to the end of the last pass; 0 if not measured
    tail_s: float = 0.0  # duration of the tail, waiting included; 0 if not measured
    memory_bytes: int = 0  # peak of tensors on the GPU; 0 if unknown or not read in this iteration
    is_calibrated: bool = True  # passes take as long as on the simulated GPU


class RankReport(msgspec.Struct, tag=True, frozen=True):
    """A rank's report with measurements by its agent."""

    report: Report
    serial: int = -1  # of the :class:`Follow` that the agent applied; -1 if unknown
    begun_s: float = math.nan  # start on the GPU, in the node's monotonic time; NaN if unknown
    energy_j: float = math.nan  # NaN if it cannot be read
    changes: float = 0.0  # number of clock changes
    skips: float = 0.0  # number of clock changes that were skipped because a later one was due
    asked_mhz: float = math.nan  # requested clock at the last read-back; NaN at default clocks
    reached_mhz: float = math.nan  # clock at the last read-back
    limit_w: float = math.inf  # power limit, if it is lower than profiled
    limit_mhz: float = math.inf  # highest clock that is reached, if it is lower than profiled
    late_s: float = 0.0  # delay with which the agent follows marks
    default_mhz: float = 0.0  # clock of the busy GPU without a lock; 0 if unknown
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


class Lengths(msgspec.Struct, tag=True, frozen=True):
    """Lengths of the micro-batches of a rank's pipeline in a future iteration.

    There are none if that iteration has begun, or if too many were given at once.
    """

    iteration: int
    lengths: tuple[float, ...]  # of each micro-batch's input, such as its number of tokens


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


class Command(msgspec.Struct, tag=True, frozen=True):
    """An order of the user as JSON, as ``perseus-ds control`` sends it."""

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


class Joined(msgspec.Struct, tag=True, frozen=True):
    """A rank follows the server through this agent from now on, without any earlier message."""

    issued: int = 0


class Left(msgspec.Struct, tag=True, frozen=True):
    """A rank no longer follows the server."""


ToRank: TypeAlias = (
    Follow | Orders | ReadSchedule | Calibrate | Say | Observed | Summarised | WatchDefaultClocks | SetProfiledLimit
)
FromClient: TypeAlias = Spans | Report | ScheduleRead | Lengths | Worked | Measured | Steps | Command | Left
"""Messages of a client, which its agent forwards or completes."""
ToServer: TypeAlias = FromClient | RankReport | RankFailed | RankRecovered | ClockRefused | LatencyTable | Joined
