"""Messages between a rank's client and the agent of its node.

A message is one packet on a Unix socket. A packet of one byte is the number of a signal that the client's process
received: the interpreter writes it itself (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

LONGEST = 65536
"""Maximum length of a message [bytes]."""
Reason: TypeAlias = Literal["unusable", "held", "memory"]


class RequestLease(msgspec.Struct, tag=True, frozen=True):
    """A client requests a lease of a GPU; the descriptor of its memory comes with the message.

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


class Released(msgspec.Struct, tag=True, frozen=True):
    """The lease has ended, and the clock is the default one unless another rank uses the GPU."""


ToAgent: TypeAlias = RequestLease | Release | RequestStatus
ToClient: TypeAlias = Granted | Refused | Released | Status

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
