"""Trains other people's code on CPUs with and without Perseus, and compares the results.

    python benchmarks/clients/run.py megatron-lm-1f1b ~/Megatron-LM

The client's code is not changed. ``sitecustomize.py`` in this folder replaces CUDA, and GPUs are simulated. After each
iteration, every rank records losses and all other results of the client's function for a training step, hashes of all
parameters and optimizer states, and a hash of the states of random generators. For each mode, the output states whether
they are bitwise equal to those without Perseus, or the first difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIMULATED = {"longest_instruction_s": 0.012, "counter_period_s": 0.01, "lock_latency_s": 0.001}
BLOCK = {
    "device": "simulated",
    "simulated": SIMULATED,
    "profile": {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8},
    "goal": {"max_slowdown": None},
    "cache": False,
}
# Code is interpreted instead of compiled.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTORCH_JIT": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
FILES = {"text": "text.jsonl", "data": "data", "model": "model", "config": "config.json"}


@dataclass(frozen=True, kw_only=True)
class Client:
    """Command that starts a client.

    Attributes:
        script: Script or module, as arguments of ``python``.
        arguments: Its arguments, in which ``{steps}``, ``{out}`` (a folder), ``{data}`` and ``{model}`` (created by
            ``prepare``) and ``{config}`` (a file with the configuration) are replaced.
        record: A function that is called once per training step, see ``sitecustomize.py``. Its arguments or results
            contain the losses, and in most clients the norm of the gradients.
        ranks: Number of processes.
        prepare: Scripts with arguments that create ``{model}``, and ``{data}`` from ``{text}``, a file with one JSON
            object per line.
        config: Its configuration, written to a JSON file. The same files and ``"{steps}"`` are replaced in it.
        folder: Working folder, relative to the folder of its code.
        replaced: Functions that need a GPU, and their replacements.
        empty: Modules that it imports but does not need.
        launcher: Arguments of ``python`` that start the ranks.
        with_perseus: Script that is started instead, so that Perseus is attached.
    """

    script: str
    arguments: str
    record: str
    ranks: int = 2
    prepare: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    folder: str = "."
    replaced: dict[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    launcher: str = "-m torch.distributed.run --standalone --nproc_per_node {ranks}"
    with_perseus: str = "-m perseus_ds.launch {script}"


def megatron_lm(layout: str, ranks: int) -> Client:
    return Client(
        script="pretrain_gpt.py",
        arguments=layout + " --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters {steps} --lr 1e-3 "
        "--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 "
        "--eval-interval 20 --eval-iters 1 --log-interval 10 --transformer-impl local --distributed-backend gloo "
        "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
        "--no-masked-softmax-fusion --no-persist-layer-norm --untie-embeddings-and-output-weights",
        record="megatron.training.training:train_step",
        ranks=ranks,
        replaced={"megatron.legacy.fused_kernels:load": "sitecustomize:Nothing"},
    )


def alexnet() -> Client:
    return Client(
        folder="training/pipeline_parallelism",
        script="train.py",
        arguments="--deepspeed_config {config} --pipeline-parallel-size 2 --steps {steps} --backend gloo",
        config={
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        },
        record="deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
        replaced={"torchvision.datasets:CIFAR10": "sitecustomize:random_pictures"},
        empty=("torchvision._meta_registrations",),
    )


def megatron_deepspeed() -> Client:
    return Client(
        script="pretrain_gpt.py",
        arguments="--pipeline-model-parallel-size 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --num-layers 4 --micro-batch-size 2 --global-batch-size 8 --train-iters {steps} "
        "--lr 1e-3 --lr-decay-style constant --data-path {data}_text_document --data-impl mmap "
        "--tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --eval-interval 20 --eval-iters 1 "
        "--log-interval 10 --no-query-key-layer-scaling --no-gradient-accumulation-fusion --no-bias-gelu-fusion "
        "--no-bias-dropout-fusion --no-masked-softmax-fusion --distributed-backend gloo "
        "--deepspeed --deepspeed_config {config}",
        config={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0},
        record="deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
        prepare=(
            "tools/preprocess_data.py --input {text} --output-prefix {data} --dataset-impl mmap --workers 1 "
            "--append-eod --tokenizer-type NullTokenizer --vocab-size 127",
        ),
        replaced={"megatron.fused_kernels:load": "sitecustomize:Nothing"},
        empty=("torchvision", "deepspeed.compression.compress"),
    )


def gpt_neox() -> Client:
    sizes = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
    }
    training = {"train_iters": "{steps}", "eval_iters": 0, "log_interval": 10, "split": "100,0,0"}
    return Client(
        script="train.py",
        launcher="deepy.py",
        arguments="{config}",
        with_perseus="{here}/gpt_neox_train.py",
        config={
            **sizes,
            **training,
            "pipe_parallel_size": 2,
            "model_parallel_size": 1,
            "no_weight_tying": False,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "lr_decay_style": "constant",
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "checkpoint_activations": True,
            "precision": "fp32",
            "data_path": "{data}_text_document",
            "data_impl": "mmap",
            "tokenizer_type": "HFTokenizer",
            "vocab_file": "{model}/tokenizer.json",
            "distributed_backend": "gloo",
        },
        record="deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
        replaced={"deepspeed.ops.adam:FusedAdam": "torch.optim:AdamW"},
        prepare=(
            "{here}/tiny_llama.py {model}",
            "tools/datasets/preprocess_data.py --input {text} --output-prefix {data} --dataset-impl mmap --workers 1 "
            "--append-eod --tokenizer-type HFTokenizer --vocab-file {model}/tokenizer.json",
        ),
    )


def torchtitan(schedule: str) -> Client:
    return Client(
        script="-m torchtitan.train",
        arguments="--job.config_file torchtitan/models/llama3/train_configs/debug_model.toml "
        "--training.steps {steps} --training.seq_len 32 --training.local_batch_size 4 --job.dump_folder {out} "
        "--debug.seed 7 --parallelism.pipeline_parallel_degree 2 "
        "--parallelism.pipeline_parallel_schedule " + schedule,
        record="torchtitan.components.metrics:MetricsProcessor.log",
        with_perseus="{here}/torchtitan_train.py",
    )


def qlora_pipe() -> Client:
    training = {
        "micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "pipeline_stages": 2,
        "epochs": 1,
        "steps_per_print": 10,
        "logging_steps": 10,
        "eval_steps": 50,
        "checkpoint_every_n_minutes": 1000,
        "save_dtype": "float32",
    }
    return Client(
        script="train.py",
        arguments="--deepspeed --config {data}.toml",
        config={
            **training,
            "model": "{model}",
            "output_dir": "{data}",
            "model_weight_dtype": "float32",
            "attn_implementation": "sdpa",
            "activation_checkpointing": True,
            "lora_rank": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "datasets": [
                {"dataset_path": "{text}", "dataset_type": "textfile", "sequence_len": 51, "eval_size": 0.02},
            ],
        },
        record="utils.engine:CustomPipelineEngine.train_batch",
        prepare=(
            "{here}/tiny_llama.py {model}",
            "-c 'import json, sys, toml; toml.dump(json.load(open(sys.argv[1])), open(sys.argv[2], \"w\"))' "
            "{config} {data}.toml",
        ),
        replaced={
            "deepspeed.ops.adam:FusedAdam": "torch.optim:AdamW",
            "models.layers:Fast_CrossEntropyLoss": "sitecustomize:CrossEntropy",
            "utils.engine:CustomPipelineEngine.mem_status": "sitecustomize:Nothing",
            "axolotl.utils.distributed:is_distributed": "torch.distributed:is_initialized",
        },
        empty=("axolotl.utils.data", "kernels"),
    )


CLIENTS = {
    "megatron-lm-1f1b": megatron_lm("--pipeline-model-parallel-size 2 --num-layers 4", 2),
    "megatron-lm-4-ranks": megatron_lm("--pipeline-model-parallel-size 4 --num-layers 4", 4),
    "megatron-lm-interleaved": megatron_lm(
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
        2,
    ),
    "megatron-deepspeed": megatron_deepspeed(),
    "alexnet": alexnet(),
    "gpt-neox": gpt_neox(),
    "torchtitan-1f1b": torchtitan("1F1B"),
    "qlora-pipe": qlora_pipe(),
}


def main() -> None:
    arguments = parse()
    client = CLIENTS[arguments.client]
    arguments.out /= arguments.client
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    prepare(client, arguments)
    without = train(client, arguments, "without")
    print(f"without Perseus: {len(without[0])} iterations on {len(without)} ranks", flush=True)
    for mode in arguments.modes:
        found = train(client, arguments, mode)
        runs = runs_under_a_plan(arguments.out / mode / "perseus" / "run.jsonl")
        print(f"{mode}: {difference(without, found)}; {runs} iterations under a plan", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("code", type=lambda path: Path(path).resolve(), help="folder of the client's code")
    parser.add_argument("--out", type=lambda path: Path(path).resolve(), default="runs/clients", help="for outputs")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--modes", nargs="*", default=["auto", "run", "profile", "observe"], help="run follows auto")
    return parser.parse_args()


def prepare(client: Client, arguments: argparse.Namespace) -> None:
    """Create the data and the configuration that the client reads."""
    config = json.dumps(client.config).replace('"{steps}"', str(arguments.steps))
    for name, file in FILES.items():
        config = config.replace(f"{{{name}}}", str(arguments.out / file))
    (arguments.out / "config.json").write_text(config)
    numbers = random.Random(1)
    texts = [" ".join(str(numbers.randrange(127)) for _ in range(100)) for _ in range(300)]
    (arguments.out / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for number, command in enumerate(client.prepare):
        start(client, arguments, f"prepare{number}", command, {})


def train(client: Client, arguments: argparse.Namespace, mode: str) -> list[list[str]]:
    """Train in a mode and return the record of each rank."""
    script, environment = client.script, {}
    if mode != "without":
        script = client.with_perseus.format(here=HERE, script=script)
        block: dict[str, Any] = {**BLOCK, "mode": mode, "output_dir": str(arguments.out / mode / "perseus")}
        block |= {"frontier": str(arguments.out / "auto" / "perseus")} if mode == "run" else {}
        environment["PERSEUS"] = json.dumps(block)
    launcher = client.launcher.format(ranks=client.ranks)
    out = start(client, arguments, mode, f"{launcher} {script} {client.arguments}", environment)
    return [(out / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(client.ranks)]


def start(client: Client, arguments: argparse.Namespace, name: str, command: str, more: dict[str, str]) -> Path:
    """Run Python with a command and return the folder of its output.

    Raises:
        SystemExit: It failed.
    """
    out: Path = arguments.out / name
    out.mkdir()
    job: dict[str, Any] = {"code": str(arguments.code), "out": str(out), "record": client.record}
    job |= {"replaced": client.replaced, "empty": client.empty}
    path = os.pathsep.join([str(HERE), str(arguments.code), str(ROOT), os.environ.get("PYTHONPATH", "")])
    places = {"here": HERE} | {name: arguments.out / file for name, file in FILES.items()}
    words = shlex.split(command.format(steps=arguments.steps, out=out, **places))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "CLIENT": json.dumps(job), **more}
    with (out / "log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=arguments.code / client.folder,
            env={**environment, "LOCAL_SIZE": str(client.ranks)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        sys.exit(f"{name}: ended with {ended.returncode}, see {out / 'log'}")
    return out


def difference(without: list[list[str]], found: list[list[str]]) -> str:
    """Return a statement that two jobs have the same results, or their first difference."""
    assert without[0], "nothing was recorded"
    for step, (ours, theirs) in enumerate(zip(zip(*without, strict=True), zip(*found, strict=True), strict=False)):
        for rank, (one, other) in enumerate(zip(map(json.loads, ours), map(json.loads, theirs), strict=True)):
            if differing := [key for key in one if one[key] != other[key]]:
                return f"iteration {step}, rank {rank}: {', '.join(differing)} differ"
    if len(without[0]) != len(found[0]):
        return f"{len(found[0])} iterations, not {len(without[0])}"
    return "losses, parameters, optimizer states and random states are the same"


def runs_under_a_plan(file: Path) -> int:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return sum(record.get("phase") == "run" for record in records)


if __name__ == "__main__":
    main()
