"""Jobs whose code takes the path of real GPUs, with the real agent and server, on stubs of NVML and CUDA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_log
from forked import free_port
from frontiers import save_random_plan
from stub_cuda.controller import compiled

pytestmark = pytest.mark.integration
RANK = Path(__file__).parents[1] / "support" / "gpu_path_job.py"


def test_two_ranks_run_a_plan_whose_clocks_the_gpus_get_and_lose_at_the_end(make_stub_nvml, tmp_path):
    stub = make_stub_nvml(2)
    plan = save_random_plan(tmp_path / "frontier", ranks=2, simulated=False)
    block = {"device": "auto", "mode": "run", "frontier": str(tmp_path / "frontier"), "cache": False}
    (tmp_path / "block.json").write_text(json.dumps({**block, "output_dir": str(tmp_path / "perseus")}))
    uuids = ",".join(gpu.uuid.decode() for gpu in stub.gpus)
    command = [sys.executable, str(RANK), str(tmp_path), str(compiled(tmp_path)), uuids]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **stub.environment, **job, "PYTHONPATH": paths}
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    assert [rank.wait(run_log.GIVE_UP_S) for rank in ranks] == [0, 0]
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert report == {"phases": ["run"] * 8, "timers": "CudaExecution", "marks": "StreamMarks"}
        requested_mhz = set(stub.gpus[rank].changes_mhz()) - {0}
        assert len(requested_mhz) > 2, "clocks change within an iteration"
        assert requested_mhz <= set(plan.clocks_mhz[rank])
    run_log.wait_until(lambda: stub.locked_clocks_mhz() == [0, 0], "default clocks")
    iterations = [record for record in run_log.records(tmp_path / "perseus") if "iteration" in record]
    assert [(record["phase"], record["plan"], record["simulated"]) for record in iterations] == [("run", 0, False)] * 8
