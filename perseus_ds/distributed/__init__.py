"""Communication between the ranks of a job, on separate CPU groups so that no GPU stream is used."""

from perseus_ds.distributed.communicator import Communicator
from perseus_ds.distributed.exchange import Answers, Pending
from perseus_ds.distributed.topology import PipelineTopology

__all__ = ["Answers", "Communicator", "Pending", "PipelineTopology"]
