"""Examines this machine: whether Perseus will work here, and what to do where it will not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from perseus_ds.clocks.latency import LatencyTable
from perseus_ds.engines.deepspeed.contract import REMEDY, deepspeed_problem
from perseus_ds.errors import GpuError
from perseus_ds.gpu.energy_counter import counter_period_s
from perseus_ds.gpu.nvml import NvmlGpu, gpu_count
from perseus_ds.timebase import REAL_TIME, Timebase

_PACKAGES = ("perseus-ds", "torch", "nvidia-ml-py")
_CAP_SYS_ADMIN = 21
_SETTLE_TIMEOUT_S = 1.0
_CLOCKS_TRIED = 5
_POLL_S = 5e-4


@dataclass(frozen=True)
class Finding:
    """One line of the page that ``perseus-ds doctor`` prints.

    Attributes:
        level: ``fail``: Perseus cannot change clocks here; ``warn``: results are less accurate or a feature is
            missing; ``info`` and ``ok``: nothing is to be done.
    """

    level: Literal["ok", "info", "warn", "fail"]
    what: str
    text: str
    remedy: str = ""


def examine_software() -> list[Finding]:
    """Examine Python's packages, CUDA as torch sees it, and zeusd."""
    python = Finding("ok", "Python", platform.python_version())
    return [python, *map(_package, _PACKAGES), _deepspeed(), _torch_devices(), _zeusd()]


def _package(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding("fail", name, "not installed", f"pip install {name}")


def _deepspeed() -> Finding:
    problem = deepspeed_problem()
    if problem:
        return Finding("fail", "deepspeed", problem, REMEDY)
    return _package("deepspeed")


def _torch_devices() -> Finding:
    try:
        import torch
    except Exception as error:
        return Finding("fail", "torch", f"cannot be imported: {error}", "Install torch again.")
    if torch.cuda.is_available():
        return Finding("ok", "CUDA", f"torch sees {torch.cuda.device_count()} GPUs (CUDA {torch.version.cuda})")
    build = f"torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch was built without CUDA"
    return Finding(
        "warn", "CUDA", f"torch sees no GPU; {build}", "Training runs on the CPU, with simulated GPUs, until it does."
    )


def _zeusd() -> Finding:
    path = os.environ.get("ZEUSD_SOCK_PATH")
    if path is None:
        return Finding("info", "zeusd", "ZEUSD_SOCK_PATH is not set; only needed to change clocks without privileges")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
    except OSError as error:
        return Finding("fail", "zeusd", f"{path}: {error.strerror or error}", "Start zeusd, or unset ZEUSD_SOCK_PATH.")
    try:
        version = importlib.metadata.version("zeus")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "fail", "zeusd", f"{path} answers, but the package zeus is missing", "pip install perseus-ds[zeus]"
        )
    return Finding("ok", "zeusd", f'{path} answers; zeus {version}: "device": "zeus" can be used')


def examine_gpus(*, lock: bool, timebase: Timebase = REAL_TIME) -> list[list[Finding]]:
    """Examine every GPU of this node, all of them at once.

    Args:
        lock: Whether clocks may be changed, to try the permission and measure the latency.
        timebase: The GPUs' timebase.

    Returns:
        The findings of each GPU; one list with one failure where there is no NVML.
    """
    try:
        count = gpu_count()
    except GpuError as error:
        return [[_failure("NVML", error)]]
    if count == 0:
        return [
            [Finding("fail", "NVML", "finds no GPU", "Check nvidia-smi; in a container, start it with --gpus all.")]
        ]
    findings: list[list[Finding]] = [[] for _ in range(count)]

    def examine(index: int) -> None:
        findings[index].extend(_examine_gpu(index, lock, timebase))

    threads = [timebase.thread(partial(examine, index), f"perseus-gpu-{index}") for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return findings


def _examine_gpu(index: int, lock: bool, timebase: Timebase) -> Iterator[Finding]:
    try:
        gpu = NvmlGpu(index, timebase)
    except GpuError as error:
        yield _failure(f"GPU {index}", error)
        return
    try:
        yield Finding("ok", f"GPU {index}", f"{gpu.name}, {gpu.uuid}, driver {gpu.driver}")
        yield _try("clocks", _clocks, gpu)
        yield from _settings(gpu)
        yield _try("power", _power, gpu)
        yield _try("energy", partial(_energy, timebase=timebase), gpu)
        yield _try("lock", partial(_lock, timebase=timebase), gpu) if lock else _capability()
    finally:
        gpu.close()


def _try(what: str, examine: Callable[[NvmlGpu], Finding], gpu: NvmlGpu) -> Finding:
    try:
        return examine(gpu)
    except GpuError as error:
        return _failure(what, error)


def _clocks(gpu: NvmlGpu) -> Finding:
    clocks = gpu.supported_clocks_mhz()
    return Finding("ok", "clocks", f"{len(clocks)} from {clocks[0]} to {clocks[-1]} MHz, now {gpu.clock_mhz()} MHz")


def _settings(gpu: NvmlGpu) -> Iterator[Finding]:
    """Find what is set, and what of it changes default clocks or what the GPU draws."""
    try:
        yield Finding("ok", "settings", str(gpu.settings))
        for setting in gpu.administrator_settings:
            text, _, remedy = setting.partition(". ")
            yield Finding("warn", "default", text, remedy)
    except GpuError as error:
        yield _failure("default", error)


def _power(gpu: NvmlGpu) -> Finding:
    reasons = [reason for reason in gpu.throttle_reasons() if reason not in ("idle", "applications_clocks_setting")]
    power = f"{gpu.power_w():.0f} W now"
    if not reasons:
        return Finding("ok", "power", f"{power}, nothing holds the clock down")
    return Finding(
        "warn",
        "power",
        f"{power}, clock held down by {', '.join(reasons)}",
        "A profile measured now would not be valid later.",
    )


def _energy(gpu: NvmlGpu, timebase: Timebase) -> Finding:
    if not gpu.has_energy_counter:
        return Finding("fail", "energy", "no energy counter", "Perseus cannot measure this GPU: use Volta or later.")
    period_s = counter_period_s(gpu, timebase=timebase)
    if period_s is None:
        return Finding(
            "warn", "energy", "the counter did not change in 1 s", "Check nvidia-smi; energies would be wrong."
        )
    refreshed = f"counter refreshed every {period_s * 1e3:.0f} ms"
    if gpu.settings.whole_module:
        remedy = "Savings are parts of the module's energy: what its CPU uses does not follow the GPU's clock."
        return Finding("warn", "energy", f"{refreshed}; it covers the whole module", remedy)
    return Finding("ok", "energy", refreshed)


def _lock(gpu: NvmlGpu, timebase: Timebase) -> Finding:
    """Lock a few clocks of the upper half, one higher than the other and back, and return to the default clock."""
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
            settle_s = _wait_for_clock(gpu, clock_mhz, began_s, timebase)
            if settle_s is None:
                break
            latencies_s[clock_mhz, clock_mhz > before_mhz] = [settle_s]
            before_mhz = clock_mhz
    finally:
        gpu.reset_clock()
    call = f"permitted; the call takes {statistics.median(calls_s) * 1e3:.1f} ms"
    if settle_s is None:
        return Finding(
            "warn",
            "lock",
            f"{call}, but {clock_mhz} MHz did not follow within {_SETTLE_TIMEOUT_S:g} s",
            "Try again under load; see the line on power.",
        )
    found = LatencyTable(latencies_s)
    each = ", ".join(
        f"{clock_mhz} MHz after {1e3 * latency_s:.1f} ms from {'below' if rises else 'above'}"
        for (clock_mhz, rises), (latency_s,) in sorted(latencies_s.items())
    )
    dwell_s = max(found.dwell_s(clock_mhz) for clock_mhz in rising)
    return Finding("ok", "lock", f"{call}; in effect: {each}; plans need least_dwell_s={dwell_s:.3f}; clock reset")


def _wait_for_clock(gpu: NvmlGpu, clock_mhz: int, began_s: float, timebase: Timebase) -> float | None:
    """Return how long after its request the clock is in effect [s]; None if it is not within a second."""
    while (passed_s := timebase.now_s() - began_s) < _SETTLE_TIMEOUT_S:
        if gpu.clock_mhz() == clock_mhz:
            return passed_s
        timebase.sleep(_POLL_S)
    return None


def _capability() -> Finding:
    """Check the permission without calling the driver, because a training job may be setting clocks now."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    if effective >> _CAP_SYS_ADMIN & 1:
        return Finding("ok", "lock", "this process has CAP_SYS_ADMIN; not tried (lock=true tries, and changes clocks)")
    return Finding(
        "fail",
        "lock",
        "this process has no CAP_SYS_ADMIN",
        'Run as root, add `--cap-add SYS_ADMIN` to docker run, or run zeusd and set "device": "zeus".',
    )


def _failure(what: str, error: GpuError) -> Finding:
    return Finding("fail", what, str(error))
