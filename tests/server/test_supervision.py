"""What a job runs beside training."""

from types import SimpleNamespace

import pytest
from perseus_ds.runtime.supervision import Supervision
from virtual.job import LoneCommunicator

from perseus_ds.config import parse_block
from perseus_ds.errors import GpuError
from perseus_ds.server.job_control import JobControl


def test_what_was_started_is_ended_where_another_rank_could_not_start(tmp_path):
    sockets = []

    class Broken(LoneCommunicator):
        def raise_on_all_ranks(self, check):
            check()
            sockets.extend(tmp_path.glob("control*"))
            raise GpuError("the agent of rank 1 failed to start")

    rank = SimpleNamespace(clocks=SimpleNamespace(problem=None), communicator=Broken())
    config = parse_block({"mode": "run", "frontier": "f", "output_dir": str(tmp_path)})
    job = SimpleNamespace(config=config, output_dir=tmp_path)
    with pytest.raises(GpuError, match="of rank 1"):
        Supervision(job, rank, recorder=None, control=JobControl(job.config.policy, 1))
    assert sockets
    assert not any(path.exists() for path in sockets)
