"""Messages between the ranks of a job and its server, which the agents of the nodes forward.

The server sends each rank the programs for the iterations of an order (:class:`Follow`), and each rank reports every
iteration (:class:`Report`, to which its agent adds measurements of the GPU: :class:`RankReport`). The server assigns
each order a number from 0 to 254. All other orders have the number 255 and run at default clocks.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

Times: TypeAlias = Literal["none", "ends", "passes", "all"]
"""Measurements of a rank in an iteration: only its time, the end of its passes, all passes, or all operations."""

# From the server to a rank.


class Program(msgspec.Struct, tag=True, frozen=True):
    """The clocks of a rank in the iterations of an order.

    Attributes:
        number: Number of the order, from 0 to 254.
        first_mhz: Clock of the whole iteration if ``clocks_mhz`` is empty [MHz]. None for the default.
        clocks_mhz: Clock of each instruction, by its position in the rank's schedule [MHz].
        spans_s: Start and end of each instruction in an iteration [s]. Empty if unknown.
        time_s: Time of the iteration [s].
    """

    number: int
    first_mhz: int | None = None
    clocks_mhz: tuple[int, ...] = ()
    spans_s: tuple[tuple[float, float], ...] = ()
    time_s: float = 0.0


class Follow(msgspec.Struct, tag=True, frozen=True):
    """The program and the measurements of the iterations of an order, from one iteration on.

    Attributes:
        program: The clocks. Its number is that of the order. A program without clocks means default clocks.
        serial: Number of this message in the job, which reports refer to.
        from_iteration: First iteration to which the message applies.
        shown_from: Iteration from which the phase is shown to the user's code. By then all ranks have received it, so
            the code may end training because of it.
        phase: Phase, as in ``run.jsonl``.
        plan: Index of the plan on the frontier. None without a plan.
        times: Measurements in iterations with a number that is a multiple of ``every``.
        otherwise: Measurements in other iterations.
        logs_energy: Whether refreshes of the energy counter are reported.
        only_iteration: The only iteration to which the message applies, instead of a message with 0. With 0, iterations
            without such a message of their own run at default clocks, as if they were of no order. None for all
            future iterations.
    """

    program: Program
    serial: int
    from_iteration: int
    shown_from: int
    phase: str
    plan: int | None = None
    times: Times = "none"
    every: int = 1
    otherwise: Times = "none"
    logs_energy: bool = False
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
    """The numbers of orders.

    Attributes:
        numbers: Key of an order, shape of a rank's first inputs (0 for any), and the order's number.
        others: Number of all other orders.
    """

    numbers: tuple[tuple[int, float, int], ...]
    others: int


class ReadSchedule(msgspec.Struct, tag=True, frozen=True):
    """Request to report the schedule of an order when an iteration of that order begins."""

    key: int


class Calibrate(msgspec.Struct, tag=True, frozen=True):
    """Durations of passes on a simulated GPU.

    Attributes:
        seconds_per_flop: Time of a floating-point operation at the top clock [s].
        flops: Floating-point operations of passes, in the order of the rank's own list.
    """

    seconds_per_flop: float
    flops: tuple[int, ...]


class Say(msgspec.Struct, tag=True, frozen=True):
    """Request to print a line.

    Attributes:
        warns: Whether to log it as a warning instead.
    """

    text: str
    warns: bool = False


class Observed(msgspec.Struct, tag=True, frozen=True):
    """Figures of an iteration for a monitor, such as DeepSpeed's.

    Attributes:
        figures: Tag and value of each figure.
        samples: Number of samples that the job has processed after the iteration.
    """

    figures: tuple[tuple[str, float], ...]
    samples: int


class Summarised(msgspec.Struct, tag=True, frozen=True):
    """All lines of a finished job were sent."""


class WatchDefaultClocks(msgspec.Struct, tag=True, frozen=True):
    """Request to check for a minute whether the GPU is kept below its highest clock at default clocks."""


class SetProfiledLimit(msgspec.Struct, tag=True, frozen=True):
    """The power limit with which the agent compares the current one.

    Attributes:
        power_w: Power limit recorded in the profile [W]. None for the one that is read next.
    """

    power_w: float | None


# From a rank to the server.


class Spans(msgspec.Struct, tag=True, frozen=True):
    """Operations of an iteration, sent before its report. See :mod:`perseus_ds.pipeline.schedule`."""

    iteration: int
    content: bytes


class Report(msgspec.Struct, tag=True, frozen=True):
    """An iteration as measured by a rank's client.

    Attributes:
        iteration: Number of the iteration in this process, from 1.
        order: Number of its order.
        serial: Serial of the :class:`Follow` that the client applied.
        key: Key of its order.
        time_s: Duration [s].
        stopped_s: Time of the host between the end of the previous iteration and the start of this one [s].
        issued: Number of the last iteration that the host has begun.
        ended: End of the iteration for the host [Unix seconds].
        samples: Number of samples that the job has processed after it.
        first_shape: Number of the shape of the first forward's inputs. 0 if unknown.
        shapes: Sum of these numbers over all forwards.
        length: Mean length of the inputs of a forward. NaN if unknown.
        computed_s: Time from the iteration's start to the end of the last pass [s]. 0 if not measured.
        tail_s: Duration of the tail, waiting included [s]. 0 if not measured.
        memory_bytes: Peak memory of tensors on the GPU. 0 if unknown or not read in this iteration.
        is_calibrated: Whether passes take as long as on the simulated GPU.
    """

    iteration: int
    order: int
    serial: int
    key: int
    time_s: float
    stopped_s: float = 0.0
    issued: int = 0
    ended: float = 0.0
    samples: int = 0
    first_shape: float = 0.0
    shapes: float = 0.0
    length: float = math.nan
    computed_s: float = 0.0
    tail_s: float = 0.0
    memory_bytes: int = 0
    is_calibrated: bool = True


class RankReport(msgspec.Struct, tag=True, frozen=True):
    """A rank's report with measurements by its agent.

    Attributes:
        report: The client's report.
        serial: Serial of the :class:`Follow` that the agent applied to the iteration. -1 if unknown.
        begun_s: Start of the iteration on the GPU, in the node's monotonic time [s]. NaN if unknown.
        energy_j: Energy of the GPU [J]. NaN if it cannot be read.
        changes: Number of clock changes.
        skips: Number of clock changes that were skipped because a later one was due.
        asked_mhz: Requested clock at the last read-back [MHz]. NaN at default clocks.
        reached_mhz: Clock at the last read-back [MHz].
        limit_w: Power limit, if it is lower than profiled [W]. Infinite otherwise.
        limit_mhz: Highest clock that is reached, if it is lower than profiled [MHz]. Infinite otherwise.
        late_s: Delay with which the agent follows marks [s].
        default_mhz: Clock of the busy GPU without a lock [MHz]. 0 if unknown.
        has_failed: Whether the rank has fallen back to default clocks.
        refreshes: Time [s] and value [J] of the energy counter at each refresh since the last report, as doubles.
        clocks: Time [s] and clock [MHz] of each reading of the clock, as doubles.
        temperature_c: Temperature of the GPU. None if unknown.
        power_state: Performance state of the GPU. None if unknown.
    """

    report: Report
    serial: int = -1
    begun_s: float = math.nan
    energy_j: float = math.nan
    changes: float = 0.0
    skips: float = 0.0
    asked_mhz: float = math.nan
    reached_mhz: float = math.nan
    limit_w: float = math.inf
    limit_mhz: float = math.inf
    late_s: float = 0.0
    default_mhz: float = 0.0
    has_failed: bool = False
    refreshes: bytes = b""
    clocks: bytes = b""
    temperature_c: float | None = None
    power_state: str | None = None


class ScheduleRead(msgspec.Struct, tag=True, frozen=True):
    """A rank's operations in an order.

    Attributes:
        schedule: A schedule of one rank as JSON, compressed by zlib. Empty if it cannot be read.
        error: Reason why it cannot be read. Empty if it can.
    """

    key: int
    schedule: bytes = b""
    error: str = ""


class Lengths(msgspec.Struct, tag=True, frozen=True):
    """Lengths of the micro-batches of a rank's pipeline in a future iteration.

    Attributes:
        iteration: Number of that iteration in this process.
        lengths: Length of each micro-batch's input, such as its number of tokens. Empty if the iteration has begun,
            or if too many were given at once.
    """

    iteration: int
    lengths: tuple[float, ...]


class Worked(msgspec.Struct, tag=True, frozen=True):
    """The floating-point operations of the passes of a rank, each with the key of the pass."""

    passes: tuple[tuple[str, int], ...]


class Measured(msgspec.Struct, tag=True, frozen=True):
    """Measurements of a rank's GPU before training.

    Attributes:
        period_s: Refresh period of its energy counter [s].
        settle_s: Time for which the counter still includes power from before a step of power [s].
        blocking_power_w: Power while the rank waits for another one [W]. NaN if not measured.
    """

    period_s: float
    settle_s: float = 0.0
    blocking_power_w: float = math.nan


class Steps(msgspec.Struct, tag=True, frozen=True):
    """Number of training steps of the engine, for example after loading a checkpoint.

    Attributes:
        after: Number of the last iteration that is included in the steps.
    """

    after: int
    steps: int


class Command(msgspec.Struct, tag=True, frozen=True):
    """An order of the user, as ``perseus-ds control`` sends it.

    Attributes:
        content: The order as JSON.
    """

    content: bytes


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """A rank has fallen back to default clocks."""

    error: str


class RankRecovered(msgspec.Struct, tag=True, frozen=True):
    """A rank has run plans again for some time after a fallback."""


class ClockRefused(msgspec.Struct, tag=True, frozen=True):
    """A requested clock that the GPU does not reach.

    Attributes:
        clock_mhz: Requested clock. None for default clocks.
        reasons: Reasons reported by the driver, such as ``sw_power_cap``.
    """

    clock_mhz: int | None
    reached_mhz: int
    reasons: tuple[str, ...]


class Latencies(msgspec.Struct, tag=True, frozen=True):
    """Latencies of clocks. See :class:`~perseus_ds.protocol.latencies.LatencyTable`.

    Attributes:
        samples_s: Clock [MHz], whether it was reached from below, and its measured latencies [s].
    """

    samples_s: tuple[tuple[int, bool, tuple[float, ...]], ...]


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
ToServer: TypeAlias = FromClient | RankReport | RankFailed | RankRecovered | ClockRefused | Latencies | Joined
