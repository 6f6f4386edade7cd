"""What faults of a job caused, in tests in virtual time and on real ranks."""

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Effects of all faults of one cause.

    Attributes:
        times: Number of occurrences.
        warnings: Warnings of all ranks.
        back_s: Time from the end of each fault until the job was back under a plan [s].
        broken: Violated guarantees.
    """

    times: int = 0
    warnings: int = 0
    back_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, back_s, warned):
        """Count a fault, after which the job was back in this time [s], and these ranks have warned."""
        self.times += 1
        self.back_s.append(back_s)
        self.warnings += len(warned)
        if len(warned) > len(set(warned)):
            self.broken.append(f"a rank warned more than once: ranks {warned}")

    def __str__(self):
        back = f"{max(self.back_s):8.1f}" if self.back_s else f"{'':8}"
        return f"{self.times:5} {self.warnings:9} {back}  {'; '.join(self.broken)}"
