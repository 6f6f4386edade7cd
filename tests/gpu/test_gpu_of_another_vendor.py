"""A GPU of another vendor needs only the GPU interface. See docs/developers/add-a-gpu-vendor.md."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from virtual.agent import actor_of
from virtual.gpu import set_clock
from virtual.time import VirtualTime

from perseus_ds.errors import GpuError, GpuPermissionError
from perseus_ds.gpu.base import Gpu, GpuState
from perseus_ds.gpu.energy_counter import CounterLog, with_energy


class AcmeError(Exception):
    """An error of Acme's driver."""


class AcmeDriver:
    """Acme's library, which counts in kilohertz and microwatts."""

    def __init__(self, time: VirtualTime, *, is_root: bool = True) -> None:
        self._time = time
        self._is_root = is_root
        self.clock_khz: int | None = None

    def clocks_khz(self, device: int) -> list[int]:
        return [1_600_000, 1_200_000, 800_000]

    def set_clock(self, device: int, clock_khz: int | None) -> None:
        if not self._is_root:
            raise AcmeError("EPERM")
        self.clock_khz = clock_khz

    def read_clock(self, device: int) -> int:
        return self.clock_khz or 1_600_000

    def read_power(self, device: int) -> int:
        return 100_000_000 + 100 * (self.clock_khz or 1_600_000)


class AcmeGpu:
    """An Acme GPU."""

    simulated = False
    settings = None
    has_energy_counter = False  # the agent integrates power instead

    def __init__(self, library: AcmeDriver, device: int) -> None:
        self._library = library
        self._device = device
        self.name = f"Acme X100 number {device}"
        self.driver: str | None = "1.0"

    @property
    def address(self) -> str:
        return f"acme:{self._device}"

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        return tuple(sorted(khz // 1000 for khz in self._library.clocks_khz(self._device)))

    def lock_clock(self, clock_mhz: int) -> None:
        if clock_mhz not in self.supported_clocks_mhz():
            raise GpuError(f"{self.name}: {clock_mhz} MHz is not one of {self.supported_clocks_mhz()} MHz.")
        self._set(clock_mhz * 1000)

    def reset_clock(self) -> None:
        self._set(None)

    def check_lock_permission(self) -> None:
        self.reset_clock()

    def _set(self, clock_khz: int | None) -> None:
        try:
            self._library.set_clock(self._device, clock_khz)
        except AcmeError as error:
            raise GpuPermissionError(f"{self.name}: setting a clock failed ({error}). Run as root.") from error

    def clock_mhz(self) -> int:
        return self._library.read_clock(self._device) // 1000

    def throttle_reasons(self) -> tuple[str, ...]:
        return ()

    def power_limit_w(self) -> float | None:
        return None

    def energy_j(self) -> float:
        raise GpuError(f"{self.name} has no energy counter.")

    def power_w(self) -> float:
        return self._library.read_power(self._device) / 1e6

    @property
    def state(self) -> GpuState:
        return GpuState()

    def close(self) -> None:
        """Do nothing, because the library needs no release."""


def test_the_page_about_gpus_shows_this_class() -> None:
    page = Path(__file__).parents[2] / "docs/developers/add-a-gpu-vendor.md"
    assert inspect.getsource(AcmeGpu).strip() in page.read_text()


def test_the_agents_actor_sets_and_resets_its_clock(now: VirtualTime) -> None:
    library = AcmeDriver(now)
    clocks = actor_of(AcmeGpu(library, 0), now)
    clocks.listeners.append(pytest.fail)
    set_clock(clocks, 1200)
    now.sleep(1)
    assert library.clock_khz == 1_200_000
    set_clock(clocks, None)
    assert library.clock_khz is None
    clocks.close()


def test_its_power_is_integrated_because_it_has_no_counter(now: VirtualTime) -> None:
    gpu: Gpu = with_energy(AcmeGpu(AcmeDriver(now), 0), now)
    gpu.lock_clock(800)
    begin_s = now.now_s()
    with CounterLog(gpu, now) as log:
        now.sleep(1)
        power_w = log.power_w(begin_s + 0.2, begin_s + 1.0)
    gpu.close()
    assert power_w == pytest.approx(180, rel=0.01)


def test_errors_of_its_driver_say_what_to_do(now: VirtualTime) -> None:
    gpu = AcmeGpu(AcmeDriver(now, is_root=False), 0)
    with pytest.raises(GpuPermissionError, match="Run as root"):
        gpu.check_lock_permission()
    with pytest.raises(GpuError, match="1000 MHz is not one of"):
        gpu.lock_clock(1000)
