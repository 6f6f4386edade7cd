"""A user's training job: a small PipelineModule on real DeepSpeed ranks.

The argument is a folder with ``job.json``. Every rank writes ``rank<N>.json`` into it, with losses by step, a hash of
its weights and the state of Perseus, and writes its process id into ``pid<N>``. A test controls a running job by files
in the folder: the job ends after the step during which ``stop`` appears, and the pipeline ``slow_pipeline`` is slow
while ``slow`` exists. A job with ``end_by`` ends in that manner when ``end`` appears. A job with ``survives_term``
continues to train after SIGTERM. A job with ``followed`` writes each loss to ``losses.csv``, and saves a checkpoint
when ``save`` appears, which it then removes.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import deepspeed
import psutil
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from job_parts import WIDTH, Block, batches, config, hash_of, leave_out_shared_memory, of_rank_0, steps_of
from torch import nn

import perseus_ds

leave_out_shared_memory()


class NormedBlock(Block):
    """Has batch statistics, too, which a careless profiler would change."""

    def __init__(self, repeat: int) -> None:
        super().__init__(repeat)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(hidden))


class HalfPrecisionCpu(CPU_Accelerator):
    """Enables fp16, which torch supports on any CPU, but DeepSpeed only on the newest."""

    def is_fp16_supported(self) -> bool:
        return True


def pipeline_module(job: dict) -> PipelineModule:
    common = {
        "layers": [LayerSpec(NormedBlock, repeat) for repeat in job["work"]],
        "num_stages": job["stages"],
        "loss_fn": nn.MSELoss(),
        "partition_method": "uniform",
        "activation_checkpoint_interval": job.get("checkpoint_every", 0),
    }
    if job.get("dualpipev"):
        from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

        return DualPipeVModule(**common)
    if "mixed" in job:
        common["dynamic_shape"] = True  # DeepSpeed 0.14.4 does not have it
    module = PipelineModule(**common, seed_layers=True, base_seed=7)
    return module.to(dtype_of(job))  # buffers as well, which DeepSpeed leaves in fp32


def dtype_of(job: dict) -> torch.dtype:
    keys = job.get("deepspeed", {})
    return torch.half if "fp16" in keys else torch.bfloat16 if "bf16" in keys else torch.float32


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    if job.get("survives_term"):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    torch.set_num_threads(1)
    if dtype_of(job) is torch.half:
        set_accelerator(HalfPrecisionCpu())
    timeout = timedelta(seconds=job.get("timeout_s", 1800))
    # For groups that DeepSpeed creates later without passing a timeout.
    torch.distributed.distributed_c10d.default_pg_timeout = timeout
    deepspeed.init_distributed("gloo", timeout=timeout)
    torch.manual_seed(11)
    module = pipeline_module(job)
    for layer in module.forward_funcs[: max(0, job.get("frozen_layers", 0) - module._local_start)]:
        layer.requires_grad_(False)
    settings = config(8, job["micro_batches"], **job.get("deepspeed", {}))
    if job.get("perseus") is not None:
        settings["perseus"] = job["perseus"]
    engine, *_ = perseus_ds.initialize(
        # An optimizer needs parameters, even if all are frozen.
        model=module,
        model_parameters=list(module.parameters()),
        config=settings,
    )
    rank = torch.distributed.get_rank()
    nan_at = job["nan_step"] * job["micro_batches"] if "nan_step" in job else None
    buckets = [size for size in job.get("buckets", [8]) for _ in range(job["micro_batches"])]
    buckets = [size for of_iteration in job["mixed"] for size in of_iteration] if "mixed" in job else buckets
    data = batches(100 + engine.grid.get_data_parallel_id(), buckets, dtype_of(job), nan_at)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    report = train(engine, module, data, job, folder)
    perseus = getattr(engine, "perseus", None)
    runs = perseus is not None and perseus.runtime is not None
    report |= {
        "engine": type(engine).__name__,
        "weights": hash_of(module.state_dict().items()),
        "random": torch.rand(1).item(),
        "skipped_steps": engine.skipped_steps,
        "plan": runs and perseus.plan is not None,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(engine, module, data, job: dict, folder: Path) -> dict:
    """Train until the job's last step, phase or stop, and return the report."""
    losses: list[float] = []
    resources: list[dict[str, int]] = []
    if "goal" in job:
        engine.perseus.set_goal(job["goal"])
    first = resume(engine, module, data, job)
    rank = torch.distributed.get_rank()
    seeded = bool({"save_at_end", "resume_from", "followed"} & job.keys())
    slow = SlowPipeline(engine, job["slow_pipeline"], folder / "slow") if "slow_pipeline" in job else None
    for number in steps_of(job, getattr(engine, "perseus", None)):
        step = first + number
        if seeded:
            torch.manual_seed(step)
        if slow:
            slow.update()
        change_batch(engine, job, step)
        losses.append(float(engine.train_batch(data)))
        follow(engine, job, folder, step, losses[-1])
        if "keep_every" in job and (step + 1) % job["keep_every"] == 0:
            engine.save_checkpoint(job["resume_from"])
        if of_rank_0((folder / "stop").exists()):
            break
        if step == job.get("evaluate_after"):
            losses.append(float(engine.eval_batch(batches(3))))
        if step in job.get("look_after", ()):
            resources.append(resources_of(engine))
        if "end_by" in job and of_rank_0((folder / "end").exists()):
            end(job["end_by"], rank)
    if job.get("save_at_end"):
        engine.save_checkpoint(str(folder / "checkpoint"))
    return {"losses": losses, "resources": resources}


def change_batch(engine, job: dict, step: int) -> None:
    """Prepare the engine for batches with other shapes or numbers of micro-batches."""
    if "buckets" in job:
        engine.reset_activation_shape()
    if "counts" in job:
        count = job["counts"][step % len(job["counts"])]
        engine.set_train_batch_size(8 * count * engine.grid.data_parallel_size)


def follow(engine, job: dict, folder: Path, step: int, loss: float) -> None:
    """Write the loss of a step, and save a checkpoint if requested, in a ``followed`` job."""
    if not job.get("followed"):
        return
    if torch.distributed.get_rank() == 1:  # rank 0's disk may be full
        with (folder / "losses.csv").open("a") as file:
            file.write(f"{step},{loss!r}\n")
    if of_rank_0((folder / "save").exists()):
        engine.save_checkpoint(str(folder / "checkpoint"))
        if torch.distributed.get_rank() == 0:
            (folder / "save").unlink()


def resources_of(engine) -> dict[str, int]:
    """Return the resources that must not grow in a job of several weeks."""
    gc.collect()
    process = psutil.Process()
    return {
        "memory_bytes": process.memory_info().rss,
        "objects": len(gc.get_objects()),
        "threads": process.num_threads(),
        "handles": process.num_fds(),
    }


def resume(engine, module, data, job: dict) -> int:
    """Load a checkpoint, continue data and seeds from there, and return the next step.

    A job with ``keep_every`` saves into the folder that it resumes from, which is empty in its first run.
    """
    if "resume_from" not in job or ("keep_every" in job and not Path(job["resume_from"], "latest").exists()):
        return 0
    engine.load_checkpoint(job["resume_from"])
    module.micro_offset = engine.global_steps * job["micro_batches"]  # seeds the layers; DeepSpeed does not restore it
    for _ in range(engine.global_steps * job["micro_batches"]):
        next(data)
    return engine.global_steps


class SlowPipeline:
    """Makes all instructions of one pipeline slower while a file exists, like a throttled node."""

    def __init__(self, engine, job: dict, file: Path) -> None:
        self.factor = job["factor"]
        self.file = file
        self.engine = engine
        self.affected = engine.grid.get_data_parallel_id() == job["pipeline"]
        self.is_slow = False

    def update(self) -> None:
        if self.affected and self.file.exists() != self.is_slow:
            self.is_slow = not self.is_slow
            simulated = self.engine.perseus.runtime.simulated
            simulated.calibrate(simulated.seconds_per_flop * (self.factor if self.is_slow else 1 / self.factor))


def end(how: str, rank: int) -> None:
    if how == "exception":
        raise RuntimeError("the user's own mistake")
    if how == "kill" and rank != 1:
        return
    os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))


if __name__ == "__main__":
    main()
