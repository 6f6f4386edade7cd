"""Train a small GPT with Megatron-Core. The code contains nothing of Perseus.

    PERSEUS='{"enabled": true}' torchrun --nproc_per_node 2 -m perseus_ds.launch examples/megatron/train.py

Without GPUs the model trains on CPUs with gloo and replacements of CUDA (cpu.py), and Perseus sets the clocks of
SIMULATED GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

BYTES = 256


def make_model(arguments: argparse.Namespace, device: torch.device) -> list[Any]:
    """Return this rank's parts of the model: one for each of its (virtual) stages."""
    virtual = arguments.virtual_stages if arguments.virtual_stages > 1 else None
    config = TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.width,
        num_attention_heads=arguments.heads,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        # The last stage also has the head, so stages with equally many layers are not equally fast.
        num_layers_in_first_pipeline_stage=arguments.first_layers,
        pipeline_model_parallel_layout=arguments.layout,
        tensor_model_parallel_size=arguments.tensor_parallel,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
    )
    parts = []
    for number in range(arguments.virtual_stages):
        part = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=arguments.vocabulary,
            max_sequence_length=arguments.length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            vp_stage=number if virtual else None,
        )
        parts.append(DistributedDataParallel(config, DistributedDataParallelConfig(), part.to(device)))
    config.finalize_model_grads_func = finalize_model_grads
    return parts


def read_batches(arguments: argparse.Namespace, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield micro-batches from the source of Python's standard library, with one token per byte."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
    tokens = torch.tensor(list(text), device=device)
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        starts = torch.randint(len(tokens) - arguments.length - 1, (arguments.rows, 1), generator=generator).to(device)
        yield tokens[starts + torch.arange(arguments.length + 1, device=device)]


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch and the values to report."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through a part of the model. Called by Megatron-Core."""
    batch = next(batches)
    positions = torch.arange(batch.shape[1] - 1, device=batch.device).expand(batch.shape[0], -1)
    return model(batch[:, :-1], positions, None, labels=batch[:, 1:]), loss_func


def main() -> None:
    """Train."""
    arguments = read_arguments()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        importlib.import_module("cpu").stand_in_for_cuda()
        torch.set_num_threads(1)  # the ranks share the cores
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tensor_parallel,
        pipeline_model_parallel_size=arguments.stages or dist.get_world_size() // arguments.tensor_parallel,
        virtual_pipeline_model_parallel_size=arguments.virtual_stages if arguments.virtual_stages > 1 else None,
    )
    torch.manual_seed(1)
    if cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = make_model(arguments, device)
    # Gradient clipping tests whether gradients are on CUDA.
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0 if cuda else 0.0), model
    )
    data = [read_batches(arguments, device) for _ in model]
    single = len(model) == 1
    for step in range(1, arguments.steps + 1):
        for part in model:
            part.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data[0] if single else data,
            model=model[0] if single else model,
            num_microbatches=arguments.micro_batches,
            seq_length=arguments.length,
            micro_batch_size=arguments.rows,
        )
        optimizer.step()
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0 and step % arguments.log_every == 0:
            print(f"step {step:4}  loss {sum(loss['loss'].item() for loss in losses) / len(losses):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def read_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, help="ranks per pipeline (default: all)")
    parser.add_argument("--virtual-stages", type=int, default=1, help="stages per rank (interleaved if above 1)")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--first-layers", type=int, help="layers of the first stage (the others share the rest)")
    parser.add_argument("--layout", help="parts of each stage, such as Ettt|tL (see perseus-ds partition)")
    parser.add_argument("--vocabulary", type=int, default=BYTES, help="size of the vocabulary, at least 256")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--rows", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
