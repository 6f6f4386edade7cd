"""NVIDIA GPUs through NVML.

Only this module uses ``pynvml``, which the package ``nvidia-ml-py`` provides.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import pynvml

from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.gpu.base import GpuState
from perseus_ds.gpu.selection import NodeGpu, by_uuid, nvidia_gpu
from perseus_ds.timebase import REAL_TIME, Timebase

_ANOTHER_DEVICE = 'or set "device": "simulated" in the perseus block.'
_REMEDIES = {
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "Changing clocks needs root or CAP_SYS_ADMIN: run as root, add `--cap-add SYS_ADMIN` to docker run, "
        'or run the zeusd daemon and set "device": "zeus".'
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 was not found: install the NVIDIA driver, start the container with `--gpus all`, "
        + _ANOTHER_DEVICE
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "The NVIDIA kernel driver is not loaded: check `nvidia-smi` and `dmesg`, " + _ANOTHER_DEVICE
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "NVML and the loaded kernel driver are of different versions: reboot, or reload the driver after its update."
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "The GPU fell off the bus: look for `Xid` in dmesg, then reset the GPU or reboot the node."
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: "The GPU must be reset before it is usable: `nvidia-smi --gpu-reset` as root.",
    pynvml.NVML_ERROR_TIMEOUT: "The driver did not answer in time: check `nvidia-smi` and dmesg, then try again.",
    pynvml.NVML_ERROR_NOT_SUPPORTED: (
        "This GPU or its driver lacks the function, as many vGPUs and GPUs before Volta do: use another GPU, "
        + _ANOTHER_DEVICE
    ),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "The driver is too old to have the function: update the NVIDIA driver.",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: (
        "There is no such GPU or value: `nvidia-smi -L` lists the GPUs, `nvidia-smi -q -d SUPPORTED_CLOCKS` clocks."
    ),
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "The operating system blocked the request: check cgroups, seccomp and SELinux.",
}
_KINDS = {
    pynvml.NVML_ERROR_NO_PERMISSION: GpuPermissionError,
    pynvml.NVML_ERROR_TIMEOUT: GpuBusyError,
    pynvml.NVML_ERROR_IN_USE: GpuBusyError,
    pynvml.NVML_ERROR_MEMORY: GpuBusyError,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: GpuBusyError,
}
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
_POWERS = ("NVML_FI_DEV_POWER_INSTANT", "NVML_FI_DEV_POWER_AVERAGE")
_POWER_LIMIT = "NVML_FI_DEV_POWER_CURRENT_LIMIT"
_GPU, _MODULE = getattr(pynvml, "NVML_POWER_SCOPE_GPU", 0), getattr(pynvml, "NVML_POWER_SCOPE_MODULE", 1)
_MODULE_WINDOW_S = 1.0
_MODULE_POLL_S = 0.05
_MODULE_ADDS = 1.1
"""Below this ratio of two powers, NVML reports the same power for both."""
_SMOOTHING = (
    "ACTIVE_PRESET_PROFILE",
    "APPLIED_TMP_CEIL",
    "APPLIED_TMP_FLOOR",
    "ADMIN_OVERRIDE_PERCENT_TMP_FLOOR",
    "ADMIN_OVERRIDE_RAMP_UP_RATE",
    "ADMIN_OVERRIDE_RAMP_DOWN_RATE",
    "ADMIN_OVERRIDE_RAMP_DOWN_HYST_VAL",
)
_NOT_SET = 2**31
"""Values from here on, such as all bits set, mean that nothing is set."""
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of NVML's union of field values, indexed by the value type."""
_POWER_PROFILE = "NVML_POWER_PROFILE_"
_POWER_PROFILES = {
    number: name.removeprefix(_POWER_PROFILE)
    for name, number in vars(pynvml).items()
    if name.startswith(_POWER_PROFILE) and name != f"{_POWER_PROFILE}MAX" and "OPERATION" not in name
}


class NvmlGpu:
    """One NVIDIA GPU, with NVML's index, which nvidia-smi uses too.

    NVML and this class are thread-safe. Setting a clock can take tens of milliseconds, and any call can hang if the
    driver hangs. Call it only from threads that may wait.
    """

    simulated = False

    def __init__(self, index: int, timebase: Timebase = REAL_TIME) -> None:
        """Open a GPU by NVML's index. Raises a ``GpuError`` if it is missing or split into MIG devices."""
        self._time = timebase
        self._settings: dict[str, Any] | None = None
        _start_nvml()
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
    def pci_address(self) -> str:
        """PCI address on this machine, such as ``00000000:07:00.0``, also inside a container."""
        bus_id = self._call("Reading the PCI address", "nvmlDeviceGetPciInfo").busId
        return bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)

    @property
    def address(self) -> str:
        return f"nvml:{self.uuid}"

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"

    def _call(self, what: str, function: str, *arguments: Any) -> Any:
        if not self._open:
            raise GpuError(f"{what} of {self} failed: it is closed.")
        return call(f"{what} of {self}", function, self._handle, *arguments)

    def _refuse_mig(self) -> None:
        mode = self._optional("nvmlDeviceGetMigMode")
        if mode is not None and mode[0]:
            raise GpuError(
                f"{self} is split into MIG devices, and a clock change would affect all of them. "
                f'Switch MIG off (`nvidia-smi -i {self.index} -mig 0`) or set "device": "simulated".'
            )

    @cached_property
    def _clocks_mhz(self) -> tuple[int, ...]:
        memory_clocks = self._clocks_listed("memory", "nvmlDeviceGetSupportedMemoryClocks")
        # Training runs at the highest memory clock. The others belong to idle states.
        return tuple(sorted(self._clocks_listed("SM", "nvmlDeviceGetSupportedGraphicsClocks", max(memory_clocks))))

    def _clocks_listed(self, kind: str, function: str, *arguments: int) -> set[int]:
        what = f"Reading the {kind} clocks"
        if clocks := self._call(what, function, *arguments):
            return set(map(int, clocks))
        raise GpuError(f"{what} of {self} failed: the driver lists no clocks. Use another GPU.")

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        return self._clocks_mhz

    def _check_clock(self, clock_mhz: int) -> None:
        if clock_mhz not in self._clocks_mhz:
            nearest = min(self._clocks_mhz, key=lambda clock: abs(clock - clock_mhz))
            raise GpuError(
                f"Locking the clock of {self} failed: {clock_mhz} MHz is not supported. The nearest is {nearest} MHz."
            )

    def lock_clock(self, clock_mhz: int) -> None:
        self._check_clock(clock_mhz)
        self._call(f"Locking {clock_mhz} MHz as the clock", "nvmlDeviceSetGpuLockedClocks", clock_mhz, clock_mhz)

    def reset_clock(self) -> None:
        self._call("Resetting the clock", "nvmlDeviceResetGpuLockedClocks")

    def check_lock_permission(self) -> None:
        """Check that this process may lock clocks, by resetting the clock.

        A reset needs the same permission as a lock and has no effect if no clock is locked. A lock that an
        administrator has set (``nvidia-smi -lgc``) is removed, as it would be at the end of a run.
        """
        self._call("Checking the permission to lock the clock", "nvmlDeviceResetGpuLockedClocks")

    def clock_mhz(self) -> int:
        return int(self._call("Reading the SM clock", "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM))

    @cached_property
    def has_energy_counter(self) -> bool:
        """True if the GPU has an energy counter. Volta and later do, many vGPUs do not."""
        try:
            self.energy_j()
        except GpuError as error:
            cause = error.__cause__
            if isinstance(cause, pynvml.NVMLError) and cause.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise
        return True

    def energy_j(self) -> float:
        """Return the energy used since the driver was loaded [J], which is refreshed about every 100 ms."""
        return float(self._call("Reading the energy counter", "nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def power_w(self) -> float:
        """Return the current power [W], an average over about a second if the driver reports no instant power.

        It is that of the whole module if the driver does not report the power of the GPU alone.
        """
        power_w = self._power_w(_GPU)
        if power_w is None:
            power_w = self._call("Reading the power", "nvmlDeviceGetPowerUsage") / 1e3
        return power_w

    def _power_w(self, scope: int) -> float | None:
        """Return the power of the GPU or of its module [W]. None if the driver does not report it for this scope."""
        powers_mw = (self._field(name, scope) for name in _POWERS)
        power_mw = next((power_mw for power_mw in powers_mw if power_mw is not None), None)
        return None if power_mw is None else power_mw / 1e3

    @cached_property
    def _has_processor(self) -> bool:
        """True if a processor is on the same module, as on GH200, GB200 and GB300: NVLink-C2C connects them."""
        link = self._optional("nvmlDeviceGetC2cModeInfoV")
        return link is not None and bool(link.isC2cEnabled)

    @cached_property
    def _is_part_of_module(self) -> bool:
        return self._has_processor or self._power_w(_MODULE) is not None

    def throttle_reasons(self) -> tuple[str, ...]:
        mask = self._optional("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:  # drivers before 535 have only the old name
            mask = self._call("Reading the throttle reasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        return tuple(name for bit, name in _THROTTLE_REASONS.items() if mask & bit)

    def power_limit_w(self) -> float | None:
        # Without a scope, it may be the limit of the module.
        limit_mw = self._field(_POWER_LIMIT, _GPU) if self._is_part_of_module else None
        if limit_mw is None:
            limit_mw = self._optional("nvmlDeviceGetEnforcedPowerLimit")
        if limit_mw is None:
            limit_mw = self._optional("nvmlDeviceGetPowerManagementLimit")
        return None if limit_mw is None else limit_mw / 1e3

    @property
    def state(self) -> GpuState:
        temperature_c = self._optional("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        state = self._optional("nvmlDeviceGetPerformanceState")
        return GpuState(
            temperature_c=None if temperature_c is None else float(temperature_c),
            power_state=None if state is None else f"P{state}",
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, of which the first reading takes a second if the GPU is a part of a module."""
        # No ``cached_property``: until Python 3.12 all GPUs of a process share its lock.
        if self._settings is None:
            limit_w = self.power_limit_w()
            clock_mhz = self._optional("nvmlDeviceGetApplicationsClock", pynvml.NVML_CLOCK_SM)
            self._settings = {
                "power_limit_w": None if limit_w is None else round(limit_w),
                "application_clock_mhz": clock_mhz or None,
                "memory_clock_mhz": self._memory_clock_mhz(),
                "power_profiles": self._power_profiles(),
                "power_smoothing": self._power_smoothing(),
                "whole_module": self._counts_whole_module(),
            }
        return self._settings

    @property
    def administrator_settings(self) -> list[str]:
        """Settings by an administrator that change default clocks or power, one sentence for each.

        NVML does not report a locked clock (:mod:`perseus_ds.agent.site_lock`).
        """
        found, settings = [], self.settings
        top_mhz = 0
        with suppress(GpuError):  # a GPU that lists no clocks can still be observed
            top_mhz = self._clocks_mhz[-1]
        application_mhz = settings["application_clock_mhz"]
        usual_mhz = self._optional("nvmlDeviceGetDefaultApplicationsClock", pynvml.NVML_CLOCK_SM)
        # Some GPUs have a default application clock below the highest, and exceed it unless another one is set.
        if application_mhz is not None and application_mhz < top_mhz and application_mhz != usual_mhz:
            found.append(
                f"its application clock is {application_mhz} MHz of {top_mhz}: default clocks do not exceed it, but "
                f"clocks locked by Perseus may. `nvidia-smi -i {self.index} -rac` resets it."
            )
        memory_mhz, fastest_mhz = settings["memory_clock_mhz"], 0
        with suppress(GpuError):
            fastest_mhz = max(self._clocks_listed("memory", "nvmlDeviceGetSupportedMemoryClocks"))
        if memory_mhz is not None and memory_mhz < fastest_mhz:
            found.append(
                f"its memory clock is {memory_mhz} MHz of {fastest_mhz}: plans are valid only for this memory clock. "
                f"`nvidia-smi -i {self.index} -rmc` resets it."
            )
        default_mw = self._optional("nvmlDeviceGetPowerManagementDefaultLimit")
        limit_w, default_w = settings["power_limit_w"], None if default_mw is None else round(default_mw / 1e3)
        if limit_w is not None and default_w is not None and limit_w < default_w:
            found.append(
                f"its power limit is {limit_w:g} W of {default_w} W: plans are computed for this limit, and again if "
                f"it is lowered. `nvidia-smi -i {self.index} -pl {default_w}` resets it, unless it was set from "
                "outside the node."
            )
        if settings["power_profiles"]:
            found.append(
                f"its power profile is {', '.join(settings['power_profiles'])}: default clocks and power depend on it, "
                "and plans are valid only while it is set. `nvidia-smi power-profiles --help` shows how to clear it."
            )
        if settings["power_smoothing"]:
            values = ", ".join(f"{name} {value}" for name, value in settings["power_smoothing"].items())
            found.append(
                f"power smoothing is on ({values}): a waiting GPU draws more power, and plans are valid only while it "
                "is on. `nvidia-smi power-smoothing --help` describes how to switch it off."
            )
        return found

    def _memory_clock_mhz(self) -> int | None:
        """Return the memory clock, which may be locked [MHz]. None if unknown, or if the idle GPU has lowered it."""
        state = self._optional("nvmlDeviceGetPerformanceState")
        if state:  # not P0
            return None
        clock_mhz = self._optional("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM)
        return None if clock_mhz is None else int(clock_mhz)

    def _power_profiles(self) -> list[str]:
        """Return NVML's names of the workload power profiles in force."""
        kind = getattr(pynvml, "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t", None)
        if kind is None:  # an older binding
            return []
        current = kind()
        self._optional("nvmlDeviceWorkloadPowerProfileGetCurrentProfiles", ctypes.byref(current))
        words = enumerate(current.enforcedProfilesMask.mask)
        numbers = [32 * place + bit for place, word in words for bit in range(32) if word >> bit & 1]
        return [_POWER_PROFILES.get(number, f"number {number}") for number in numbers]

    def _power_smoothing(self) -> dict[str, int]:
        """Return the settings of power smoothing by NVML's names. Empty if it is off or not supported."""
        if not self._field("NVML_FI_PWR_SMOOTHING_ENABLED"):
            return {}
        read = {name: self._field(f"NVML_FI_PWR_SMOOTHING_{name}") for name in _SMOOTHING}
        return {name.lower(): value for name, value in read.items() if value is not None and 0 <= value < _NOT_SET}

    def _counts_whole_module(self) -> bool | None:
        """Return whether energies are those of the whole module instead of the GPU in it. None if it is not known.

        If a GPU is part of a module, NVML reports the power of one or both, but the energy of only one of them.
        """
        if not self._is_part_of_module:
            return False
        if not self.has_energy_counter:  # energies are integrated from the power
            return self._power_w(_GPU) is None
        if self._power_w(_MODULE) is None:
            return None
        begin_s, begin_j = self._time.now_s(), self.energy_j()
        gpu_w, module_w = [], []
        while (passed_s := self._time.now_s() - begin_s) < _MODULE_WINDOW_S:
            gpu_w.append(self._power_w(_GPU))
            module_w.append(self._power_w(_MODULE) or 0.0)
            self._time.sleep(_MODULE_POLL_S)
        counted_w = (self.energy_j() - begin_j) / passed_s
        whole_w = statistics.fmean(module_w)
        known_w = [power_w for power_w in gpu_w if power_w is not None]
        if not known_w:
            return counted_w > whole_w / _MODULE_ADDS
        alone_w = statistics.fmean(known_w)
        if whole_w > _MODULE_ADDS * alone_w:
            return counted_w > (alone_w + whole_w) / 2
        # Boards without a processor report the power of the GPU for both.
        return None if self._has_processor else False

    def _field(self, name: str, scope: int = _GPU) -> int | None:
        """Return a field value of NVML. None if the GPU, its driver or the binding does not support it."""
        number = getattr(pynvml, name, None)
        values = None if number is None else self._optional("nvmlDeviceGetFieldValues", [(number, scope)])
        if values is None or values[0].nvmlReturn:
            return None
        return int(getattr(values[0].value, _VALUE_TYPES[values[0].valueType]))

    def _optional(self, function: str, *arguments: Any) -> Any:
        """Return the result of a function. None if the GPU or its driver does not support it."""
        try:
            return self._call("Reading", function, *arguments)
        except (GpuError, AttributeError):  # an older binding lacks the function
            return None

    def close(self) -> None:
        if self._open:
            self._open = False
            call("Closing NVML", "nvmlShutdown")


def call(what: str, function: str, *arguments: Any) -> Any:
    """Call a function of pynvml. ``what`` begins the message of its :class:`GpuError`, such as ``Opening GPU 0``."""
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        kind = _KINDS.get(error.value, GpuError)
        remedy = _REMEDIES.get(error.value, "Check `nvidia-smi` and dmesg.")
        raise kind(f"{what} failed: {function} says {str(error)!r} (code {error.value}). {remedy}") from error


def _start_nvml() -> None:
    """Start NVML. Each call must be followed by an ``nvmlShutdown`` later, because NVML counts its users."""
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):  # the unofficial package pynvml before version 12
        raise GpuError(
            f"The module pynvml at {getattr(pynvml, '__file__', '?')} is not NVIDIA's binding. "
            f"Run `pip uninstall pynvml` and then `pip install --force-reinstall nvidia-ml-py`."
        )
    call("Starting NVML", "nvmlInit")


@contextmanager
def _nvml() -> Iterator[None]:
    """Start NVML and stop it afterwards, unless a GPU is open."""
    _start_nvml()
    try:
        yield
    finally:
        call("Closing NVML", "nvmlShutdown")


def gpu_count() -> int:
    """Return the number of GPUs of this node, including those hidden from CUDA."""
    with _nvml():
        return int(call("Counting the GPUs", "nvmlDeviceGetCount"))


def index_of_uuid(uuid: str) -> int:
    """Return the index of a GPU by its full or abbreviated UUID, which one GPU must have."""
    return by_uuid(uuid, _node_gpus()).number


def index_of_cuda_device(cuda_index: int, uuid: str | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Return the index of CUDA's GPU ``cuda_index``. Raises a ``GpuError`` if it is not certain which.

    ``uuid`` is the one that CUDA reports (``torch.cuda.get_device_properties(i).uuid``), if any. ``environment`` has
    the process's variables, by default those of this one.
    """
    return nvidia_gpu(cuda_index, os.environ if environment is None else environment, _node_gpus(), uuid).number


def _node_gpus() -> list[NodeGpu]:
    """Return the GPUs that NVML lists, including lost ones."""

    def identify(index: int) -> NodeGpu:
        try:
            handle = call(f"Opening GPU {index}", "nvmlDeviceGetHandleByIndex", index)
            uuid = str(call(f"Reading the UUID of GPU {index}", "nvmlDeviceGetUUID", handle))
            return NodeGpu(index, uuid, "", str(call(f"Reading the name of GPU {index}", "nvmlDeviceGetName", handle)))
        except GpuError as error:
            return NodeGpu(index, "", "", f"one that NVML cannot open: {error}")

    with _nvml():
        return [identify(index) for index in range(gpu_count())]
