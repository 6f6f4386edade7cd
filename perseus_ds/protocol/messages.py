"""Messages between a rank's client and the agent of its node.

A message is one packet on a Unix socket. A packet of one byte is :data:`WAKE`, or the number of a signal that the
client's process received: the interpreter writes it itself (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from perseus_ds.protocol.job_messages import FromClient, ToRank

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


Question: TypeAlias = Literal["period", "step", "start", "refreshes", "stop"]


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A question that the driver of the GPU has to answer.

    Attributes:
        number: Names the answer.
        question: ``period`` measures how often the energy
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


class Released(msgspec.Struct, tag=True, frozen=True):
    """The lease has ended, and the clock is the default one unless another rank uses the GPU."""


class Connect(msgspec.Struct, tag=True, frozen=True):
    """The rank follows a server from now on.

    Attributes:
        rank: Global rank.
        address: Of the server, such as ``tcp://10.0.0.1:4711``.
        server_key: Public key of the server.
        public_key: Public key of the job's agents.
        secret_key: Their secret key.
        issued: Number of the iteration that the host has begun last.
    """

    rank: int
    address: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    issued: int = 0


class StartServer(msgspec.Struct, tag=True, frozen=True):
    """The agent is to start the server of the job, and to start it again if it dies.

    The file of the job's description comes with the message.
    """

    host: str
    port: int = 0


class ServerStarted(msgspec.Struct, tag=True, frozen=True):
    """The server listens, or cannot start.

    Attributes:
        kind: Class of the error; empty if there is none.
        error: Why it cannot start.
        answer: What it tells all ranks, as JSON.
    """

    address: str = ""
    server_key: bytes = b""
    public_key: bytes = b""
    secret_key: bytes = b""
    answer: bytes = b""
    kind: str = ""
    error: str = ""


ToClocks: TypeAlias = Ask | FromClient
"""What the agent's part for one rank receives from its client."""
ToAgent: TypeAlias = RequestLease | Release | RequestStatus | Connect | StartServer | ToClocks
ToClient: TypeAlias = Granted | Refused | Released | Status | Answer | Refreshes | ServerStarted | ToRank

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
