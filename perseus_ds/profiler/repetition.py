"""What repeating an instruction at a clock has shown: its row, and whether that is known well enough."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from scipy.special import stdtrit

from perseus_ds.artifacts.profile import Measurement
from perseus_ds.artifacts.profile_metadata import RowQuality
from perseus_ds.device.gpu.base import GpuState
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.rows import MeasuredRow, known, typical

# A clock was not reached if the clock read back is lower than this fraction of it.
_NOT_REACHED = 0.985
# How probable it must be that two energies differ.
_SURE = 0.999


@dataclass(frozen=True)
class Repetition:
    """Measurements of a repeated cycle: a forward, or a forward and its backward.

    Attributes:
        times_s: Times of the last instruction of the cycle.
        cycle_j: Mean energy of one cycle.
        error_j: Standard error of ``cycle_j``.
        values: From how many values that error is.
        clock_mhz: Median clock at which the GPU ran.
        state: Of the GPU at the end.
        forward_s: Mean time of the forward in a cycle that has a backward, 0 elsewhere.
        forward: The forward repeated alone, if it is not the last instruction of the cycle.
    """

    times_s: list[float]
    cycle_j: float
    error_j: float
    values: int
    clock_mhz: float
    state: GpuState
    forward_s: float
    forward: Repetition | None

    @property
    def relative_error(self) -> float:
        """Relative standard error of the cycle's energy, or of the time if that is larger."""
        error = self.error_j / self.cycle_j if self.cycle_j > 0 else math.inf
        return max(error, typical(self.times_s)[1])

    def is_told_from_waiting(self, blocking_power_w: float) -> bool:
        """Return whether the last instruction's energy surely differs from that of waiting as long.

        Noise can put it below, where no instruction is: plans could not be made from such a row.

        Args:
            blocking_power_w: Power of a GPU that waits [W].
        """
        energy_j, error_j = self._energy_j()
        values = min(self.values, self.forward.values if self.forward is not None else self.values)
        errors = float(stdtrit(max(1, values - 1), _SURE))  # Student's: an error from few values is itself uncertain
        return abs(energy_j - blocking_power_w * typical(self.times_s)[0]) >= errors * error_j

    def row(self, stage: int, kind: Kind, clock_mhz: int) -> MeasuredRow:
        """Return the row of the last instruction.

        Raises:
            ProfileError: Its energy is not positive.
        """
        energy_j, error_j = self._energy_j()
        if energy_j <= 0:
            raise ProfileError(
                f"stage {stage}, {kind}, {clock_mhz} MHz: measured {energy_j:.3g} J, expected more than 0. "
                "Make perseus.profile.max_window_s longer."
            )
        time_s, time_error = typical(self.times_s)
        held = self.clock_mhz < _NOT_REACHED * clock_mhz
        return MeasuredRow(
            Measurement(stage, kind, clock_mhz, time_s, energy_j),
            RowQuality(
                stage=stage,
                kind=kind,
                clock_mhz=clock_mhz,
                samples=len(self.times_s),
                time_relative_error=time_error,
                energy_relative_error=known(error_j / energy_j),
                reached_mhz=int(self.clock_mhz) if held else None,
                temperature_c=self.state.temperature_c,
                power_state=self.state.power_state,
            ),
        )

    def _energy_j(self) -> tuple[float, float]:
        """Return the energy of the last instruction and its standard error [J]."""
        if self.forward is None:
            return self.cycle_j, self.error_j
        # It has the power that it has alone, but where the host is busy it may take another time.
        times = self.forward_s / statistics.fmean(self.forward.times_s)
        return self.cycle_j - times * self.forward.cycle_j, math.hypot(self.error_j, times * self.forward.error_j)
