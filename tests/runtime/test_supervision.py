"""What keeps clocks from being set safely."""

import signal
from types import SimpleNamespace

import pytest
from run_log import wait_until
from virtual.job import LoneCommunicator

from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.policy.job_control import JobControl
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.supervision import Supervision


@pytest.fixture
def rank():
    return SimpleNamespace(
        clocks=SimpleNamespace(problem=None, close=lambda: None, is_closed=False),
        communicator=LoneCommunicator(),
    )


def test_what_was_started_is_ended_where_another_rank_could_not_start(rank, tmp_path, stub_nvml_here, monkeypatch):
    for name, value in stub_nvml_here.environment.items():
        monkeypatch.setenv(name, value)

    class Broken(LoneCommunicator):
        def raise_on_all_ranks(self, check):
            check()
            raise GpuError("the agent of rank 1 failed to start")

    rank.communicator = Broken()
    rank.gpu = NvmlGpu(0)
    config = parse_block({"mode": "run", "frontier": "f", "output_dir": str(tmp_path)})
    job = SimpleNamespace(config=config, output_dir=tmp_path)
    with pytest.raises(GpuError, match="of rank 1"):
        Supervision(job, rank, recorder=None, control=JobControl(job.config.policy, 1))
    assert signal.set_wakeup_fd(-1) == -1, "signals are reported to nobody"
    wait_until(lambda: not stub_nvml_here.agents(), "the agent's end with its last rank")
