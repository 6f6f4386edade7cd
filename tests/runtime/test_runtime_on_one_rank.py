"""The runtime in this very process, on one rank: what it survives, and what it leaves behind."""

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from frontiers import save_random_plan
from pipelines import one_f_one_b
from run_log import events, iterations, records, wait_until

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.clocks.timers import HostExecution
from perseus_ds.errors import ConfigError, FrontierError, PerseusError
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.ranks import Communicator, PipelineTopology
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.devices import clocks_of
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime

SCHEDULE = one_f_one_b(ranks=1, micro_batches=2)
STREAM = tuple(i for i in SCHEDULE.instructions[0] if i.kind is not Kind.TAIL)
CLOCK_MHZ = 1200
CPU = torch.device("cpu")


@pytest.fixture
def start(tmp_path):
    """A function that starts the runtime on a GPU."""
    started = []

    def start(gpu, execution=None, **block):
        config = parse_block({"device": "nvml", "output_dir": str(tmp_path), **block})
        job = Job(config, SCHEDULE, ProfileInfo(simulated=gpu.simulated))
        communicator = Communicator(PipelineTopology(0, (0,)))
        timers = execution or HostExecution()
        clocks = clocks_of(gpu, CPU)
        try:
            runtime = PerseusRuntime(job, communicator=communicator, gpu=gpu, clocks=clocks, timers=timers, device=CPU)
        except PerseusError:
            clocks.close()
            raise
        started.append(runtime)
        return runtime

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield start
    for runtime in started:
        runtime.close()
    dist.destroy_process_group()


@pytest.fixture
def plan(tmp_path):
    """The block of a job that runs under one plan, all of it at one clock."""
    plan = FrequencyPlan((STREAM,), ((CLOCK_MHZ,) * len(STREAM),), 1.0, 100.0)
    provenance = Provenance(schedule="1f1b", micro_batches=2, stages=1, blocking_power_w=80, solver="none")
    return {"mode": "run", "frontier": str(Frontier((plan,), 1.0, plan, provenance).save(tmp_path))}


def train(runtime, instruction_s=0.0):
    with runtime.iteration():
        for instruction in SCHEDULE.instructions[0]:
            with runtime.instruction(instruction):
                time.sleep(instruction_s)


def fork(function):
    """Call a function in a forked process; returns its process id once it runs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, b"1")
            function()
        finally:
            os._exit(0)
    os.read(reader, 1)
    return child


def test_forked_processes_leave_the_clock_and_the_agent_to_their_parent(start, plan, stub_of_agents, tmp_path):
    runtime = start(NvmlGpu(0), **plan)
    train(runtime)
    worker = fork(lambda: time.sleep(60))
    os.kill(worker, signal.SIGTERM)  # as a Pool does to its workers
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    os.waitpid(fork(runtime.close), 0)  # as happens to a copy of DeepSpeed's engine that is collected
    wait_until(lambda: train(runtime) or stub_of_agents.locked_clocks_mhz()[0] == CLOCK_MHZ, "the plan's clock")
    runtime.close()
    assert {record.get("event") for record in records(tmp_path)} == {"start", "plan", "end", None}


def test_a_frontier_that_is_not_there_is_an_error_before_training(start, stub_of_agents, tmp_path):
    with pytest.raises(ConfigError, match="nowhere does not exist on rank 0's node"):
        start(NvmlGpu(0), mode="run", frontier=str(tmp_path / "nowhere"))
    with pytest.raises(FrontierError, match="no such file; expected a frontier"):
        start(NvmlGpu(0), mode="run", frontier=str(tmp_path))


def test_a_plan_that_does_not_fit_is_an_error_before_training(start, stub_of_agents, tmp_path):
    for micro_batches, clock_mhz, message in (
        (3, CLOCK_MHZ, "Plan does not fit this schedule: rank 0, instruction"),
        (2, 1111, "Plan does not fit this GPU: .* lacks 1111 MHz"),
    ):
        folder, schedule = tmp_path / str(clock_mhz), one_f_one_b(ranks=1, micro_batches=micro_batches)
        save_random_plan(folder, schedule, clocks_mhz=(clock_mhz,), simulated=False)
        with pytest.raises(PerseusError, match=message):
            start(NvmlGpu(0), mode="run", frontier=str(folder))
    assert not (tmp_path / "run.jsonl").exists()


def test_a_loop_may_go_on_after_closing(start, plan, stub_of_agents, tmp_path, caplog):
    """As a job does that catches SIGTERM, saves a checkpoint and goes on."""
    runtime = start(NvmlGpu(0), **plan)
    train(runtime)
    runtime.close()
    train(runtime)
    runtime.close()
    before, after = iterations(records(tmp_path))
    assert (before["plan"], after["plan"]) == (0, None)
    assert not events(records(tmp_path), "failure")
    assert not caplog.records
    assert stub_of_agents.locked_clocks_mhz()[0] == 0


def test_the_process_that_optimises_does_not_outlive_its_phase(start, stub_of_agents):
    stub_of_agents.gpus[0].counter_period_s = 0.005
    profile = {"warm_up": 2, "min_clock_mhz": 1395, "sampling": "stride", "clock_stride": 1}
    runtime = start(NvmlGpu(0), mode="auto", cache=False, profile=profile)
    for _ in range(10_000):
        if runtime.next.phase == "optimizing":
            break
        # More than was drawn when waiting.
        stub_of_agents.gpus[0].power_w = 100.0 if runtime.next.phase == "warm-up" else 400.0
        train(runtime, 0.01)
    assert runtime.next.phase == "optimizing"
    assert optimizing()
    runtime.close()
    assert not optimizing()


def optimizing():
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "perseus_ds.optimizer.worker" in " ".join(child.cmdline())]
