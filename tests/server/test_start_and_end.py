"""Checks before training, and what a job leaves to other processes and at its end."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist
from frontiers import save_random_plan
from job_descriptions import TWO_STAGES, described
from msgspec import structs
from pipelines import one_f_one_b
from run_log import records, wait_until
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.errors import ConfigError, FrontierError, GpuPermissionError, PerseusError, ScheduleError
from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.protocol.job_messages import GpuFacts, decode_description, encode
from perseus_ds.server.job import Job
from perseus_ds.server.server import JobServer

SCHEDULE = one_f_one_b(ranks=1, micro_batches=2)
CLOCK_MHZ = 1200


@pytest.fixture
def frontier_of_one_rank(tmp_path):
    """The path of a frontier with one plan, which has one clock."""
    save_random_plan(tmp_path, SCHEDULE, clocks_mhz=[CLOCK_MHZ], simulated=False)
    return str(tmp_path)


def only_rank(frontier, folder):
    """Return the only rank of a job under a plan, with an agent and a server."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    block = {"device": "nvml", "mode": "run", "frontier": frontier, "output_dir": str(folder)}
    return PerseusRuntime.for_loop(block, SCHEDULE, pipeline=[0])


@pytest.fixture
def runtime(frontier_of_one_rank, tmp_path, stub_of_agents):
    runtime = only_rank(frontier_of_one_rank, tmp_path)
    yield runtime
    runtime.close()
    dist.destroy_process_group()


def train(runtime):
    with runtime.iteration():
        for instruction in SCHEDULE.instructions[0]:
            with runtime.instruction(instruction):
                pass


def fork(function):
    """Call a function in a forked process and return its process ID once it runs."""
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


def test_forked_processes_leave_the_clock_and_the_agent_to_their_parent(runtime, stub_of_agents, tmp_path):
    train(runtime)
    worker = fork(lambda: time.sleep(60))
    os.kill(worker, signal.SIGTERM)  # as a Pool ends its workers
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    os.waitpid(fork(runtime.close), 0)  # as when a copy of DeepSpeed's engine is garbage-collected
    wait_until(lambda: train(runtime) or CLOCK_MHZ in stub_of_agents.gpus[0].changes_mhz(), "the plan's clock")
    runtime.close()
    assert {record.get("event") for record in records(tmp_path)} == {"start", "plan", "end", None}


def test_a_process_of_multiprocessing_that_returns_has_not_been_killed(frontier_of_one_rank, tmp_path, stub_of_agents):
    """Such a process ends without atexit."""
    rank = multiprocessing.get_context("fork").Process(target=lambda: train(only_rank(frontier_of_one_rank, tmp_path)))
    rank.start()
    rank.join()
    wait_until(lambda: "end" in {record.get("event") for record in records(tmp_path)}, "the end of the job")
    assert not records(tmp_path)[-1]["killed"]


def test_auto_mode_observes_where_it_may_not_set_clocks(tmp_path, caplog):
    job = VirtualJob(tmp_path, mode="auto", gpu={"may_lock": False})
    assert set(job.train(5)) == {"observe"}
    assert len(job.close()) == 5
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "this process may not set clocks" in warning
    assert 'With "required": true this is an error' in warning


@pytest.mark.parametrize("block", [{"mode": "auto", "required": True}, {"mode": "profile"}])
def test_a_job_that_cannot_do_without_clocks_ends_before_training(tmp_path, block):
    with pytest.raises(GpuPermissionError, match="may not set clocks"):
        VirtualJob(tmp_path, gpu={"may_lock": False}, **block)
    assert not (tmp_path / "run.jsonl").exists()


def test_ranks_that_begin_with_different_orders_are_an_error_before_training():
    description = described()
    first, second = description.ranks
    ranks = first, structs.replace(second, key=first.key + 1)
    with pytest.raises(ScheduleError, match="Rank 1 begins with another order than rank 0"):
        Job.of(structs.replace(description, ranks=ranks))


def server(folder, **block):
    return JobServer(Job.of(described(output_dir=str(folder), **block)), lambda rank, message: None)


def test_a_frontier_that_is_not_there_is_an_error_before_training(tmp_path):
    with pytest.raises(ConfigError, match="nowhere does not exist on rank 0's node"):
        server(tmp_path, mode="run", frontier=str(tmp_path / "nowhere"))
    with pytest.raises(FrontierError, match="no such file; expected a frontier"):
        server(tmp_path, mode="run", frontier=str(tmp_path))


def test_a_plan_that_does_not_fit_is_an_error_before_training(tmp_path):
    for schedule, clock_mhz, message in (
        (one_f_one_b(ranks=2, micro_batches=3), CLOCK_MHZ, "Plan does not fit this schedule: rank 0, instruction"),
        (TWO_STAGES, 1111, "Plan does not fit this GPU: .* lacks 1111 MHz"),
    ):
        folder = tmp_path / str(clock_mhz)
        save_random_plan(folder, schedule, clocks_mhz=(clock_mhz,))
        with pytest.raises(PerseusError, match=message):
            server(tmp_path, mode="run", frontier=str(folder))
    assert not (tmp_path / "run.jsonl").exists()


def test_a_loop_may_go_on_after_closing(start, frontier, caplog):
    """The job catches SIGTERM, saves a checkpoint and continues."""
    job = start(mode="run", frontier=frontier, **SLOWER)
    job.train(5)
    assert job.gpu.locked_clock_mhz < job.gpu.model.top_clock_mhz
    before = job.close()
    job.train(2)
    assert job.close() == before
    assert not caplog.records
    assert job.gpu.locked_clock_mhz == job.gpu.model.top_clock_mhz


def test_the_process_that_optimises_does_not_outlive_its_phase(start):
    job = start(mode="auto", **SLOWER)
    job.worker = OptimizeWorker
    job.train_until("optimizing")
    job.train(1)
    assert optimizing()
    job.close()
    assert not optimizing()


def optimizing():
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "perseus_ds.optimizer.worker" in " ".join(child.cmdline())]


def test_equal_schedules_are_sent_once_and_read_once(monkeypatch):
    content = encode(described(TWO_STAGES, pipelines=100))
    assert content.count(b'"ranks"') == 2
    read, to_schedule = [], ScheduleStreams.to_schedule
    monkeypatch.setattr(ScheduleStreams, "to_schedule", lambda streams: read.append(1) or to_schedule(streams))
    job = Job.of(decode_description(content))
    assert len(read) == 2
    assert job.schedule.ranks == TWO_STAGES.ranks
    assert job.world_size == 200


def test_stages_that_do_not_wait_for_each_other_are_an_error_before_training_unless_it_is_only_observed():
    passes = tuple(tuple(own for own in stream if isinstance(own, Compute)) for stream in TWO_STAGES.ranks)
    independent = replace(TWO_STAGES, ranks=passes)
    with pytest.raises(ScheduleError, match="backward of micro-batch 0 on stage 0 on rank 0 can begin before"):
        Job.of(described(independent, mode="auto"))
    assert Job.of(described(independent, mode="observe")).schedule.ranks == passes


def keys(*limits_w):
    """Return the keys of a job's profile and of the job, given the power limits of its GPUs."""
    limits = [GpuSettings(power_limit_w=limit_w).model_dump(mode="json") for limit_w in limits_w]
    gpus = [{"gpu": GpuFacts(name="simulated", settings=settings, simulated=True)} for settings in limits]
    schedule = one_f_one_b(ranks=1, micro_batches=1)
    job = Job.of(described(schedule, pipelines=len(limits_w), of_ranks=gpus))
    return job.profile_key(), job.key


def test_plans_are_kept_for_the_settings_of_all_gpus_and_jobs_are_told_apart_without_them():
    assert keys(400, 400) == keys(400, 400)
    profile_key, job_key = keys(400, 300)
    assert profile_key != keys(400, 400)[0]
    assert job_key == keys(400, 400)[1], "jobs under different limits can be compared"
