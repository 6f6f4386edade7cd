"""An NVIDIA GPU through NVML, by the module pynvml from the package ``nvidia-ml-py``."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cached_property
from typing import Any

import pynvml

from perseus_ds.device.gpu.base import GpuState
from perseus_ds.device.gpu.nvml_calls import call, start_nvml
from perseus_ds.errors import GpuError

_THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_POWER_PROFILE = "NVML_POWER_PROFILE_"
_POWER_PROFILES = {
    number: name.removeprefix(_POWER_PROFILE)
    for name, number in vars(pynvml).items()
    if name.startswith(_POWER_PROFILE) and name != f"{_POWER_PROFILE}MAX" and "OPERATION" not in name
}


class NvmlGpu:
    """One NVIDIA GPU.

    NVML may be called from several threads at once, and so may this class. A call can take tens of milliseconds
    (setting a clock) or hang with the driver: make it on a thread that may wait.

    Attributes:
        index: NVML's index of the GPU, which is nvidia-smi's.
        uuid: The GPU's UUID, ``GPU-…``.
        name: Product name.
        driver: Driver version.
        simulated: False.
    """

    simulated = False

    def __init__(self, index: int) -> None:
        """Open a GPU by NVML's own index (:mod:`perseus_ds.device.gpu.nvml_lookup` finds it).

        Raises:
            GpuError: NVML, the driver or the GPU is missing, or the GPU is split by MIG.
        """
        start_nvml()
        self._open = True
        try:
            self.index = index
            self._handle = call(f"Opening GPU {index}", "nvmlDeviceGetHandleByIndex", index)
            self.name = str(call(f"Reading the name of GPU {index}", "nvmlDeviceGetName", self._handle))
            self.uuid = str(call(f"Reading the UUID of GPU {index}", "nvmlDeviceGetUUID", self._handle))
            self.driver: str | None = str(call("Reading the driver's version", "nvmlSystemGetDriverVersion"))
            self._refuse_mig()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """By which another process, the guardian, opens this GPU."""
        return f"nvml:{self.uuid}"

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"

    def _ask(self, what: str, function: str, *arguments: Any) -> Any:
        if not self._open:
            raise GpuError(f"{what} of {self} failed: it was closed.")
        return call(f"{what} of {self}", function, self._handle, *arguments)

    def _refuse_mig(self) -> None:
        try:
            enabled, _ = self._ask("Reading the MIG mode", "nvmlDeviceGetMigMode")
        except GpuError:
            return  # A GPU or driver without MIG has no slices.
        if enabled:
            raise GpuError(
                f"{self} is split into MIG devices: a clock would change for all of them. "
                f'Switch MIG off (`nvidia-smi -i {self.index} -mig 0`) or set "device": "simulated".'
            )

    @cached_property
    def _clocks_mhz(self) -> tuple[int, ...]:
        memory_clocks = self._ask("Reading the memory clocks", "nvmlDeviceGetSupportedMemoryClocks")
        if not memory_clocks:
            raise GpuError(f"Reading the memory clocks of {self} failed: the driver lists none. Use another GPU.")
        # The other entries belong to idle states; training runs at the highest memory clock.
        clocks = self._ask("Reading the SM clocks", "nvmlDeviceGetSupportedGraphicsClocks", max(memory_clocks))
        if not clocks:
            raise GpuError(f"Reading the SM clocks of {self} failed: the driver lists none. Use another GPU.")
        return tuple(sorted({int(clock) for clock in clocks}))

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Return the SM clocks that can be locked at the highest memory clock, ascending [MHz].

        Raises:
            GpuError: The driver does not list them.
        """
        return self._clocks_mhz

    def _check_clock(self, clock_mhz: int) -> None:
        if clock_mhz not in self._clocks_mhz:
            nearest = min(self._clocks_mhz, key=lambda clock: abs(clock - clock_mhz))
            raise GpuError(f"Locking the clock of {self} failed: it has no {clock_mhz} MHz; the nearest is {nearest}.")

    def lock_clock(self, clock_mhz: int) -> None:
        """Request a fixed SM clock; it takes effect a little later and limits may keep it lower.

        Raises:
            GpuPermissionError: This process may not.
            GpuError: The GPU has no such clock, or the driver refused.
        """
        self._check_clock(clock_mhz)
        self._ask(f"Locking {clock_mhz} MHz as the clock", "nvmlDeviceSetGpuLockedClocks", clock_mhz, clock_mhz)

    def reset_clock(self) -> None:
        """Return the clock to the driver's own management.

        Raises:
            GpuPermissionError: This process may not.
            GpuError: The driver refused.
        """
        self._ask("Resetting the clock", "nvmlDeviceResetGpuLockedClocks")

    def check_lock_permission(self) -> None:
        """Check that this process may lock clocks, by resetting the clock.

        A reset needs the same permission as a lock and does nothing where no clock is locked. A lock that
        somebody else set (``nvidia-smi -lgc``) is lost, as it would be at the end of a run.

        Raises:
            GpuPermissionError: It may not; the message says what to do.
            GpuError: The driver refused for another reason.
        """
        self._ask("Checking the permission to lock the clock", "nvmlDeviceResetGpuLockedClocks")

    def clock_mhz(self) -> int:
        """Return the SM clock now [MHz]."""
        return int(self._ask("Reading the SM clock", "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM))

    @cached_property
    def has_energy_counter(self) -> bool:
        """Whether the GPU counts the energy it uses (Volta and later; many vGPUs do not)."""
        try:
            self.energy_j()
        except GpuError as error:
            cause = error.__cause__
            if isinstance(cause, pynvml.NVMLError) and cause.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise
        return True

    def energy_j(self) -> float:
        """Return the energy used since the driver was loaded [J]; refreshed about every 100 ms.

        Raises:
            GpuError: The GPU has no such counter, or the driver refused.
        """
        return float(self._ask("Reading the energy counter", "nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def power_w(self) -> float:
        """Return the power drawn now [W]; recent GPUs average it over about a second."""
        return float(self._ask("Reading the power", "nvmlDeviceGetPowerUsage")) / 1e3

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return why the clock is not higher now, such as ``sw_power_cap``; empty if nothing limits it."""
        what = "Reading the throttle reasons"
        try:
            mask = self._ask(what, "nvmlDeviceGetCurrentClocksEventReasons")
        except GpuError:  # Drivers before 535 have it under its old name.
            mask = self._ask(what, "nvmlDeviceGetCurrentClocksThrottleReasons")
        return tuple(name for bit, name in _THROTTLE_REASONS.items() if mask & bit)

    @property
    def state(self) -> GpuState:
        """Temperature and performance state now, as far as the driver tells."""
        temperature_c, power_state = None, None
        with suppress(GpuError):
            temperature_c = float(
                self._ask("Reading the temperature", "nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
            )
        with suppress(GpuError):
            power_state = f"P{int(self._ask('Reading the performance state', 'nvmlDeviceGetPerformanceState'))}"
        return GpuState(temperature_c, power_state)

    @property
    def administrator_settings(self) -> list[str]:
        """What somebody has set that keeps default clocks below the GPU's own, a sentence each.

        A clock that somebody has locked cannot be asked for: it is seen under load only, where the clock stays below
        the highest and nothing limits it.
        """
        found = []
        top_mhz = self._clocks_mhz[-1]
        application_mhz = self._optional(
            "Reading the application clock", "nvmlDeviceGetApplicationsClock", pynvml.NVML_CLOCK_SM
        )
        usual_mhz = self._optional(
            "Reading the default application clock", "nvmlDeviceGetDefaultApplicationsClock", pynvml.NVML_CLOCK_SM
        )
        # Some GPUs have a default application clock below the highest, and exceed it as long as nobody sets another.
        if application_mhz is not None and application_mhz < top_mhz and application_mhz != usual_mhz:
            found.append(
                f"its application clock is {application_mhz} MHz of {top_mhz}: default clocks stay below that, and a "
                f"lock by Perseus does not. `nvidia-smi -i {self.index} -rac` resets it."
            )
        limit_mw = self._optional("Reading the power limit", "nvmlDeviceGetPowerManagementLimit")
        default_mw = self._optional("Reading the default power limit", "nvmlDeviceGetPowerManagementDefaultLimit")
        if limit_mw is not None and default_mw is not None and limit_mw < default_mw:
            found.append(
                f"its power limit is {limit_mw / 1e3:.0f} W of {default_mw / 1e3:.0f} W: plans are made for that limit "
                f"and hold as long as it stays. `nvidia-smi -i {self.index} -pl {default_mw / 1e3:.0f}` resets it."
            )
        if profiles := self._power_profiles():
            found.append(
                f"its power profile is {', '.join(profiles)}: default clocks and powers are those of that profile, and "
                "plans hold as long as it stays. `nvidia-smi power-profiles --help` says how to clear it."
            )
        return found

    def _power_profiles(self) -> list[str]:
        """Return the workload power profiles in force, by NVML's names; none where the GPU has no such profiles."""
        kind = getattr(pynvml, "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t", None)
        if kind is None:  # an older binding
            return []
        current = kind()
        try:
            get = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"
            self._ask("Reading the power profiles", get, ctypes.byref(current))
        except GpuError:
            return []
        words = enumerate(current.enforcedProfilesMask.mask)
        numbers = [32 * place + bit for place, word in words for bit in range(32) if word >> bit & 1]
        return [_POWER_PROFILES.get(number, f"number {number}") for number in numbers]

    def _optional(self, what: str, function: str, *arguments: int) -> int | None:
        """Return a setting; None where the GPU or its driver does not have it."""
        try:
            return int(self._ask(what, function, *arguments))
        except GpuError:
            return None

    def close(self) -> None:
        """Release the driver. The clock stays as it is."""
        if self._open:
            self._open = False
            call("Closing NVML", "nvmlShutdown")
