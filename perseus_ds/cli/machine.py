"""``perseus-ds reset`` and ``doctor``, for this machine and its GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from perseus_ds.cli.values import OPTIONAL, Texts
from perseus_ds.errors import ConfigError, GpuBusyError, GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

if TYPE_CHECKING:
    from perseus_ds.gpu.nvml import NvmlGpu


@dataclass(frozen=True, kw_only=True)
class ResetCommand:
    """Return GPUs to their default clocks.

    This is necessary if the agent of a node was killed together with its job. GPUs that running jobs of this user
    lease are left alone.
    """

    examples = ("perseus-ds reset", "perseus-ds reset --gpus 0 1")

    gpus: Annotated[Texts, OPTIONAL] = field(default_factory=list)
    """index in nvidia-smi, UUID, or beginning of a UUID; by default all GPUs of this node"""
    force: bool = False
    """also reset GPUs that running jobs lease; these then run at default clocks until their next change"""

    def execute(self) -> int:
        from perseus_ds.client.lease import leases
        from perseus_ds.gpu.nvml import gpu_count, index_of_uuid

        count = gpu_count()
        try:
            indices = [int(gpu) if gpu.isdecimal() else index_of_uuid(gpu) for gpu in self.gpus]
        except GpuError as error:
            raise ConfigError(f"--gpus: {error}") from None
        for index in indices:
            if index >= count:
                raise ConfigError(
                    f"--gpus: there is no GPU {index} on this node, which has {count}; see `nvidia-smi -L`."
                )
        leased = {} if self.force else leases()
        results = [_reset(index, leased, is_named=bool(indices)) for index in indices or range(count)]
        return 0 if all(results) else 2


def _reset(index: int, leased: Mapping[str, tuple[int, tuple[int, ...]]], *, is_named: bool) -> bool:
    """Reset the clock of a GPU that is not leased. Return False if it failed, or if a GPU that was named is leased."""
    from perseus_ds.agent.gpu_records import note_reset
    from perseus_ds.gpu.nvml import NvmlGpu

    try:
        gpu = NvmlGpu(index)
        try:
            if gpu.address in leased:
                _, pids = leased[gpu.address]
                print(
                    f"{gpu}: NOT reset, because a running job leases it (process {', '.join(map(str, pids))}). "
                    "Its agent resets the clock when the job ends. To reset it now, add --force.",
                    file=sys.stderr if is_named else sys.stdout,
                )
                return not is_named
            gpu.reset_clock()
            with suppress(OSError):
                note_reset(gpu.address)
            print(f"{gpu}: clock reset to the driver's default; {gpu.clock_mhz()} MHz now.")
        finally:
            gpu.close()
    except GpuError as error:
        print(f"GPU {index}: NOT reset. {error}", file=sys.stderr)
        return False
    return True


_PACKAGES = ("perseus-ds", "torch", "nvidia-ml-py")
_CAP_SYS_ADMIN = 21
_ALL_UIDS = ["0", "0", "4294967295"]
"""Map of user ids outside of user namespaces."""
_SETTLE_TIMEOUT_S = 1.0
_CLOCKS_TRIED = 5
_POLL_S = 5e-4

# Findings that are relevant for some devices only; all others are relevant for all.
_ONLY_FOR: dict[str, set[str]] = {
    "nvidia-ml-py": {"nvml", "zeus"},
    "NVML": {"nvml", "zeus"},
    "CUDA": {"nvml", "zeus"},
    "zeusd": {"zeus"},
    "lock": {"nvml"},
    "marks": {"nvml", "zeus"},
}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Report on one page whether this machine is ready, and how to solve problems."""

    examples = ("perseus-ds doctor", "perseus-ds doctor --lock", "perseus-ds doctor --device nvml")

    device: Literal["auto", "nvml", "zeus", "simulated"] = "auto"
    """auto: NVML's GPUs, or simulated ones if there are none; nvml: the job changes the clocks itself; zeus: zeusd
    changes the clocks; simulated: no real GPU"""
    lock: bool = False
    """also lock clocks for a moment, to check the permission and measure the latency; a lock that was set before, such
    as by nvidia-smi -lgc, is removed"""

    def execute(self) -> int:
        software = examine_software()
        gpus = [] if self.device == "simulated" else examine_gpus(lock=self.lock)
        device = self.device
        if device == "auto":
            device = "nvml" if _has_gpus([*software, *chain(*gpus)]) else "simulated"
        print(f"perseus-ds on {platform.node() or 'this node'} ({platform.system()} {platform.release()})")
        for findings in [software, *gpus]:
            print()
            for finding in findings:
                level = finding.level if finding.is_relevant(device) or finding.level == "ok" else "info"
                print(f"{level:4}  {finding.what:13} {finding.text}")
                if finding.remedy:
                    print(f"{'':20} -> {finding.remedy}")
        to_solve = _failures(chain(software, *gpus), device)
        if not to_solve:
            print(f"\nThis machine is ready{' for simulated GPUs' if device == 'simulated' else ''}.")
        elif device == "simulated" or _failures(software, "simulated"):
            print(f"\nTo solve: {to_solve}.")
        else:
            print(f"\nThis machine is ready for simulated GPUs; for real ones solve: {to_solve}.")
        return 1 if to_solve else 0


def _has_gpus(findings: Iterable[Finding]) -> bool:
    """Return whether NVML or torch finds a GPU, so that a job on this machine does not simulate them."""
    return any(
        finding.what.startswith("GPU ") or (finding.what, finding.level) == ("CUDA", "ok") for finding in findings
    )


def _failures(findings: Iterable[Finding], device: str) -> str:
    """Return the names of the failures that are relevant for a device, without duplicates."""
    failed = [finding.what for finding in findings if finding.level == "fail" and finding.is_relevant(device)]
    return ", ".join(dict.fromkeys(failed))


class Finding(NamedTuple):
    """One line of the output of ``perseus-ds doctor``.

    The level is ``fail`` if training or changing clocks is impossible, and ``warn`` if results are less accurate or a
    feature is missing.
    """

    level: Literal["ok", "info", "warn", "fail"]
    what: str
    text: str
    remedy: str = ""

    def is_relevant(self, device: str) -> bool:
        """Return whether a job on this device depends on it."""
        return device in _ONLY_FOR.get(self.what, {device})


def examine_software() -> list[Finding]:
    """Examine Python packages, DeepSpeed's compiler, torch's access to CUDA, marks, and zeusd."""
    python = Finding("ok", "Python", platform.python_version())
    examined = (*_guarded("deepspeed", _deepspeed()), *_guarded("torch", _cuda()))
    return [python, *map(_package, _PACKAGES), *examined, _zeusd()]


def _package(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding("fail", name, "not installed", f"pip install {name}")


def _deepspeed() -> Iterator[Finding]:
    """Report the version of DeepSpeed, and the programs with which it compiles its extensions in training."""
    from perseus_ds.engines.deepspeed import REMEDY, deepspeed_problem, deepspeed_version

    version, problem = deepspeed_version(), deepspeed_problem()
    yield Finding("fail", "deepspeed", problem, REMEDY) if problem else Finding("ok", "deepspeed", str(version))
    compiler, *_ = os.environ.get("CXX", "").split() or ["c++"]  # as torch.utils.cpp_extension finds it
    remedies = {
        compiler: "Install a C++ compiler (apt-get install g++), or set CXX to its path.",
        "ninja": "pip install ninja; the folder of the program must be in PATH.",
    }
    for name, remedy in remedies.items() if version is not None else ():
        if (path := shutil.which(name)) is not None:
            yield Finding("ok", "compiler", path)
        else:
            text = f"DeepSpeed compiles extensions with {name}, which is not in PATH"
            yield Finding("fail", "compiler", text, remedy)


def _has_extensions() -> bool:
    """Return whether torch has compiled an extension of DeepSpeed for this user."""
    from torch.utils.cpp_extension import get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return next(folder.rglob("*.so"), None) is not None


def _cuda() -> Iterator[Finding]:
    """Report compiled extensions and GPUs, and have each GPU write a mark into shared memory, as training does."""
    from perseus_ds.client.lease import SharedMemory
    from perseus_ds.protocol.layout import LENGTH, RankMemory

    try:
        import torch

        from perseus_ds.client.marks import marks_of
    except Exception as error:
        yield Finding("fail", "torch", f"cannot be imported: {error}", "Reinstall torch.")
        return
    if not _has_extensions():
        yield Finding(
            "info", "extensions", "none compiled yet: the first job compiles some, for a minute or two, silently"
        )
    count, cuda = torch.cuda.device_count(), torch.version.cuda
    if not torch.cuda.is_available():
        text = f"torch sees no GPU; torch was built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
        yield Finding("warn", "CUDA", text, "Until it does, training runs on the CPU with simulated GPUs.")
        return
    yield Finding("ok", "CUDA", f"torch sees {count} GPUs (CUDA {cuda})")
    for index in range(count):
        shared = SharedMemory(LENGTH)
        try:
            marks_of(torch.device("cuda", index), shared, RankMemory.create(shared.view))
        except GpuError as error:
            remedy = "Without marks no clock can be set in time; jobs in auto mode train without Perseus."
            yield Finding("fail", "marks", f"GPU {index}: {error}", remedy)
        else:
            yield Finding("ok", "marks", f"GPU {index} writes them into shared memory")


def _zeusd() -> Finding:
    path = os.environ.get("ZEUSD_SOCK_PATH")
    if path is None:
        return Finding("info", "zeusd", "ZEUSD_SOCK_PATH is not set; only needed to change clocks without privileges")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
    except OSError as error:
        return Finding("fail", "zeusd", f"{path}: {error.strerror or error}", "Start zeusd, or unset ZEUSD_SOCK_PATH.")
    zeus = _package("zeus")
    if zeus.level == "fail":
        text = f"{path} responds, but the package zeus is missing"
        return Finding("fail", "zeusd", text, "pip install perseus-ds[zeus]")
    return Finding("ok", "zeusd", f'{path} responds; zeus {zeus.text}: "device": "zeus" can be used')


def examine_gpus(*, lock: bool, timebase: Timebase = REAL_TIME) -> list[list[Finding]]:
    """Return the findings on each GPU of this node, or one list with one failure if there is no NVML.

    With ``lock``, clocks are changed to measure their latency.
    """
    from perseus_ds.gpu.nvml import gpu_count

    try:
        count = gpu_count()
    except GpuError as error:
        return [[Finding("fail", "NVML", str(error))]]
    if count == 0:
        remedy = "Check nvidia-smi; in a container, start it with --gpus all."
        return [[Finding("fail", "NVML", "finds no GPU", remedy)]]
    findings: list[list[Finding]] = [[] for _ in range(count)]
    threads = [
        timebase.thread(
            partial(found.extend, _guarded(f"GPU {index}", _examine_gpu(index, lock, timebase))), f"perseus-gpu-{index}"
        )
        for index, found in enumerate(findings)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return findings


def _examine_gpu(index: int, lock: bool, timebase: Timebase) -> Iterator[Finding]:
    from perseus_ds.gpu.nvml import NvmlGpu

    try:
        gpu = NvmlGpu(index, timebase)
    except GpuError as error:
        yield Finding("fail", f"GPU {index}", str(error))
        return
    with closing(gpu):
        yield Finding("ok", f"GPU {index}", f"{gpu.name}, {gpu.uuid}, driver {gpu.driver}")
        yield from _guarded("clocks", _clocks(gpu))
        yield from _guarded("default", _settings(gpu))
        yield from _guarded("power", _power(gpu))
        yield from _guarded("energy", _energy(gpu, timebase))
        yield _agent(gpu)
        yield from _guarded("lock", _leased(gpu, timebase) if lock else _capability())


def _guarded(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings until an examination raises an error, and then the error."""
    try:
        yield from findings
    except GpuError as error:
        yield Finding("fail", what, str(error))
    except Exception as error:  # what could not be examined may be broken
        yield Finding("fail", what, f"could not be examined: {type(error).__name__}: {error}", "Please open an issue.")


def _clocks(gpu: NvmlGpu) -> Iterator[Finding]:
    clocks = gpu.supported_clocks_mhz()
    yield Finding("ok", "clocks", f"{len(clocks)} from {clocks[0]} to {clocks[-1]} MHz, now {gpu.clock_mhz()} MHz")


def _settings(gpu: NvmlGpu) -> Iterator[Finding]:
    """Report the settings, with warnings for those that change default clocks or power."""
    from perseus_ds.artifacts.profile import GpuSettings

    yield Finding("ok", "settings", str(GpuSettings(**gpu.settings)))
    for setting in gpu.administrator_settings:
        text, _, remedy = setting.partition(". ")
        yield Finding("warn", "default", text, remedy)


def _power(gpu: NvmlGpu) -> Iterator[Finding]:
    reasons = [reason for reason in gpu.throttle_reasons() if reason not in ("idle", "applications_clocks_setting")]
    power = f"{gpu.power_w():.0f} W now"
    if reasons:
        text = f"{power}, clock limited by {', '.join(reasons)}"
        yield Finding("warn", "power", text, "A profile measured now would not be valid later.")
    else:
        yield Finding("ok", "power", f"{power}, nothing limits the clock")


def _energy(gpu: NvmlGpu, timebase: Timebase) -> Iterator[Finding]:
    from perseus_ds.gpu.energy_counter import counter_period_s

    period_s = counter_period_s(gpu, timebase=timebase) if gpu.has_energy_counter else None
    refreshed = f"counter refreshed every {(period_s or 0.0) * 1e3:.0f} ms"
    if not gpu.has_energy_counter:
        remedy = "Energies are integrated from the power that the driver reports, which is less accurate."
        yield Finding("warn", "energy", "no energy counter", remedy)
    elif period_s is None:
        yield Finding(
            "warn", "energy", "the counter did not change in 1 s", "Check nvidia-smi; energies would be wrong."
        )
    elif gpu.settings["whole_module"] is None:
        remedy = "NVML does not report the powers of GPU and module, or the counter. Savings may be of either."
        yield Finding("warn", "energy", f"{refreshed}; whether it covers the whole module is not known", remedy)
    elif gpu.settings["whole_module"]:
        remedy = "Savings are fractions of the module's energy. Its CPU part does not follow the GPU's clock."
        yield Finding("warn", "energy", f"{refreshed}; it covers the whole module", remedy)
    else:
        yield Finding("ok", "energy", refreshed)


def _agent(gpu: NvmlGpu) -> Finding:
    from perseus_ds.client.lease import leases

    if (found := leases().get(gpu.address)) is None:
        return Finding("ok", "agent", "no process of this user leases it")
    agent, pids = found
    return Finding("ok", "agent", f"process {agent}; leased by process {', '.join(map(str, pids))}")


def _leased(gpu: NvmlGpu, timebase: Timebase) -> Iterator[Finding]:
    """Lock clocks under a lease, so that an agent resets them however this process ends."""
    from perseus_ds.client.lease import Lease

    try:
        lease = Lease(gpu.address, f"doctor {os.getpid()}")
    except GpuBusyError as error:
        yield Finding("info", "lock", f"not tried: {error}")
        return
    with closing(lease):
        yield from _lock(gpu, timebase)


def _lock(gpu: NvmlGpu, timebase: Timebase) -> Iterator[Finding]:
    """Lock a few clocks of the upper half in rising and falling order, and reset the clock."""
    from perseus_ds.protocol.job_messages import LatencyTable

    clocks = gpu.supported_clocks_mhz()
    upper = clocks[len(clocks) // 2 :]
    rising = upper[:: max(1, len(upper) // _CLOCKS_TRIED)][-_CLOCKS_TRIED:]
    calls_s: list[float] = []
    latencies_s: dict[tuple[int, bool], list[float]] = {}
    before_mhz = clocks[-1]
    try:
        for clock_mhz in (*rising, *rising[-2::-1]):
            began_s = timebase.now_s()
            gpu.lock_clock(clock_mhz)
            calls_s.append(timebase.now_s() - began_s)
            while is_late := gpu.clock_mhz() != clock_mhz:
                if timebase.now_s() - began_s >= _SETTLE_TIMEOUT_S:
                    break
                timebase.sleep(_POLL_S)
            if is_late:
                break
            latencies_s[clock_mhz, clock_mhz > before_mhz] = [timebase.now_s() - began_s]
            before_mhz = clock_mhz
    finally:
        gpu.reset_clock()
    call = f"permitted; the call takes {statistics.median(calls_s) * 1e3:.1f} ms"
    if is_late:
        text = f"{call}, but {clock_mhz} MHz did not follow within {_SETTLE_TIMEOUT_S:g} s"
        yield Finding("warn", "lock", text, "Try again under load; see the line on power.")
        return
    found = LatencyTable(latencies_s)
    each = ", ".join(
        f"{clock_mhz} MHz after {1e3 * latency_s:.1f} ms from {'below' if rises else 'above'}"
        for (clock_mhz, rises), (latency_s,) in sorted(latencies_s.items())
    )
    dwell_s = max(found.dwell_s(clock_mhz) for clock_mhz in rising)
    yield Finding("ok", "lock", f"{call}; in effect: {each}; plans need --least-dwell-s {dwell_s:.3f}; clock reset")


def _capability() -> Iterator[Finding]:
    """Check the permission without calling the driver, since a training job may be setting clocks."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    uids = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
    if effective >> _CAP_SYS_ADMIN & 1 and uids != _ALL_UIDS:
        text = "this process has CAP_SYS_ADMIN in a user namespace only, such as that of a rootless container"
        remedy = 'The driver requires it outside. Run as root of the node, or run zeusd there and set "device": "zeus".'
        yield Finding("fail", "lock", text, remedy)
    elif effective >> _CAP_SYS_ADMIN & 1:
        text = "this process has CAP_SYS_ADMIN; not tested (--lock tests it and changes clocks)"
        yield Finding("ok", "lock", text)
    else:
        remedy = 'Run as root, add `--cap-add SYS_ADMIN` to docker run, or run zeusd and set "device": "zeus".'
        yield Finding("fail", "lock", "this process has no CAP_SYS_ADMIN", remedy)
