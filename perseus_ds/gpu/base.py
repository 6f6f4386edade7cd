"""The interface of a GPU, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from perseus_ds.protocol.job_messages import GpuFacts


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU, such as the performance state ``P0``. None: its driver does not report it."""

    temperature_c: float | None = None
    power_state: str | None = None


class Gpu(Protocol):
    """A GPU with a driver that this process calls.

    Attributes:
        name: Product name, such as ``NVIDIA A100-SXM4-80GB``. The name of a simulated GPU contains "simulated".
        driver: Driver version, or None.
        address: Address by which another process on this node opens the GPU (:mod:`perseus_ds.gpu`). None if
            no lock of its clock outlives this process.
        simulated: Whether its physics is simulated. All its results are labelled accordingly.
        settings: Fields of :class:`~perseus_ds.artifacts.profile.GpuSettings` when they were first read. None if the
            driver does not report them.
    """

    name: str
    driver: str | None
    simulated: bool

    @property
    def settings(self) -> dict[str, Any] | None: ...

    @property
    def address(self) -> str | None: ...

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Return the SM clocks that can be locked, ascending [MHz].

        Raises:
            GpuError: The driver lists none.
        """

    def check_lock_permission(self) -> None:
        """Check that clocks may be locked. No clock is locked afterwards.

        Raises:
            GpuPermissionError: They may not. The message gives a remedy.
            GpuError: The driver refused.
        """

    def close(self) -> None:
        """Release the driver. The clock stays as it is."""

    @property
    def has_energy_counter(self) -> bool:
        """True if :meth:`energy_j` works. It does not before Volta and on many virtual GPUs."""

    def lock_clock(self, clock_mhz: int) -> None:
        """Request a fixed SM clock.

        The clock changes after some milliseconds. Power and thermal limits may keep it lower.

        Raises:
            GpuPermissionError: This process may not lock clocks.
            GpuError: The driver refused. The message gives the reason and a remedy.
        """

    def reset_clock(self) -> None:
        """Remove the lock, so that the driver manages the clock again.

        Raises:
            GpuError: As for :meth:`lock_clock`.
        """

    def clock_mhz(self) -> int:
        """Return the current SM clock [MHz]."""

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return the reasons that limit the current clock, such as ``sw_power_cap``. Empty if not reported."""

    def power_limit_w(self) -> float | None:
        """Return the power limit in force [W]. None if it is not reported."""

    def energy_j(self) -> float:
        """Return a counter of the energy used [J], which is refreshed about every 100 ms."""

    def power_w(self) -> float:
        """Return the current power [W]."""

    @property
    def state(self) -> GpuState:
        """Current temperature and performance state, if the driver reports them."""


def gpu_facts(gpu: Gpu) -> GpuFacts:
    """Return the facts about a GPU that the server of a job needs."""
    return GpuFacts(
        name=gpu.name,
        driver=gpu.driver,
        settings=gpu.settings,
        counter=getattr(gpu, "counter", ""),
        simulated=gpu.simulated,
    )
