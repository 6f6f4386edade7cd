"""Share of the savings of Perseus that a better cut of the model into stages would have saved.

    python benchmarks/partition.py                    # five models on two GPUs, about 5 minutes
    python benchmarks/partition.py --models llama-3.1-8b --gpus h100-sxm

GPUs are *simulated*: the time of a layer follows from its floating-point operations and the device model, and
operations that only move memory take no time. Models are shapes without weights. GPT-3 and BERT-huge are represented by
GPT-NeoX models of their sizes, which have the same matrix products. The schedule is 1F1B with 32 micro-batches of one
sequence.

Figures are relative to *uniform* (equally many layers on each stage) at default clocks. Under Perseus, each cut runs
the plan of least energy that is as fast as that cut at default clocks. In the last column, it runs the plan of least
energy that is as fast as *uniform*. Below the table are:

- the saving of a better cut at default clocks, as a share of the saving of Perseus with *uniform*,
- the saving of Perseus with either cut, relative to the same cut at default clocks,
- the distances of the cuts from their bounds.
"""

from __future__ import annotations

import argparse
import logging
import time

from transformers import GPTNeoXConfig, LlamaConfig, PretrainedConfig

from perseus_ds.huggingface.partition import simulated_costs
from perseus_ds.layouts.partition import Partition, best_partition, shares_of
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.simulation.device_models import DEVICES


def neox(width: int, layers: int, heads: int, vocabulary: int) -> PretrainedConfig:
    return GPTNeoXConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )


def llama(width: int, layers: int, heads: int, inner: int) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        vocab_size=128_256,
        max_position_embeddings=8192,
    )


# Name -> configuration, tokens in a sequence, stages.
MODELS = {
    "gpt3-2.7b": (neox(2560, 32, 32, 50_257), 2048, 8),
    "gpt3-175b": (neox(12_288, 96, 96, 50_257), 2048, 8),
    "bert-huge": (neox(2048, 24, 32, 30_522), 512, 8),
    "llama-3.1-8b": (llama(4096, 32, 32, 14_336), 2048, 8),
    "llama-3.2-1b": (llama(2048, 16, 32, 8192), 2048, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", choices=DEVICES, default=["a100-sxm", "h100-sxm"])
    parser.add_argument("--micro-batches", type=int, default=32)
    arguments = parser.parse_args()
    print("| model | GPU | cut | layers | time | default clocks | Perseus | Perseus, at the time of uniform |")
    print("|---|---|---|---|---|---|---|---|")
    notes = []
    for name in arguments.models:
        config, tokens, stages = MODELS[name]
        schedule = read_schedule(schedule_class("1f1b"), ranks=stages, micro_batches=arguments.micro_batches)
        for gpu in arguments.gpus:
            begin_s = time.process_time()
            found = best_partition(simulated_costs(config, DEVICES[gpu], (1, tokens)), schedule)
            taken_s = time.process_time() - begin_s
            base = found.known["uniform"]
            cuts = {**found.known, "fastest": found.fastest, "most frugal": found.most_frugal}
            for cut_name, each in cuts.items():
                profile = found.costs.profile(shares_of(each.cut))
                frontier = optimize(schedule, profile, plans=40)
                in_time = frontier.lookup(base.time_s).energy_j if each.time_s <= base.time_s * (1 + 1e-9) else None
                energies_j = (each.energy_j, each.planned_j, in_time)
                cells = [name, gpu, cut_name, " ".join(map(str, each.cut)), change(each.time_s, base.time_s)]
                cells += [change(energy_j, base.energy_j) for energy_j in energies_j]
                print(f"| {' | '.join(cells)} |", flush=True)
            notes.append(f"{name}, {gpu}: {share(found)}; {taken_s:.0f} s of processor time")
    print("\n" + "\n".join(notes))


def change(value: float | None, base: float) -> str:
    """Return a change relative to a base."""
    return "" if value is None else f"{100 * (value / base - 1):+.1f} %"


def share(found: Partition) -> str:
    """Return the share of Perseus's saving that a better cut has, and how close the cuts are to bounds."""
    base, best = found.known["uniform"], found.fastest
    of_saving = (base.energy_j - best.energy_j) / (base.energy_j - base.planned_j)
    return (
        f"the fastest cut alone saves {of_saving:.0%} of what Perseus saves with uniform; Perseus saves "
        f"{1 - base.planned_j / base.energy_j:.1%} with uniform and {1 - best.planned_j / best.energy_j:.1%} with the "
        f"fastest cut; that one is {found.time_gap:.2%} above its bound, the most frugal one {found.energy_gap:.2%}"
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
