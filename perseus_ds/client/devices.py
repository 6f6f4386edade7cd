"""Finds and leases the GPU that a rank computes on, and selects the timers of its operations."""

from __future__ import annotations

import logging
import os
import time
from typing import Literal, Protocol

import torch

from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.lease import Lease, SharedMemory
from perseus_ds.client.marks import marks_of
from perseus_ds.client.operations import Work
from perseus_ds.client.timers import CudaExecution, Execution, HostExecution
from perseus_ds.config import PerseusConfig
from perseus_ds.errors import ConfigError, GpuError
from perseus_ds.protocol import places
from perseus_ds.protocol.job_messages import GpuFacts
from perseus_ds.protocol.messages import FindGpu
from perseus_ds.simulation.gpu import SimulatedGpu
from perseus_ds.simulation.work import SimulatedWork

logger = logging.getLogger("perseus_ds")
_LOG_BYTES = 2**15
# Environment variables that hide or renumber GPUs.
_RENUMBERING = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
)  # fmt: skip


class RankGpu(Protocol):
    """The GPU on which this rank computes. Only its agent calls its driver."""

    @property
    def facts(self) -> GpuFacts:
        """Facts about the GPU, which the server of the job receives."""

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Return the SM clocks that can be locked, ascending [MHz]. Raises a ``GpuError`` if the driver lists none."""

    def check_lock_permission(self) -> None:
        """Check that clocks may be locked.

        Raises:
            GpuPermissionError: They may not. The message gives a remedy.
            GpuError: The driver refused.
        """

    def close(self) -> None:
        """End the lease, if there is one."""

    def take_lease(self) -> Lease:
        """Return the lease of the GPU, which is requested if there is none yet. Raises a ``GpuError``."""

    def say_notices(self, rank: int, config: PerseusConfig) -> None:
        """Print what users should know about the GPU."""

    def work(self, config: PerseusConfig) -> Work | None:
        """Return what makes operations take longer than on the host. None on a real GPU."""

    def compute(self, device: torch.device, seconds: float) -> None:
        """Keep the GPU busy for some time [s]."""


class LeasedGpu:
    """A GPU as the agent described it when it granted the lease."""

    def __init__(self, place: FindGpu, device: torch.device, *, checks_permission: bool) -> None:
        """Request a lease of the GPU of a device. ``checks_permission`` resets its clock. Raises a ``GpuError``."""

        def keep_busy(seconds: float) -> None:
            try:
                self.compute(device, seconds)
            except Exception:  # for example no memory: a lock that the check removes is not noticed
                time.sleep(seconds)

        # A clock that a site has locked shows only while the GPU is busy.
        self.lease = Lease(
            place, checks_permission=checks_permission, keep_busy=keep_busy if checks_permission else None
        )
        assert self.lease.description is not None
        self._known = self.lease.description
        self.facts = self._known.facts

    def __str__(self) -> str:
        return self._known.text

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        if self._known.clocks_fault is not None:
            raise self._known.clocks_fault.error()
        return self._known.clocks_mhz

    def check_lock_permission(self) -> None:
        if self._known.permission_fault is not None:
            raise self._known.permission_fault.error()

    def close(self) -> None:
        self.lease.close()

    def take_lease(self) -> Lease:
        return self.lease

    def say_notices(self, rank: int, config: PerseusConfig) -> None:
        for notice in self._known.notices:
            logger.warning("perseus: rank %d, %s: %s", rank, self, notice)
        settings = self.facts.settings
        if settings is not None and settings["whole_module"] is not False:
            is_known = settings["whole_module"] is not None
            logger.warning(
                "perseus: rank %d, %s: %s the whole module, and not only this GPU, and so do all energies and savings.",
                rank,
                self,
                "its energy counter covers" if is_known else "it is not known whether its energy counter covers",
            )

    def work(self, config: PerseusConfig) -> None:
        """Return None, because operations take the time that the GPU needs."""

    def compute(self, device: torch.device, seconds: float) -> None:
        if device.type != "cuda":
            time.sleep(seconds)
            return
        matrix = torch.ones(4096, 4096, dtype=torch.float16, device=device)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for _ in range(10):
                matrix @ matrix
            torch.cuda.synchronize(device)


class SimulatedGpuOfRank(SimulatedGpu):
    """A simulated GPU on which this rank computes. The agent reads its logs."""

    files: tuple[int, ...] = ()
    """File descriptors of the memory of its logs."""

    def take_lease(self) -> Lease:
        assert self.address is not None, "its logs are shared"
        return Lease(self.address, files=self.files)

    def say_notices(self, rank: int, config: PerseusConfig) -> None:
        if config.device == "auto" and rank == 0:
            logger.warning(
                "perseus: no GPU, so GPUs are SIMULATED (%s): training is real, times and energies are not. "
                'Set "device": "simulated" to hide this notice.',
                config.simulated.gpu,
            )

    def work(self, config: PerseusConfig) -> SimulatedWork:
        """Return what makes operations take the time that this GPU needs."""
        return SimulatedWork(self, transfer_s=config.simulated.transfer_s, tail_s=config.simulated.tail_s)


def open_gpu_of_rank(config: PerseusConfig, device: torch.device, *, rank: int, local_rank: int) -> RankGpu:
    """Lease the GPU that a rank computes on, or open the simulated one that the config requests.

    Args:
        config: The ``perseus`` block.
        device: Device of the rank's tensors.
        rank: Global rank.
        local_rank: Rank on this node. Selects the GPU if the device does not.

    Raises:
        ConfigError: Tensors on this device need a GPU that Perseus does not support.
        GpuError: There is no such GPU, its driver is missing, or another job uses it.
    """
    gpu = gpu_of(config, device, rank=rank, local_rank=local_rank)
    gpu.say_notices(rank, config)
    return gpu


def clocks_of(lease: Lease, device: torch.device) -> AgentClocks:
    """Return the clocks of the GPU of a lease.

    Raises:
        GpuError: The GPU cannot write marks. The lease has ended.
    """
    try:
        marks = marks_of(device, lease.shared, lease.memory)
    except GpuError:
        lease.close()
        raise
    return AgentClocks(lease, lease.memory, marks)


def execution_on(device: torch.device) -> Execution:
    """Return the timers of operations on a device."""
    return CudaExecution(device) if device.type == "cuda" else HostExecution()


def gpu_of(config: PerseusConfig, device: torch.device, *, rank: int, local_rank: int) -> RankGpu:
    """Return the same GPU as :func:`open_gpu_of_rank`, without warnings about it."""
    kind = config.device
    if kind == "auto":
        if device.type not in ("cuda", "cpu"):
            raise ConfigError(
                f"perseus.device: \"auto\" knows NVIDIA's and AMD's GPUs, and this job computes on {device.type!r}. "
                'Set "enabled": false to train without Perseus, or "device": "simulated" to try it with simulated '
                "GPUs, which makes every pass as long as theirs."
            )
        kind = "simulated" if device.type == "cpu" else "nvml" if torch.version.hip is None else "zeus"
    if kind != "simulated":
        return LeasedGpu(place_of(kind, device, local_rank), device, checks_permission=config.mode != "observe")
    settings = config.simulated.model_dump(exclude={"longest_instruction_s", "flops_per_s", "transfer_s", "tail_s"})
    work, clock = (SharedMemory(_LOG_BYTES, f"perseus-ds-{log}") for log in ("work", "clock"))
    gpu = SimulatedGpuOfRank.shared(work.view, clock.view, seed=rank, **settings)
    gpu.files = work.file, clock.file
    gpu.address = f"{gpu.address}#{os.getpid()}.{work.file}"  # another one may have the same settings
    return gpu


def place_of(kind: Literal["nvml", "zeus"], device: torch.device, local_rank: int) -> FindGpu:
    """Return the identifiers by which another process finds the GPU of a rank."""
    variables = {name: os.environ[name] for name in _RENUMBERING if name in os.environ}
    ordinal, uuid, pci_address = max(0, local_rank), None, None
    if device.type == "cuda":
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        known = torch.cuda.get_device_properties(ordinal)
        # HIP and amdsmi write UUIDs differently.
        uuid = None if torch.version.hip else str(getattr(known, "uuid", "")) or None
        domain, bus, slot = (getattr(known, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
        if domain is not None and bus is not None and slot is not None:
            pci_address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return FindGpu(kind, ordinal, uuid, pci_address, variables, places.cgroups())


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the peak memory of this process's tensors on its GPU. None if they are not on a GPU."""
    if device.type != "cuda":
        return None
    # Several times faster than max_memory_allocated(), which sorts all statistics by name.
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    return int(statistics["allocated_bytes"]["all"]["peak"]) if statistics else 0
