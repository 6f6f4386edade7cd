"""Jobs that train a GPT with Megatron-Core on real gloo ranks, one after the other.

Started by ``job.run_jobs``. The report of each job has the losses, gradient norms, a hash of the parameters and the
next random number after each step, and which changes by Perseus are left at the end.

Megatron-Core needs CUDA; here it uses the stand-ins of ``examples/megatron/cpu.py``, and is otherwise unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import megatron.core

# Otherwise imported later, after the stand-ins are in place.
import megatron.core.dist_checkpointing.strategies.filesystem_async
import megatron.core.dist_checkpointing.strategies.state_dict_saver
import megatron.core.dist_checkpointing.strategies.torch
import megatron.core.models.common.model_chunk_schedule_plan
import megatron.core.models.gpt.fine_grained_callables
import torch
import torch.distributed as dist
from job_parts import train_jobs, train_steps
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils, token_dispatcher

import perseus_ds
from examples.megatron.cpu import stand_in_for_cuda
from perseus_ds.errors import PerseusError

VOCABULARY, LENGTH, WIDTH, ROWS = 64, 8, 16, 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 defines it with Transformer Engine only
    token_dispatcher.maybe_move_tensor_to_cpu = already_on_cpu
    train_jobs(train)


def already_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert a CPU tensor if requested, as Megatron's function does for CUDA tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def model_of(job: dict[str, Any]) -> list[Any]:
    """Return this rank's parts of a GPT, each in Megatron's data-parallel wrapper."""
    chunks, half = job.get("chunks", 1), job.get("combined", False)  # combined 1F1B does not train fp32 models
    overlap = job.get("overlap", chunks > 1)
    config = TransformerConfig(
        num_layers=job.get("layers", 4),
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        tensor_model_parallel_size=job.get("tensor", 1),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=job.get("first_layers"),
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        num_moe_experts=job.get("experts"),
        expert_model_parallel_size=job.get("expert", 1),
        moe_token_dispatcher_type="alltoall",
        add_bias_linear="experts" not in job,
        overlap_moe_expert_parallel_comm=job.get("combined", False),
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        calculate_per_token_loss=job.get("per_token", False),
        variable_seq_lengths="mixed" in job,
    )
    parts = []
    for chunk in range(chunks):
        part = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=job.get("experts")),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=False,
            vp_stage=chunk if chunks > 1 else None,
        )
        parts.append(
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(use_distributed_optimizer=job.get("distributed", False)),
                Float16Module(config, part) if half else part,
            )
        )
    config.finalize_model_grads_func = finalize_model_grads
    return parts


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def sum_of_losses(tokens: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum the losses of some of the tokens, and count these tokens."""
    is_trained = tokens < VOCABULARY // 2
    loss = (output.float() * is_trained).sum()
    return loss, is_trained.sum().int(), {"loss": loss.detach().clone()}


def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> tuple[torch.Tensor, Any]:
    # Each context-parallel rank has its part of a sequence; attention between the parts needs Transformer Engine.
    parts, part = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    whole = next(data)
    positions = torch.arange(whole.shape[1]).expand_as(whole)
    tokens, positions = (each.chunk(parts, dim=1)[part] for each in (whole, positions))
    run = model.build_schedule_plan if return_schedule_plan else model  # a plan of combined 1F1B, which executes it
    loss = partial(sum_of_losses, tokens) if model.config.calculate_per_token_loss else loss_of
    return run(tokens, positions, None, labels=tokens.roll(-1, dims=1)), loss


def batches(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train a model and return its report."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.get("tensor", 1),
        pipeline_model_parallel_size=job["stages"],
        context_parallel_size=job.get("context", 1),
        expert_model_parallel_size=job.get("expert", 1),
        virtual_pipeline_model_parallel_size=job.get("chunks") if job.get("chunks", 1) > 1 else None,
    )
    torch.manual_seed(3 + parallel_state.get_pipeline_model_parallel_rank())
    model = model_of(job)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=model[0].config.bf16,
            clip_grad=1.0,
            use_distributed_optimizer=job.get("distributed", False),
        ),
        model,
    )
    if "versions" in job:
        megatron.core.__version__ = job["versions"][dist.get_rank()]
    if job.get("perseus") is not None:
        try:
            perseus_ds.attach(megatron.core, {**job["perseus"], **job.get("differing", [{}] * 8)[dist.get_rank()]})
        except PerseusError as error:
            parallel_state.destroy_model_parallel()
            return {"error": str(error)}
    session = getattr(megatron.core, "perseus", None)
    torch.manual_seed(11 + dist.get_rank())
    data = [batches(5 + parallel_state.get_data_parallel_rank()) for _ in model]
    counts = job.get("counts", [job.get("micro_batches", 4)])
    norms: list[list[str]] = []

    def step(number: int) -> list[list[str]]:
        micro_batches = counts[number % len(counts)]
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        own = [cut(of_chunk, job, number) for of_chunk in data] if "mixed" in job else data
        losses = [iterate(model, own, micro_batches)]
        norm = gradient_norm(model)
        _, total, _ = optimizer.step()
        norms.append([repr(norm), repr(float(total))])
        if number % job.get("evaluate_every", 1000) == 3:
            losses.append(iterate(model, data, micro_batches, forward_only=True))
        return losses

    report = train_steps(job, session, model, step)
    report["norms"] = norms
    if session is not None:
        perseus_ds.detach(megatron.core)
    report["left"] = [
        hasattr(megatron.core, "perseus"),
        hasattr(schedules.forward_step, "__wrapped__"),
        hasattr(schedules.P2PCommunicator._communicate, "__wrapped__"),
    ]
    parallel_state.destroy_model_parallel()
    return report


def cut(data: Any, job: dict[str, Any], step: int) -> Iterator[torch.Tensor]:
    """Yield the micro-batches of an iteration, each with its own length."""
    for length in job["mixed"][step % len(job["mixed"])]:
        yield next(data)[:, :length]


def iterate(model: list[Any], data: list[Any], micro_batches: int, forward_only: bool = False) -> list[str]:
    """Train or evaluate one iteration, and return its losses on the last stage."""
    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(model) > 1 else data[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=micro_batches,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=forward_only,
    )
    return [repr(losses["loss"].item()) for losses in found]


def gradient_norm(model: list[Any]) -> float:
    """Return the norm of this rank's gradients. Megatron's function requires CUDA tensors."""
    return sum(float(p.main_grad.square().sum()) for chunk in model for p in chunk.parameters()) ** 0.5


if __name__ == "__main__":
    main()
