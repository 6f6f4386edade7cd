"""The start of a rank's runtime: what goes wrong on one rank is told to all."""

import pytest
import torch.distributed as dist
from pipelines import one_f_one_b
from virtual.job import LoneCommunicator

from perseus_ds.errors import GpuError
from perseus_ds.runtime import runtime


def test_a_gpu_that_cannot_be_opened_is_told_to_all_ranks(monkeypatch, tmp_path):
    """Ranks are connected first; a rank that raised alone would leave the others waiting for it."""
    done = []

    class Communicator(LoneCommunicator):
        def raise_on_all_ranks(self, check):
            done.append("raised on all ranks")
            check()

    def open_gpu(*_, **__):
        done.append("open")
        raise GpuError("no such GPU")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(runtime, "Communicator", lambda place: Communicator())
    monkeypatch.setattr(runtime, "open_gpu", open_gpu)
    block = {"mode": "observe", "output_dir": str(tmp_path)}
    with pytest.raises(GpuError, match="no such GPU"):
        runtime.PerseusRuntime.for_loop(block, one_f_one_b(ranks=1, micro_batches=2), pipeline=[0])
    assert done == ["raised on all ranks", "raised on all ranks", "open"]
