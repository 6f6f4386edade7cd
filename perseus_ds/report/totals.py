"""What a whole run took: energy, time, GPU-hours, per sample and per rank."""

from __future__ import annotations

from dataclasses import dataclass

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.artifacts.run_records import ProfileWritten
from perseus_ds.report.history import History
from perseus_ds.report.parts import Share


@dataclass(frozen=True)
class JobSize:
    """How large a job is, as far as its profile says.

    Attributes:
        gpus: All GPUs of the job.
        samples: Samples of one iteration.
    """

    gpus: int | None = None
    samples: int | None = None

    @classmethod
    def of(cls, info: ProfileInfo) -> JobSize:
        """Return what a profile says."""
        ranks, pipelines = info.pipeline_ranks, info.data_parallel or 1
        return cls(
            gpus=None if ranks is None else ranks * pipelines * (info.tensor_parallel or 1),
            samples=(
                None
                if info.micro_batches is None or info.micro_batch_size is None
                else info.micro_batches * info.micro_batch_size * pipelines
            ),
        )


@dataclass(frozen=True)
class RunTotals:
    """All iterations of a job, and what profiling outside of training took.

    Attributes:
        iterations: How many.
        time_s: All of them together [s].
        energy_j: All of them together, of all GPUs [J].
        without_energy: Iterations whose energy could not be read, and is not in ``energy_j``.
        size: How large the job is.
    """

    iterations: int
    time_s: float
    energy_j: float
    without_energy: int
    size: JobSize

    @property
    def gpu_s(self) -> float | None:
        """GPU-seconds."""
        return None if self.size.gpus is None else self.time_s * self.size.gpus

    @property
    def energy_per_sample_j(self) -> float | None:
        """Over the iterations whose energy is known [J]."""
        known = self.iterations - self.without_energy
        return None if self.size.samples is None or not known else self.energy_j / (known * self.size.samples)


def totals_of(history: History, size: JobSize) -> RunTotals:
    """Return what a job took."""
    records = [step.record for step in history.steps]
    profiles = [found.event for found in history.occurrences if isinstance(found.event, ProfileWritten)]
    known = [record.energy_j for record in records if record.energy_j is not None]
    return RunTotals(
        iterations=len(records),
        time_s=sum(record.time_s for record in records) + sum(event.spent_s or 0.0 for event in profiles),
        energy_j=sum(known) + sum(event.spent_j or 0.0 for event in profiles),
        without_energy=len(records) - len(known),
        size=size,
    )


def shares_of(history: History) -> list[Share]:
    """Return the energy by rank; where that is not recorded, by pipeline, if there are several."""
    by_rank, by_pipeline = history.by_rank.shares("rank"), history.by_pipeline.shares("pipeline")
    return by_rank or (by_pipeline if len(by_pipeline) > 1 else [])
