"""Messages between a rank's client and the agent of its node.

A message is one packet on a Unix socket. The numbers of the signals that the client's process handles are written into
a pipe by its interpreter (:class:`~perseus_ds.client.signals.SignalPipe`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from perseus_ds import errors
from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.protocol.job_messages import FromClient, GpuFacts, ToRank

WAKE = b"\0"
"""Packet that requests the agent to read the memory now."""
LONGEST = 65536
"""Maximum length of a message [bytes]."""
Reason: TypeAlias = Literal["unusable", "held", "memory"]


class Fault(msgspec.Struct, frozen=True):
    """An error of a GPU or its driver, and the name of its class in :mod:`perseus_ds.errors`."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Convert an error to a message."""
        is_known = isinstance(error, GpuPermissionError | GpuBusyError)
        return cls(type(error).__name__ if is_known else "GpuError", str(error))

    def error(self) -> GpuError:
        """Return the error to raise."""
        error: GpuError = getattr(errors, self.kind)(self.text)
        return error


class FindGpu(msgspec.Struct, tag=True, frozen=True):
    """A client requests the address of the GPU that has a number in its process."""

    device: Literal["nvml", "zeus"]
    ordinal: int  # as CUDA or HIP count
    uuid: str | None = None  # as CUDA reports it
    pci_address: str | None = None  # as HIP reports it
    variables: dict[str, str] = {}  # environment variables of the process that hide or renumber GPUs
    cgroups: str = ""  # of the process, which determine the GPUs that it can open


class Found(msgspec.Struct, tag=True, frozen=True):
    """The :attr:`~perseus_ds.gpu.base.Gpu.address` of the GPU."""

    gpu: str


class GpuDescription(msgspec.Struct, frozen=True):
    """Description of a GPU by its agent."""

    text: str  # its name in messages
    facts: GpuFacts
    notices: tuple[str, ...]  # settings by an administrator that affect plans, one sentence each
    clocks_mhz: tuple[int, ...]  # SM clocks that can be locked, ascending
    clocks_fault: Fault | None  # why there are no clocks
    permission_fault: Fault | None  # why clocks cannot be set
    is_permission_checked: bool


class RequestLease(msgspec.Struct, tag=True, frozen=True):
    """A client requests a lease of a GPU.

    The file descriptors of its memory, of the reading end of its pipe of signals, and of the logs of a simulated GPU
    are passed with the message.
    """

    gpu: str  # its address
    is_renewal: bool = False  # an agent that has ended had granted this lease before
    describes: bool = False  # the answer is to describe the GPU
    checks_permission: bool = False  # checks that clocks may be set, which resets the clock


class LeftLocked(msgspec.Struct, frozen=True):
    """A GPU that an earlier process left locked."""

    gpu: str
    pid: int  # of the agent of that process
    error: str  # why its clock could not be reset; empty if it was reset


class Granted(msgspec.Struct, tag=True, frozen=True):
    """The lease is granted. The agent has opened the GPU and recorded that its clock may be locked."""

    left_locked: tuple[LeftLocked, ...] = ()  # by earlier processes of this user; sent to one client only
    gpu: GpuDescription | None = None  # if it was requested


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The lease is refused, or the GPU was not found.

    This agent cannot use the GPU, another job holds it, or the client's memory has another layout.
    """

    reason: Reason
    error: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """The client ends its lease."""


class Released(msgspec.Struct, tag=True, frozen=True):
    """The lease has ended, and the clock is the default one unless another rank uses the GPU."""


class RequestStatus(msgspec.Struct, tag=True, frozen=True):
    """A process of this user requests the agent's status."""


class Status(msgspec.Struct, tag=True, frozen=True):
    """GPU and process of each lease of the agent."""

    leases: tuple[tuple[str, int], ...]


class LogCounter(msgspec.Struct, tag=True, frozen=True):
    """A client requests to receive each refresh of the energy counter, or no more of them."""

    is_on: bool


class CounterRefreshed(msgspec.Struct, tag=True, frozen=True):
    """A refresh of the energy counter."""

    time_s: float = math.nan
    energy_j: float = math.nan
    error: str = ""  # why the counter cannot be read any more


class Connect(msgspec.Struct, tag=True, frozen=True):
    """The rank follows a server from now on."""

    rank: int
    address: str  # of the server, such as tcp://10.0.0.1:4711
    server_key: bytes
    public_key: bytes  # of the job's agents
    secret_key: bytes
    issued: int = 0  # number of the iteration that the host has begun last


class ServerStarted(msgspec.Struct, tag=True, frozen=True):
    """The server listens, or cannot start."""

    address: str = ""
    server_key: bytes = b""
    public_key: bytes = b""
    secret_key: bytes = b""
    answer: bytes = b""  # the encoded Welcome for all ranks
    kind: str = ""  # class of the error, if there is one
    error: str = ""
    output_dir: str = ""  # the folder that it writes to
    server_secret: bytes = b""  # its secret key, for later agents of this node


class StartServer(msgspec.Struct, tag=True, frozen=True):
    """A client requests the agent to start the server of the job, and to restart it if it dies.

    The file descriptor of the job's description is passed with the message.
    """

    host: str  # name or address at which agents reach this node
    port: int  # 0 for any
    length: int  # of the description [bytes]
    running: ServerStarted | None = None  # started by an earlier agent of this node, and only replaced if it dies


ToClocks: TypeAlias = LogCounter | FromClient
"""Messages that :class:`~perseus_ds.agent.rank_clocks.RankClocks` receives from its client."""
ToAgent: TypeAlias = FindGpu | RequestLease | Release | RequestStatus | Connect | StartServer | ToClocks
ToClient: TypeAlias = Found | Granted | Refused | Released | Status | CounterRefreshed | ServerStarted | ToRank

encode = msgspec.msgpack.Encoder().encode
decode_to_agent: Callable[[bytes], ToAgent] = msgspec.msgpack.Decoder(ToAgent).decode
"""Return the message in a packet from a client. Raises a ``msgspec.DecodeError`` if the packet is invalid."""
decode_to_client: Callable[[bytes], ToClient] = msgspec.msgpack.Decoder(ToClient).decode
"""Return the message in a packet from an agent. Raises a ``msgspec.DecodeError`` if the packet is invalid."""
