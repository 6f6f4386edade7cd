"""What was set of a GPU when a profile was measured; a part of ``profile.json`` and ``frontier.json``."""

from __future__ import annotations

from pydantic import Field

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.limits import Clock, Index, Power, Text


class GpuSettings(FileModel):
    """What can be set of a GPU that changes what default clocks are, and what computing and waiting draw.

    Attributes:
        power_limit_w: The limit in force, whoever has set it; None where it is not told.
        application_clock_mhz: Below which default clocks stay; None where it is not told.
        power_profiles: Workload power profiles in force, by NVML's names.
        power_smoothing: What is applied of power smoothing, by NVML's names and in its units; empty while off.
        whole_module: Whether the energy counter covers more than the GPU, such as a processor beside it.
    """

    power_limit_w: Power | None = None
    application_clock_mhz: Clock | None = None
    power_profiles: list[Text] = Field(default_factory=list)
    power_smoothing: dict[Text, Index] = Field(default_factory=dict)
    whole_module: bool = False

    def __str__(self) -> str:
        facts = [
            f"power limit {self.power_limit_w:g} W" if self.power_limit_w is not None else "no power limit told",
            f"application clock {self.application_clock_mhz} MHz" if self.application_clock_mhz is not None else "",
            f"power profile {', '.join(self.power_profiles)}" if self.power_profiles else "no power profile",
            "power smoothing " + (", ".join(f"{n} {v}" for n, v in self.power_smoothing.items()) or "off"),
            "energy of the whole module" if self.whole_module else "",
        ]
        return "; ".join(fact for fact in facts if fact)
