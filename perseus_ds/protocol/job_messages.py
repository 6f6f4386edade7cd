"""Messages between the ranks of a job and its server, which the agents of the nodes forward.

The server tells each rank what the iterations of an order run (:class:`Follow`), and each rank reports every iteration
(:class:`Report`, to which its agent adds what the GPU did: :class:`RankReport`). An order is a number from 0 to 254,
which the server gives; 255 is the number of all others, which run at default clocks.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

Times: TypeAlias = Literal["none", "ends", "passes", "all"]
"""What a rank measures of an iteration: nothing but its time; when its passes ended; its passes; all operations."""

# From the server to a rank.


class Program(msgspec.Struct, tag=True, frozen=True):
    """The clocks of a rank in the iterations of an order.

    Attributes:
        number: The number of the order, from 0 to 254.
        first_mhz: The clock of the whole iteration if there are no others [MHz]; None for the default.
        clocks_mhz: The clock of each instruction, by its position in the rank's schedule [MHz].
        spans_s: When each instruction begins and ends, in an iteration [s]; empty if unknown.
        time_s: Time of the iteration [s].
    """

    number: int
    first_mhz: int | None = None
    clocks_mhz: tuple[int, ...] = ()
    spans_s: tuple[tuple[float, float], ...] = ()
    time_s: float = 0.0


class Follow(msgspec.Struct, tag=True, frozen=True):
    """What the iterations of an order run, from one iteration on.

    Attributes:
        program: The clocks; its number is that of the order. One without clocks means default clocks.
        serial: Number of this message, in all of the job; reports name it.
        from_iteration: The first iteration that runs so.
        shown_from: The iteration from which the phase is shown to the user's code, which may end training by it: all
            ranks know it by then.
        phase: As in ``run.jsonl``.
        plan: The plan, as a place on the frontier; None without one.
        times: What is measured of iterations whose number is a multiple of ``every``.
        otherwise: What is measured of the others.
        logs_energy: Whether the refreshes of the energy counter are reported.
        only_iteration: The only iteration that runs so, for which this replaces one with 0. With 0, iterations without
            such a message of their own run at default clocks, as if they were of no order. None for all to come.
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


class Orders(msgspec.Struct, tag=True, frozen=True):
    """The numbers of orders.

    Attributes:
        numbers: By what tells an order from others, and the shape of a rank's first inputs (0 for any), its number.
        others: The number of all others.
    """

    numbers: tuple[tuple[int, float, int], ...]
    others: int


class ReadSchedule(msgspec.Struct, tag=True, frozen=True):
    """A rank is to report the schedule of an order when an iteration of that order begins."""

    key: int


class Calibrate(msgspec.Struct, tag=True, frozen=True):
    """How long passes take on a simulated GPU.

    Attributes:
        seconds_per_flop: Time of a floating-point operation at the top clock [s].
        flops: Floating-point operations of passes, by their place in the rank's own list.
    """

    seconds_per_flop: float
    flops: tuple[int, ...]


class Say(msgspec.Struct, tag=True, frozen=True):
    """A rank is to print a line.

    Attributes:
        warns: Whether it is a warning.
    """

    text: str
    warns: bool = False


class Observed(msgspec.Struct, tag=True, frozen=True):
    """Figures of an iteration for a monitor, such as DeepSpeed's.

    Attributes:
        figures: By their tags.
        samples: Samples that the job has seen after it.
    """

    figures: tuple[tuple[str, float], ...]
    samples: int


class Summarised(msgspec.Struct, tag=True, frozen=True):
    """All lines of a job that has ended were sent."""


class WatchDefaultClocks(msgspec.Struct, tag=True, frozen=True):
    """The agent is to report for a minute if something keeps the GPU below its highest clock at default clocks."""


class SetProfiledLimit(msgspec.Struct, tag=True, frozen=True):
    """The power limit with which the agent compares the present one.

    Attributes:
        power_w: As a profile records it [W]; None for the one that is read next.
    """

    power_w: float | None


# From a rank to the server.


class Spans(msgspec.Struct, tag=True, frozen=True):
    """Operations of an iteration, before its report; see :mod:`perseus_ds.pipeline.span`."""

    iteration: int
    content: bytes


class Report(msgspec.Struct, tag=True, frozen=True):
    """An iteration as a rank's client measured it.

    Attributes:
        iteration: Number of the iteration in this process, 1 first.
        order: Number of the order by which it ran.
        serial: Of what it followed, as the client saw it.
        key: What tells its order from others.
        time_s: How long it took [s].
        stopped_s: How long before it began the one before had ended, for the host [s].
        issued: Number of the iteration that the host has begun last.
        ended: When it ended for the host [Unix seconds].
        samples: Samples that the job has seen after it.
        first_shape: Number of the shape of the first forward's inputs; 0 if unknown.
        shapes: The same of all forwards together.
        length: Mean length of the inputs of a forward; NaN if unknown.
        computed_s: When the last pass ended, from the iteration's start [s]; 0 if it was not measured.
        tail_s: How long the tail took, waiting included [s]; 0 if it was not measured.
        memory_bytes: Most memory that tensors have taken on the GPU; 0 if unknown.
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
    """A rank's report with what its agent adds.

    Attributes:
        report: The client's.
        serial: Of what the GPU followed from the iteration's begin to its end; -1 if that changed meanwhile.
        begun_s: When it began on the GPU, in the node's monotonic time [s]; NaN if unknown.
        energy_j: Energy of the GPU [J]; NaN if it cannot be read.
        changes: Number of clock changes.
        skips: Number of clock changes that were left out, because a later one was due.
        asked_mhz: The clock that was read back last, as requested [MHz]; NaN at default clocks.
        reached_mhz: As read [MHz].
        limit_w: The power limit, if it is lower than profiled [W]; infinite otherwise.
        limit_mhz: The highest clock that is reached, if it is lower than profiled [MHz]; infinite otherwise.
        late_s: How late the agent follows marks [s].
        default_mhz: The clock of the busy GPU while nobody has locked it [MHz]; 0 if unknown.
        has_failed: Whether the rank has fallen back to default clocks.
        refreshes: Moment [s] and value [J] of the energy counter at each refresh since the last report, as doubles.
        clocks: Moment [s] of each reading of the clock, and the clock [MHz], as doubles.
        temperature_c: Of the GPU; None if unknown.
        power_state: Likewise.
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
        schedule: A schedule of one rank as JSON; empty if it cannot be read.
        error: Why it cannot be read; empty if it can.
    """

    key: int
    schedule: bytes = b""
    error: str = ""


class Lengths(msgspec.Struct, tag=True, frozen=True):
    """Lengths of the micro-batches of a rank's pipeline in an iteration to come.

    Attributes:
        iteration: Number of that iteration in this process.
        lengths: Of the input of each micro-batch, such as its number of tokens; empty if it has begun already.
    """

    iteration: int
    lengths: tuple[float, ...]


class Worked(msgspec.Struct, tag=True, frozen=True):
    """The floating-point operations of the passes of a rank, by what tells a pass from others."""

    passes: tuple[tuple[str, int], ...]


class Measured(msgspec.Struct, tag=True, frozen=True):
    """What a rank has measured of its GPU before training.

    Attributes:
        period_s: How often its energy counter is refreshed [s].
        settle_s: How long the counter still tells what was drawn before a step of power [s].
        blocking_power_w: What it draws while it waits for another rank [W]; NaN if that was not measured.
    """

    period_s: float
    settle_s: float = 0.0
    blocking_power_w: float = math.nan


class Steps(msgspec.Struct, tag=True, frozen=True):
    """The training steps that the engine has done, such as after a checkpoint was loaded.

    Attributes:
        after: Number of the last iteration that counts among them.
    """

    after: int
    steps: int


class Command(msgspec.Struct, tag=True, frozen=True):
    """An order of the user, as ``perseus-ds control`` sends it.

    Attributes:
        content: JSON.
    """

    content: bytes


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """A rank has fallen back to default clocks.

    Attributes:
        may_pass: Whether it may work again later.
    """

    error: str
    may_pass: bool = True


class RankRecovered(msgspec.Struct, tag=True, frozen=True):
    """A rank that had fallen back has run under plans again for long."""


class ClockRefused(msgspec.Struct, tag=True, frozen=True):
    """A clock that was requested and that the GPU does not reach.

    Attributes:
        clock_mhz: As requested; None for default clocks.
        reasons: Why, if the driver reports it, such as ``sw_power_cap``.
    """

    clock_mhz: int | None
    reached_mhz: int
    reasons: tuple[str, ...]


class Latencies(msgspec.Struct, tag=True, frozen=True):
    """Latencies of clocks; see :class:`~perseus_ds.protocol.latencies.LatencyTable`.

    Attributes:
        samples_s: Clock [MHz], whether it was reached from below, and the latencies seen [s].
    """

    samples_s: tuple[tuple[int, bool, tuple[float, ...]], ...]


class Joined(msgspec.Struct, tag=True, frozen=True):
    """A rank follows the server through this agent from now on, and knows of nothing that was sent before."""

    issued: int = 0


class Left(msgspec.Struct, tag=True, frozen=True):
    """A rank follows the server no more."""


ToRank: TypeAlias = (
    Follow | Orders | ReadSchedule | Calibrate | Say | Observed | Summarised | WatchDefaultClocks | SetProfiledLimit
)
FromClient: TypeAlias = Spans | Report | ScheduleRead | Lengths | Worked | Measured | Steps | Command | Left
"""What a client sends, which its agent forwards or completes."""
ToServer: TypeAlias = FromClient | RankReport | RankFailed | RankRecovered | ClockRefused | Latencies | Joined
