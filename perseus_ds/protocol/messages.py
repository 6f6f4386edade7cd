"""Messages between a rank's client and the agent of its node.

A message is one packet on a Unix socket. A packet of one byte is :data:`WAKE`, or the number of a signal that the
client's process received: the interpreter writes it itself (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

WAKE = b"\0"
"""A packet: the client has written something into the memory at which the agent is to look now."""
LONGEST = 65536
"""Maximum length of a message [bytes]."""
Reason: TypeAlias = Literal["unusable", "held", "memory"]


class RequestLease(msgspec.Struct, tag=True, frozen=True):
    """A client requests a lease of a GPU.

    The file of its memory comes with the message, and those of the logs of a simulated GPU.

    Attributes:
        gpu: The GPU's :attr:`~perseus_ds.gpu.base.Gpu.address`.
        is_renewal: Whether another agent, which is gone, had granted it to this process.
    """

    gpu: str
    is_renewal: bool = False


class LeftLocked(msgspec.Struct, frozen=True):
    """A GPU that an earlier process left locked.

    Attributes:
        pid: The agent of that process.
        error: Why its clock could not be reset; empty if it was reset.
    """

    gpu: str
    pid: int
    error: str


class Granted(msgspec.Struct, tag=True, frozen=True):
    """The lease is granted: the agent has opened the GPU and recorded that its clock may be locked.

    Attributes:
        left_locked: What earlier processes of this user left locked; sent to one client.
    """

    left_locked: tuple[LeftLocked, ...] = ()


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The lease is refused.

    Attributes:
        reason: ``unusable`` if this agent cannot use the GPU, ``held`` if another job holds it, ``memory`` if the
            client's memory has another layout.
    """

    reason: Reason
    error: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """The client ends its lease."""


class RequestStatus(msgspec.Struct, tag=True, frozen=True):
    """Anybody of this user requests the agent's status."""


class Status(msgspec.Struct, tag=True, frozen=True):
    """What the agent does.

    Attributes:
        leases: GPU and process of each lease.
    """

    leases: tuple[tuple[str, int], ...]


class Program(msgspec.Struct, tag=True, frozen=True):
    """The clocks of a rank in an iteration; iterations name it by its number.

    Attributes:
        number: From 0 to 254.
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


class WatchDefaultClocks(msgspec.Struct, tag=True, frozen=True):
    """The agent is to report for a minute if something keeps the GPU below its highest clock at default clocks."""


class SetProfiledLimit(msgspec.Struct, tag=True, frozen=True):
    """The power limit with which the agent compares the present one.

    Attributes:
        power_w: As a profile records it [W]; None for the one that is read next.
    """

    power_w: float | None


Question: TypeAlias = Literal["probe", "period", "step", "start", "refreshes", "stop"]


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A question that the driver of the GPU has to answer.

    Attributes:
        number: Names the answer.
        question: ``probe`` has the driver do once all that programs need. ``period`` measures how often the energy
            counter is refreshed, for at most ``value`` seconds. ``step`` measures how it answers to a step of power,
            from ``value`` watts. ``start`` begins a log of its refreshes; ``refreshes`` asks for those
            that are new, and ``stop`` ends it, ``value`` being the number of the question that began it.
    """

    number: int
    question: Question
    value: float = 0.0


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The answer to a question.

    Attributes:
        values: As many as the question has.
        error: Why there is no answer; empty if there is.
        is_busy: Whether the driver is only busy.
    """

    number: int
    values: tuple[float, ...] = ()
    error: str = ""
    is_busy: bool = False


class Refreshes(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``refreshes``: what the counter's log has recorded since the last one.

    Attributes:
        changes: Moment [s] and energy [J] of each refresh.
        clocks: When the clock was read [s], and the clock [MHz].
        temperature_c: Of the GPU; None if the driver does not report it.
        power_state: Likewise.
        error: Why the counter cannot be read; empty if it can.
    """

    number: int
    changes: tuple[tuple[float, float], ...]
    clocks: tuple[tuple[float, int], ...]
    temperature_c: float | None = None
    power_state: str | None = None
    error: str = ""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The agent cannot set clocks or read the energy counter.

    Attributes:
        error: Why.
        may_pass: Whether the driver may work again later.
    """

    error: str
    may_pass: bool = True


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


class Released(msgspec.Struct, tag=True, frozen=True):
    """The lease has ended, and the clock is the default one unless another rank uses the GPU."""


ToClocks: TypeAlias = Program | WatchDefaultClocks | SetProfiledLimit | Ask
"""What the clocks of one rank are told."""
ToAgent: TypeAlias = RequestLease | Release | RequestStatus | ToClocks
ToClient: TypeAlias = Granted | Refused | Released | Status | Answer | Refreshes | Failed | ClockRefused | Latencies

encode = msgspec.msgpack.Encoder().encode
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_to_client = msgspec.msgpack.Decoder(ToClient)


def decode_to_agent(packet: bytes) -> ToAgent:
    """Return the message in a packet from a client; a ``msgspec.DecodeError`` if it has another form."""
    message: ToAgent = _to_agent.decode(packet)
    return message


def decode_to_client(packet: bytes) -> ToClient:
    """Return the message in a packet from an agent; a ``msgspec.DecodeError`` if it has another form."""
    message: ToClient = _to_client.decode(packet)
    return message
