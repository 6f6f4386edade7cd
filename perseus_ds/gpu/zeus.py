"""GPUs through Zeus's device layer: AMD GPUs, and clocks without privileges by the daemon zeusd.

The package ``zeus`` is optional (``pip install perseus-ds[zeus]``). If ``ZEUSD_SOCK_PATH`` or ``ZEUSD_HOST_PORT`` is
set, Zeus sends clock changes to zeusd. Otherwise it calls the driver itself. Readings need no privilege, so NVIDIA
GPUs are read through NVML, which offers more readings than Zeus.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.gpu.base import Gpu, GpuState
from perseus_ds.gpu.nvml import NvmlGpu, gpu_count, index_of_cuda_device, index_of_uuid
from perseus_ds.gpu.selection import NodeGpu, amd_gpu, by_pci_address, pci_numbers

_TWO_DIES = "MI250"
_AMD_STEP_MHZ = 25
"""AMD accepts any clock in a range. This step gives about the number of clocks that NVIDIA GPUs have."""


@contextmanager
def _zeus_errors(what: str) -> Iterator[None]:
    """Convert errors of Zeus and of its connection to zeusd to :class:`GpuError`."""
    try:
        from httpx import HTTPError
        from zeus.device.gpu.common import ZeusGPUNoPermissionError
        from zeus.exception import ZeusBaseError
        from zeus.utils.zeusd import ZeusdConnectionError
    except ImportError as error:
        raise GpuError(f'"device": "zeus" needs the package zeus ({error}). pip install "perseus-ds[zeus]"') from error
    try:
        yield
    except ZeusGPUNoPermissionError as error:
        raise GpuPermissionError(
            f"{what} failed: {error}. Run zeusd on this node and set ZEUSD_SOCK_PATH to its socket, or run as root."
        ) from error
    except (ZeusBaseError, HTTPError, OSError) as error:
        is_connection = isinstance(error, (ZeusdConnectionError, HTTPError, OSError))
        kind = GpuBusyError if is_connection else GpuError  # zeusd may be restarting
        raise kind(f"{what} failed: {error}. Check that zeusd runs and that ZEUSD_SOCK_PATH is its socket.") from error


def open_zeus_gpu(ordinal: int, uuid: str | None, pci_address: str | None, environment: Mapping[str, str]) -> Gpu:
    """Open the GPU that CUDA or HIP calls ``ordinal`` in a process with an environment.

    CUDA reports the UUID of an NVIDIA GPU, and HIP the PCI address of an AMD GPU, unless it is too old. If the match is
    not certain, a :class:`GpuError` is raised.
    """
    with _zeus_errors("Looking for GPUs through Zeus"):
        from zeus.device.gpu.amd import amdsmi_is_available
        from zeus.device.gpu.nvidia import nvml_is_available

        is_nvidia = nvml_is_available()
        is_amd = not is_nvidia and amdsmi_is_available()
    if is_nvidia:
        return ZeusNvidiaGpu(index_of_cuda_device(ordinal, uuid, environment))
    if is_amd:
        gpus = _amd_gpus()
        return ZeusAmdGpu(amd_gpu(ordinal, environment, gpus, pci_address), gpus)
    raise GpuError("Zeus finds neither NVIDIA nor AMD GPUs. Check nvidia-smi or amd-smi.")


def open_address(identity: str) -> Gpu:
    """Open a GPU by the part of its address after ``zeus:``, in a process that sees all GPUs of the node."""
    if identity.startswith("GPU-"):
        return ZeusNvidiaGpu(index_of_uuid(identity))
    gpus = _amd_gpus()
    return ZeusAmdGpu(by_pci_address(identity, gpus), gpus)


class ZeusNvidiaGpu(NvmlGpu):
    """An NVIDIA GPU that is read through NVML and locked through Zeus."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        try:
            with _zeus_errors(f"Opening {self} through Zeus"):
                from zeus.device.gpu.nvidia import NVIDIAGPU
                from zeus.utils.zeusd import ZeusdClient, ZeusdConfig, require_capabilities

                self._setter: Any
                self._gpus: tuple[list[int], ...] = ()
                if (config := ZeusdConfig.from_env()) is None:
                    # Zeus's own list of GPUs does not read UUIDs in CUDA_VISIBLE_DEVICES.
                    self._setter = NVIDIAGPU(index)
                else:
                    self._setter = ZeusdClient(config)
                    require_capabilities(self._setter, control_gpu=True)
                    with config.make_client() as http:  # Zeus's own client drops fields that it does not know
                        known = http.get(config.url("/discover")).json()["gpus"]
                    self._gpus = ([_number_of(self, known)],)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"zeus:{self.uuid}"

    def lock_clock(self, clock_mhz: int) -> None:
        self._check_clock(clock_mhz)
        with _zeus_errors(f"Locking {clock_mhz} MHz as the clock of {self}"):
            self._setter.set_gpu_locked_clocks(*self._gpus, clock_mhz, clock_mhz)

    def reset_clock(self) -> None:
        with _zeus_errors(f"Resetting the clock of {self}"):
            self._setter.reset_gpu_locked_clocks(*self._gpus)

    def check_lock_permission(self) -> None:
        self.reset_clock()


def _number_of(gpu: NvmlGpu, known: Sequence[Mapping[str, Any]]) -> int:
    """Return the number that zeusd gives a GPU. Raises a ``GpuError`` if it cannot be identified.

    In a container or a job that has only some GPUs of the node, NVML numbers these from 0, so NVML's index may differ.
    """
    for each in known:
        address = each.get("pci_address")
        if each.get("uuid") == gpu.uuid or (address and pci_numbers(address) == pci_numbers(gpu.pci_address)):
            return int(each["id"])
    has_addresses = any(each.get("uuid") or each.get("pci_address") for each in known)
    # An old zeusd reports neither and uses NVML's indices, which are the same here if this process sees all GPUs.
    if not has_addresses and len(known) == gpu_count():
        return gpu.index
    why = (
        "none of them has its address"
        if has_addresses
        else "zeusd reports no addresses, and this process does not see all GPUs"
    )
    raise GpuError(
        f"{gpu} at {gpu.pci_address} cannot be found among the {len(known)} GPUs of zeusd: {why}. Perseus could change "
        "clocks of other jobs' GPUs. Update zeusd to a version that reports PCI addresses, or give the job all GPUs of "
        "the node."
    )


def _amd_gpus() -> list[NodeGpu]:
    """Return the AMD GPUs of the node in HIP's order."""
    with _zeus_errors("Listing AMD GPUs"):
        import amdsmi

        gpus = []
        for handle in amdsmi.amdsmi_get_processor_handles():
            known = amdsmi.amdsmi_get_gpu_enumeration_info(handle)
            address = amdsmi.amdsmi_get_gpu_device_bdf(handle)
            gpus.append(NodeGpu(int(known["hip_id"]), str(known["hip_uuid"]), str(address)))
    return sorted(gpus, key=lambda gpu: gpu.number)


@contextmanager
def _shown_to_zeus(gpu: NodeGpu) -> Iterator[None]:
    """Make one GPU visible to Zeus, which reads only HIP_VISIBLE_DEVICES and only numbers in it."""
    before = os.environ.get("HIP_VISIBLE_DEVICES")
    os.environ["HIP_VISIBLE_DEVICES"] = str(gpu.number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["HIP_VISIBLE_DEVICES"]
        else:
            os.environ["HIP_VISIBLE_DEVICES"] = before


class ZeusAmdGpu:
    """An AMD GPU, which accepts any clock in a range. Not yet tried on a real AMD GPU.

    The two dies of an MI250 or MI250X are two GPUs. The driver reports the power of both as that of the even one.

    Attributes:
        counter: Address of the GPU with the counter that includes the energy of this one. Empty if it has its own.
    """

    simulated = False
    driver: str | None = None

    def __init__(self, gpu: NodeGpu, gpus: Sequence[NodeGpu]) -> None:
        """Open one of the GPUs of the node, given in HIP's order."""
        self._gpu = gpu
        self._managers: list[Any] = []
        with _zeus_errors(f"Opening GPU {gpu.number} through Zeus"):
            self._zeus = self._counted = self._opened(gpu)
            self.name = str(self._zeus.get_name())
            fastest_mhz, slowest_mhz = self._zeus.get_supported_graphics_clocks()
            self.counter = ""
            if _TWO_DIES in self.name:
                even = next((each for each in gpus if each.number == gpu.number - gpu.number % 2), gpu)
                if even != gpu and not self._zeus.supports_get_total_energy_consumption():
                    self._counted = self._opened(even)
                self.counter = f"zeus:{even.pci_address}"
        self._clocks_mhz = tuple(reversed(range(int(fastest_mhz), int(slowest_mhz) - 1, -_AMD_STEP_MHZ)))

    def _opened(self, gpu: NodeGpu) -> Any:
        """Open a GPU in Zeus. Its manager is kept, because it shuts the driver's library down when it is deleted."""
        with _shown_to_zeus(gpu):
            from zeus.device.gpu.amd import AMDGPUs

            manager = AMDGPUs()
        self._managers.append(manager)
        (opened,) = manager.gpus
        return opened

    @property
    def address(self) -> str:
        return f"zeus:{self._gpu.pci_address}"

    @property
    def settings(self) -> dict[str, Any] | None:
        """Only whether energies are those of both dies. The driver reports no other setting."""
        return {"whole_module": True} if self.counter else None

    def __str__(self) -> str:
        return f"GPU {self._gpu.number} ({self.name})"

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        return self._clocks_mhz

    def lock_clock(self, clock_mhz: int) -> None:
        if clock_mhz not in self._clocks_mhz:
            raise GpuError(
                f"Locking the clock of {self} failed: {clock_mhz} MHz is not one of its clocks. Expected one from "
                f"{self._clocks_mhz[0]} to {self._clocks_mhz[-1]} MHz in steps of {_AMD_STEP_MHZ}."
            )
        with _zeus_errors(f"Locking {clock_mhz} MHz as the clock of {self}"):
            self._zeus.set_gpu_locked_clocks(clock_mhz, clock_mhz)

    def reset_clock(self) -> None:
        # Zeus after 0.16 has another method, which resets memory clocks too, and refuses the old one for AMD.
        reset = getattr(self._zeus, "reset_locked_clocks", None) or self._zeus.reset_gpu_locked_clocks
        with _zeus_errors(f"Resetting the clock of {self}"):
            reset()

    def check_lock_permission(self) -> None:
        self.reset_clock()

    def clock_mhz(self) -> int:
        with _zeus_errors(f"Reading the clock of {self}"):
            import amdsmi

            clock_mhz = amdsmi.amdsmi_get_clock_info(self._zeus.handle, amdsmi.AmdSmiClkType.GFX)["clk"]
        if not isinstance(clock_mhz, int):  # "N/A"
            raise GpuError(f"Reading the clock of {self} failed: the driver reports {clock_mhz!r}.")
        return clock_mhz

    def throttle_reasons(self) -> tuple[str, ...]:
        return ()

    def power_limit_w(self) -> None:
        """Return None, because Zeus does not report it."""

    @property
    def has_energy_counter(self) -> bool:
        """True if Zeus has found that the energy counter agrees with the power readings."""
        return bool(self._counted.supports_get_total_energy_consumption())

    def energy_j(self) -> float:
        with _zeus_errors(f"Reading the energy counter of {self}"):
            return float(self._counted.get_total_energy_consumption()) / 1e3

    def power_w(self) -> float:
        with _zeus_errors(f"Reading the power of {self}"):
            from zeus.device.gpu.common import ZeusGPUNotSupportedError

            try:
                return float(self._counted.get_instant_power_usage()) / 1e3
            except ZeusGPUNotSupportedError:  # MI210 reports only an average
                return float(self._counted.get_average_power_usage()) / 1e3

    @property
    def state(self) -> GpuState:
        return GpuState()

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
