"""``perseus-ds partition``: where to cut a Hugging Face model into stages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from perseus_ds.cli.values import Count, OptionalAmount, OptionalCount, Text

if TYPE_CHECKING:
    from perseus_ds.optimizer.partition import Partition as Cuts


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Find where to cut a Hugging Face model into stages: the fastest cut, and the most frugal of those as fast.

    Each layer is measured alone on this machine's GPU, the embedding and the head included. Without a GPU, or with
    --gpu, one is simulated, and the work of a layer follows from its floating-point operations.
    """

    examples = (
        "perseus-ds partition Qwen/Qwen3-0.6B --stages 8 --micro-batches 32",
        "perseus-ds partition my-model --stages 4 --micro-batches 16 --gpu h100-sxm --memory-gib 80",
    )

    model: Positional[str]
    """name on the hub, or a folder with config.json"""
    stages: Count
    """stages of the pipeline"""
    micro_batches: Count
    """micro-batches per iteration"""
    schedule: str = "1f1b"
    """1f1b, dualpipev or package.module:Class, which is imported"""
    micro_batch_size: Count = 1
    """sequences in a micro-batch"""
    sequence_length: OptionalCount = None
    """tokens in a sequence; by default 2048, or as many as the model takes"""
    gradient_checkpointing: bool = False
    """activations are computed again in the backward pass"""
    memory_gib: OptionalAmount = None
    """what a stage may need at most [GiB]; by default the GPU's memory, no limit if it is simulated"""
    gpu: Text = None
    """GPU to simulate: a100-sxm, a40, h100-sxm or h200"""

    def execute(self) -> int:
        from perseus_ds.cli.inputs import check_size, find_schedule
        from perseus_ds.huggingface.partition import partition

        check_size(self.stages, self.micro_batches)
        find_schedule(None, self.schedule)  # what DeepSpeed says on import is not shown
        options = asdict(self)
        found = partition(options.pop("model"), **options)
        where = f"{self.stages} stages, {self.micro_batches} micro-batches, {found.costs.gpu}"
        print(f"{self.model}, {where}\n{table_of(found)}")
        return 0


def table_of(found: Cuts) -> str:
    """Return the cuts side by side, what is proven of them, and the cut to train with."""
    from perseus_ds.units import joules, number, percent, plain

    named = {
        "uniform": found.uniform,
        "parameters": found.parameters,
        "fastest": found.fastest,
        "most frugal": found.most_frugal,
    }
    planned = len(found.costs.clocks_mhz) > 1
    width = max(len(str(list(each.cut))) for each in named.values())
    lines = [f"{'cut':12} {'layers':{width}}  iteration  default clocks  under Perseus     memory"]
    for name, each in named.items():
        under = joules(each.planned_j) if planned else "-"
        lines.append(
            f"{name:12} {list(each.cut)!s:{width}} {number(each.time_s):>8} s {joules(each.energy_j):>15} "
            f"{under:>14} {each.memory_bytes / 2**30:6.1f} GiB"
        )
    lines.append(
        "No cut is faster than the fastest one: proven."
        if not found.time_gap
        else f"A cut may be faster, by at most {percent(found.time_gap)}: the search was ended."
    )
    if planned:
        lines.append(
            f"No cut as fast has a plan of less energy than {joules(found.energy_bound_j)}; the most frugal one found "
            f"is {percent(found.energy_gap, 2)} above that."
        )
    lines.append("Energies are per iteration of one pipeline, one GPU per rank; transfers and the tail take no time.")
    if found.costs.simulated:
        lines.append("The GPU is SIMULATED: nothing was measured, work follows from floating-point operations.")
    lines.append(f"Train with cut={list(found.cut)}.")
    return "\n".join(map(plain, lines))
