"""Communication between the ranks of a job, on separate CPU groups so that no GPU stream is used."""

from perseus_ds.distributed.all_ranks import AllRanks
from perseus_ds.distributed.communicator import Communicator
from perseus_ds.distributed.exchange import Answers, Pending, Widths
from perseus_ds.distributed.messages import MOST_MESSAGE_BYTES, Messages
from perseus_ds.distributed.topology import PipelineTopology

__all__ = [
    "MOST_MESSAGE_BYTES",
    "AllRanks",
    "Answers",
    "Communicator",
    "Messages",
    "Pending",
    "PipelineTopology",
    "Widths",
]
