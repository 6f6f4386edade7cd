"""Jobs whose code takes the path of real GPUs, with the real agent and server, on stubs of NVML and CUDA."""

import json
from pathlib import Path

import job
import pytest
import run_log
from frontiers import save_random_plan
from stub_cuda.controller import compiled

pytestmark = pytest.mark.integration
RANK = Path(__file__).with_name("gpu_path_job.py")
ENGINES = pytest.mark.parametrize("engine", ["torch", "deepspeed", "megatron"])
IDLE_W, BUSY_W = 30.0, 300.0


@pytest.fixture
def train(make_stub_nvml, tmp_path):
    """A function that trains on two ranks, and returns the stub of NVML and the job."""

    def train(engine, block, **keys):
        stub = make_stub_nvml(2)
        for gpu in stub.gpus:
            gpu.power_w = IDLE_W
        block = {"device": "auto", "cache": False, "output_dir": str(tmp_path / "perseus"), **block}
        described = {"engine": engine, "block": block, "power_w": BUSY_W - IDLE_W, **keys}
        (tmp_path / "job.json").write_text(json.dumps(described))
        done = job.run_script(tmp_path, 2, RANK, tmp_path, compiled(tmp_path), environment=stub.environment)
        for report in done.ranks:
            assert (report["timers"], report["marks"]) == ("CudaExecution", "StreamMarks")
        run_log.wait_until(lambda: stub.locked_clocks_mhz() == [0, 0], "default clocks")
        return stub, done

    return train


@ENGINES
def test_two_ranks_run_a_plan_whose_clocks_the_gpus_get_and_lose_at_the_end(train, tmp_path, engine):
    plan = save_random_plan(tmp_path / "frontier", ranks=2, simulated=False)
    block = {"mode": "run", "frontier": str(tmp_path / "frontier")}
    stub, done = train(engine, block, steps=8, pass_s=[0.005, 0.005])
    for gpu, planned_mhz in zip(stub.gpus, plan.clocks_mhz, strict=True):
        requested_mhz = set(gpu.changes_mhz()) - {0}
        assert len(requested_mhz) > 2, "clocks change within an iteration"
        assert requested_mhz <= set(planned_mhz)
    planned = 7 if engine == "megatron" else 8  # the first iteration is used to record the order
    assert [report["phases"][-planned:] for report in done.ranks] == [["run"] * planned] * 2
    found = [(record["phase"], record["plan"], record["simulated"]) for record in done.iterations()]
    assert found == [("run", 0, False)] * planned


@pytest.mark.extended
@ENGINES
def test_a_job_whose_host_waits_after_each_step_keeps_a_plan_that_saves_energy(train, engine):
    block = {"mode": "auto", "goal": {"max_slowdown": None}, "profile": job.QUICK_PROFILE}
    stub, done = train(engine, block, pass_s=[0.006, 0.01])
    judged = done.events("proof")
    assert judged[-1]["kept"], judged
    assert len({*stub.gpus[0].changes_mhz()} - {0}) > 1
