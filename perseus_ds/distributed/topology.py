"""The place of a rank in its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineTopology:
    """Position of this rank in the job.

    Attributes:
        rank: Global rank.
        pipeline: Global ranks of this rank's pipeline, first stage first.
        data_parallel_rank: Which pipeline.
        data_parallel: Number of pipelines.
        stage_peers: Global ranks that share this rank's stage by tensor parallelism, itself included.
    """

    rank: int
    pipeline: tuple[int, ...]
    data_parallel_rank: int = 0
    data_parallel: int = 1
    stage_peers: tuple[int, ...] = ()

    @property
    def pipeline_rank(self) -> int:
        """Position in the pipeline, 0 first."""
        return self.pipeline.index(self.rank)

    @property
    def pipeline_ranks(self) -> int:
        return len(self.pipeline)

    @property
    def is_shown(self) -> bool:
        """Whether this rank is in the pipeline whose operations are shown for all: rank 0's."""
        return 0 in self.pipeline

    @property
    def tensor_parallel(self) -> int:
        return max(1, len(self.stage_peers))
