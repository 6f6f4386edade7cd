"""The parts of a rank for a loop without an engine: what goes wrong on one rank is told to all."""

import pytest
import torch
import torch.distributed as dist
from lone_communicator import LoneCommunicator
from pipelines import one_f_one_b

from perseus_ds.errors import GpuError
from perseus_ds.runtime import build


def test_a_gpu_that_cannot_be_opened_is_told_to_all_ranks(monkeypatch, tmp_path):
    """Ranks are connected first; a rank that raised alone would leave the others waiting for it."""
    done = []

    class Communicator(LoneCommunicator):
        def together(self, check):
            done.append("together")
            check()

    def open_gpu(*_, **__):
        done.append("open")
        raise GpuError("no such GPU")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(build, "Communicator", Communicator)
    monkeypatch.setattr(build, "open_gpu", open_gpu)
    block = {"mode": "observe", "output_dir": str(tmp_path)}
    with pytest.raises(GpuError, match="no such GPU"):
        build.loop_parts(
            block,
            one_f_one_b(ranks=1, micro_batches=2),
            pipeline=[0],
            data_parallel_rank=0,
            data_parallel=1,
            device=torch.device("cpu"),
        )
    assert done == ["together", "open"]
