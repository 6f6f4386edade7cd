"""Average power from an energy counter that is refreshed only now and then."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import numpy as np

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu


class CounterLog:
    """Watches the energy counter in the background and keeps the moments it changed.

    A counter refreshed every 100 ms tells nothing about one 20 ms instruction, but its changes lie
    on the true energy curve: the slope through several of them is the average power.
    """

    def __init__(self, gpu: Gpu, poll_s: float = 0.002) -> None:
        self._gpu = gpu
        self._poll_s = poll_s
        self._changes: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="perseus-energy", daemon=True)

    def __enter__(self) -> CounterLog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def changes(self, start_s: float, end_s: float) -> int:
        """Return how many refreshes were seen between two moments of ``time.perf_counter``."""
        return sum(start_s <= moment <= end_s for moment, _ in self._changes)

    def readings(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return moment [s] and energy [J] of the refreshes seen from ``start_s`` to ``end_s``."""
        if self._error is not None:
            raise self._error
        return [change for change in self._changes if start_s <= change[0] <= end_s]

    def power_w(self, start_s: float, end_s: float) -> float:
        """Return the average power between two moments of ``time.perf_counter`` [W].

        Raises:
            GpuError: The counter was refreshed fewer than three times in between.
        """
        inside = np.array(self.readings(start_s, end_s))
        if len(inside) < 3:
            raise GpuError(
                f"{self._gpu.name}: the energy counter was refreshed only {len(inside)} times in "
                f"{end_s - start_s:.2f} s, 3 are needed. Make perseus.profile.window_s longer."
            )
        slope, _ = np.polyfit(inside[:, 0] - inside[0, 0], inside[:, 1], 1)
        return float(slope)

    def _watch(self) -> None:
        try:
            last_j = self._gpu.energy_j()
            while not self._stop.wait(self._poll_s):
                energy_j = self._gpu.energy_j()
                if energy_j != last_j:
                    self._changes.append((time.perf_counter(), energy_j))
                    last_j = energy_j
        except Exception as error:
            self._error = error
