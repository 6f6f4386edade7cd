"""What keeps clocks from being set safely, and clocks that dead processes have left locked."""

import re
import signal
from types import SimpleNamespace

import pytest
from run_log import wait_until
from virtual.job import LoneCommunicator

from perseus_ds.clocks.lock_records import left_locks
from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.policy.job_control import JobControl
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.supervision import Supervision, reset_left_clocks


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
            raise GpuError("the guardian of rank 1 failed to start")

    rank.communicator = Broken()
    rank.gpu = NvmlGpu(0)
    config = parse_block({"mode": "run", "frontier": "f", "output_dir": str(tmp_path)})
    job = SimpleNamespace(config=config, output_dir=tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(GpuError, match="of rank 1"):
        Supervision(job, rank, recorder=None, control=JobControl(job.config.policy, 1), restore=lambda: None)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert list(left_locks()) == []
    wait_until(lambda: not stub_nvml_here.guardians(), "the guardian's end with its last rank")


def test_a_clock_that_a_dead_process_left_locked_is_reset_and_named_once(stub_nvml_here, caplog):
    lock = (
        "import os, signal\n"
        "from perseus_ds.gpu.nvml import NvmlGpu\n"
        "from perseus_ds.clocks.lock_records import HeldLock\n"
        "gpu = NvmlGpu(2)\n"
        "held = HeldLock(gpu.address, 'job')\n"
        "gpu.lock_clock(1200)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    stub_nvml_here.gpus[1].locked_clock_mhz = 900  # somebody else's
    assert stub_nvml_here.run("-c", lock).returncode == -9
    assert stub_nvml_here.locked_clocks_mhz() == [0, 900, 1200, 0]
    for _ in range(2):
        reset_left_clocks()
    assert stub_nvml_here.locked_clocks_mhz() == [0, 900, 0, 0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"perseus: process \d+ died and left the clock of nvml:GPU-\S+ locked: it is reset\.", said)
