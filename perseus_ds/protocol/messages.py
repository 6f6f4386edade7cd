"""Messages between a rank's client and the agent of its node.

A message is one packet on a Unix socket. A packet of one byte is :data:`WAKE` or the number of a signal that the
client's process received. The interpreter writes the latter (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from perseus_ds import errors
from perseus_ds.errors import GpuError

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


class Program(msgspec.Struct, tag=True, frozen=True):
    """The clocks of a rank in an iteration. Iterations refer to a program by its number.

    Attributes:
        number: Number from 0 to 254.
        first_mhz: Clock of the whole iteration if ``clocks_mhz`` is empty [MHz]. None for default clocks.
        clocks_mhz: Clock of each instruction, by its position in the rank's schedule [MHz].
        spans_s: Begin and end of each instruction in an iteration [s]. Empty if unknown.
        time_s: Time of the iteration [s].
    """

    number: int
    first_mhz: int | None = None
    clocks_mhz: tuple[int, ...] = ()
    spans_s: tuple[tuple[float, float], ...] = ()
    time_s: float = 0.0


class WatchDefaultClocks(msgspec.Struct, tag=True, frozen=True):
    """Requests a report if the GPU stays below its highest clock at default clocks during the next minute."""


class SetProfiledLimit(msgspec.Struct, tag=True, frozen=True):
    """Power limit during profiling, with which the agent compares the current one.

    Attributes:
        power_w: Limit recorded in a profile [W]. None for the next one that is read.
    """

    power_w: float | None


Question: TypeAlias = Literal["probe", "period", "step", "start", "refreshes", "stop"]


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A question to the driver of the GPU.

    Attributes:
        number: Number that the answer refers to.
        question: ``probe`` tries each driver call that programs need. ``period`` measures the refresh period of the
            energy counter, for at most ``value`` seconds. ``step`` measures the response of the counter to a step of
            power from ``value`` watts. ``start`` starts a log of its refreshes, ``refreshes`` requests the new ones,
            and ``stop`` ends the log. For the last two, ``value`` is the number of the question that started it.
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


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The agent cannot set clocks or read the energy counter.

    Attributes:
        error: The reason.
        may_pass: Whether the driver may work again later.
    """

    error: str
    may_pass: bool = True


class ClockRefused(msgspec.Struct, tag=True, frozen=True):
    """A requested clock that the GPU does not reach.

    Attributes:
        clock_mhz: Requested clock. None for default clocks.
        reasons: Throttle reasons such as ``sw_power_cap``, if the driver reports them.
    """

    clock_mhz: int | None
    reached_mhz: int
    reasons: tuple[str, ...]


class Latencies(msgspec.Struct, tag=True, frozen=True):
    """Latencies of clocks for a :class:`~perseus_ds.protocol.latencies.LatencyTable`.

    Attributes:
        samples_s: Clock [MHz], whether it was reached from below, and the measured latencies [s].
    """

    samples_s: tuple[tuple[int, bool, tuple[float, ...]], ...]


class Released(msgspec.Struct, tag=True, frozen=True):
    """The lease has ended, and the clock is the default one unless another rank uses the GPU."""


ToClocks: TypeAlias = Program | WatchDefaultClocks | SetProfiledLimit | Ask
"""Messages that concern the clocks of one rank."""
ToAgent: TypeAlias = FindGpu | RequestLease | Release | RequestStatus | ToClocks
ToClient: TypeAlias = (
    Found | Granted | Refused | Released | Status | Answer | Refreshes | Failed | ClockRefused | Latencies
)

encode = msgspec.msgpack.Encoder().encode
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_to_client = msgspec.msgpack.Decoder(ToClient)


def decode_to_agent(packet: bytes) -> ToAgent:
    """Return the message in a packet from a client.

    Raises a ``msgspec.DecodeError`` if the packet is invalid.
    """
    message: ToAgent = _to_agent.decode(packet)
    return message


def decode_to_client(packet: bytes) -> ToClient:
    """Return the message in a packet from an agent.

    Raises a ``msgspec.DecodeError`` if the packet is invalid.
    """
    message: ToClient = _to_client.decode(packet)
    return message
