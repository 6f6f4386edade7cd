"""Messages between a rank's client and the agent of its node.

A message is one packet on a Unix socket. A packet of one byte is :data:`WAKE` or the number of a signal that the
client's process received. The interpreter writes the latter (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from perseus_ds import errors
from perseus_ds.errors import GpuError
from perseus_ds.protocol.job_messages import FromClient, ToRank

WAKE = b"\0"
"""Packet that requests the agent to read the memory now."""
LONGEST = 65536
"""Maximum length of a message [bytes]."""
Reason: TypeAlias = Literal["unusable", "held", "memory"]


class Fault(msgspec.Struct, frozen=True):
    """An error of a GPU or its driver.

    Attributes:
        kind: Name of its class in :mod:`perseus_ds.errors`.
    """

    kind: Literal["GpuError", "GpuPermissionError", "GpuBusyError"]
    text: str

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Convert an error to a message."""
        kinds: tuple[Literal["GpuPermissionError", "GpuBusyError"], ...] = ("GpuPermissionError", "GpuBusyError")
        kind = next((name for name in kinds if isinstance(error, getattr(errors, name))), None)
        return cls(kind or "GpuError", str(error))

    def error(self) -> GpuError:
        """Return the error to raise."""
        error: GpuError = getattr(errors, self.kind)(self.text)
        return error


class FindGpu(msgspec.Struct, tag=True, frozen=True):
    """A client requests the address of the GPU with a number that CUDA or HIP uses in its process.

    Attributes:
        device: ``zeus`` for Zeus's device layer.
        ordinal: The number.
        uuid: UUID that CUDA reports, or None.
        pci_address: PCI address that HIP reports, or None.
        variables: Environment variables of the process that hide or renumber GPUs.
        cgroups: Control groups of the process, which determine the GPUs that it can open.
    """

    device: Literal["nvml", "zeus"]
    ordinal: int
    uuid: str | None = None
    pci_address: str | None = None
    variables: dict[str, str] = {}
    cgroups: str = ""


class Found(msgspec.Struct, tag=True, frozen=True):
    """The answer to :class:`FindGpu`.

    Attributes:
        gpu: :attr:`~perseus_ds.gpu.base.Gpu.address` of the GPU.
    """

    gpu: str


class GpuDescription(msgspec.Struct, frozen=True):
    """Description of a GPU by its agent.

    Attributes:
        text: Name of the GPU in messages.
        name: Product name.
        driver: Version of the driver. None if unknown.
        settings: Fields of :class:`~perseus_ds.artifacts.profile.GpuSettings`. None if the driver reports none.
        notices: Settings by an administrator that affect plans, one sentence each.
        clocks_mhz: SM clocks that can be locked, ascending [MHz].
        clocks_fault: Reason why there are no clocks.
        permission_fault: Reason why clocks cannot be set. None if they can, or if it was not checked.
        is_permission_checked: Whether the permission was checked.
    """

    text: str
    name: str
    driver: str | None
    settings: dict[str, Any] | None
    notices: tuple[str, ...]
    clocks_mhz: tuple[int, ...]
    clocks_fault: Fault | None
    permission_fault: Fault | None
    is_permission_checked: bool


class RequestLease(msgspec.Struct, tag=True, frozen=True):
    """A client requests a lease of a GPU.

    The file descriptor of its memory is passed with the message, and those of the logs of a simulated GPU.

    Attributes:
        gpu: :attr:`~perseus_ds.gpu.base.Gpu.address` of the GPU.
        is_renewal: Whether an agent that has ended had granted this lease before.
        describes: Whether the answer is to describe the GPU.
        checks_permission: Whether to check that clocks may be set, which resets the clock.
    """

    gpu: str
    is_renewal: bool = False
    describes: bool = False
    checks_permission: bool = False


class LeftLocked(msgspec.Struct, frozen=True):
    """A GPU that an earlier process left locked.

    Attributes:
        pid: Process ID of the agent of that process.
        error: Reason why its clock could not be reset. Empty if it was reset.
    """

    gpu: str
    pid: int
    error: str


class Granted(msgspec.Struct, tag=True, frozen=True):
    """The lease is granted. The agent has opened the GPU and recorded that its clock may be locked.

    Attributes:
        left_locked: GPUs that earlier processes of this user left locked. Sent to one client only.
        gpu: The GPU, if the client has requested its description.
    """

    left_locked: tuple[LeftLocked, ...] = ()
    gpu: GpuDescription | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The lease is refused, or the GPU was not found.

    Attributes:
        reason: ``unusable`` if this agent cannot use the GPU, ``held`` if another job holds it, ``memory`` if the
            client's memory has another layout.
    """

    reason: Reason
    error: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """The client ends its lease."""


class RequestStatus(msgspec.Struct, tag=True, frozen=True):
    """A process of this user requests the agent's status."""


class Status(msgspec.Struct, tag=True, frozen=True):
    """Status of the agent.

    Attributes:
        leases: GPU and process of each lease.
    """

    leases: tuple[tuple[str, int], ...]


Question: TypeAlias = Literal["period", "step", "start", "refreshes", "stop"]


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A question to the driver of the GPU.

    Attributes:
        number: Number that identifies the answer.
        question: ``period`` measures the refresh period of the energy counter, for at most ``value`` seconds. ``step``
            measures its response to a step of power, from ``value`` watts. ``start`` begins a log of its refreshes,
            ``refreshes`` requests new ones, and ``stop`` ends the log. For these two, ``value`` is the number of the
            question that began the log.
    """

    number: int
    question: Question
    value: float = 0.0


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The answer to a question.

    Attributes:
        values: Values that depend on the question.
        error: Reason why there is no answer. Empty if there is one.
        is_busy: Whether the driver is only busy.
    """

    number: int
    values: tuple[float, ...] = ()
    error: str = ""
    is_busy: bool = False


class Refreshes(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``refreshes``: the refreshes since the last answer.

    Attributes:
        changes: Time [s] and energy [J] of each refresh.
        clocks: Time [s] and clock [MHz] of each reading of the clock.
        temperature_c: Temperature of the GPU. None if the driver does not report it.
        power_state: Performance state of the GPU. None if the driver does not report it.
        error: Reason why the counter cannot be read. Empty if it can.
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
        address: Address of the server, such as ``tcp://10.0.0.1:4711``.
        server_key: Public key of the server.
        public_key: Public key of the job's agents.
        secret_key: Secret key of the job's agents.
        issued: Number of the iteration that the host has begun last.
    """

    rank: int
    address: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    issued: int = 0


class ServerStarted(msgspec.Struct, tag=True, frozen=True):
    """The server listens, or cannot start.

    Attributes:
        kind: Class of the error. Empty if there is none.
        error: Reason why it cannot start.
        answer: Encoded :class:`~perseus_ds.protocol.description.Welcome` for all ranks.
        output_dir: Folder that it writes to.
        server_secret: Its secret key, for later agents of this node.
    """

    address: str = ""
    server_key: bytes = b""
    public_key: bytes = b""
    secret_key: bytes = b""
    answer: bytes = b""
    kind: str = ""
    error: str = ""
    output_dir: str = ""
    server_secret: bytes = b""


class StartServer(msgspec.Struct, tag=True, frozen=True):
    """A client requests the agent to start the server of the job, and to restart it if it dies.

    The file descriptor of the job's description is passed with the message.

    Attributes:
        host: Name or address at which agents reach this node.
        port: Port to listen at. 0 for any.
        length: Length of the description [bytes].
        running: The server that an earlier agent of this node has started. It is only replaced if it dies.
    """

    host: str
    port: int
    length: int
    running: ServerStarted | None = None


ToClocks: TypeAlias = Ask | FromClient
"""Messages that :class:`~perseus_ds.agent.rank_clocks.RankClocks` receives from its client."""
ToAgent: TypeAlias = FindGpu | RequestLease | Release | RequestStatus | Connect | StartServer | ToClocks
ToClient: TypeAlias = Found | Granted | Refused | Released | Status | Answer | Refreshes | ServerStarted | ToRank

encode = msgspec.msgpack.Encoder().encode
decode_to_agent: Callable[[bytes], ToAgent] = msgspec.msgpack.Decoder(ToAgent).decode
"""Return the message in a packet from a client. Raises a ``msgspec.DecodeError`` if the packet is invalid."""
decode_to_client: Callable[[bytes], ToClient] = msgspec.msgpack.Decoder(ToClient).decode
"""Return the message in a packet from an agent. Raises a ``msgspec.DecodeError`` if the packet is invalid."""
