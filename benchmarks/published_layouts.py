"""Compares layouts published by NVIDIA for large models with ours, by floating-point operations.

    python benchmarks/published_layouts.py            # a minute
    python benchmarks/published_layouts.py --only deepseek-v3

Costs are *computed, not measured*: they are the matrix products of attention (without use of causal masking), of dense
layers, of the experts for each token, and of the head. A backward takes twice as long as a forward, and operations that
only move memory take no time. Layouts are those of Megatron-Bridge's recipes and of the documentation of Megatron-Core,
or Megatron's own split if a recipe has none. Each is executed by 1F1B or interleaved 1F1B with the given micro-batches.

*slowest rank* is the work of the rank with the most work, relative to the mean. *iteration* is the time of the whole
schedule relative to a schedule without bubbles. Ours is the best layout found, and the last column is the amount by
which a better one may be faster.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np

from perseus_ds.artifacts.layout import DENSE, EMBEDDING, HEAD, MOE, MTP, Layout, Part
from perseus_ds.cli.schedules import choose_schedules
from perseus_ds.layouts.balance import may_hold
from perseus_ds.layouts.notations import cut_of_megatron, default_cut_of_megatron, megatron_layout
from perseus_ds.layouts.partition import EvaluatedCut, LayerCosts, best_partition
from perseus_ds.pipeline.instruction import Kind

_FLOPS_PER_S = 1e15


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder, from its configuration on the hub."""

    layers: int
    width: int
    vocabulary: int
    tokens: int
    inner: int
    # Widths of queries, of keys and values, and of the attention's outputs, all heads together.
    queries: int
    keys: int
    # For layers with experts: number of experts per token, including shared ones, and their inner width.
    dense_layers: int | None = None
    experts: int = 0
    expert_inner: int = 0
    mtp: int = 0
    # For multi-head latent attention: ranks of the compressed queries, and of keys and values.
    latent: tuple[int, int] | None = None

    def forward_flops(self, kind: str) -> float:
        """Return the operations of a part's forward for one sequence."""
        if kind == EMBEDDING:
            return 0.0
        if kind == HEAD:  # Megatron-Core runs it on the last stage for each MTP layer as well
            return (1 + self.mtp) * 2.0 * self.tokens * self.width * self.vocabulary
        attention = self._projections() + 2 * self.tokens * (self.queries + self._values())
        if kind == DENSE:
            return 2.0 * self.tokens * (attention / 2 + 3 * self.width * self.inner)
        layer = 2.0 * self.tokens * (attention / 2 + 3 * self.width * self.expert_inner * self.experts)
        if kind == MOE:
            return layer
        # A layer of multi-token prediction projects two inputs to one.
        last = layer if self.experts else self.forward_flops(DENSE)
        return last + 2.0 * self.tokens * 2 * self.width**2

    def _projections(self) -> float:
        """Return twice the weights of the projections of attention."""
        if self.latent is None:
            return 2.0 * self.width * (2 * self.queries + 2 * self.keys)
        of_queries, of_keys = self.latent
        down = self.width * (of_queries + of_keys)
        up = of_queries * self.queries + of_keys * 2 * self._values() + self._values() * self.width
        return 2.0 * (down + up)

    def _values(self) -> int:
        return self.queries if self.latent is None else self.queries * 2 // 3

    def parts(self) -> list[Part]:
        """Return the parts of the model in their order."""
        dense = self.layers if self.dense_layers is None else self.dense_layers
        kinds = [EMBEDDING, *[DENSE] * dense, *[MOE] * (self.layers - dense), *[MTP] * self.mtp, HEAD]
        return [Part(kind=kind) for kind in kinds]


DEEPSEEK_V3 = Model(
    61, 7168, 129_280, 4096, 18_432, queries=128 * 192, keys=0, dense_layers=3, experts=9, expert_inner=2048, mtp=1,
    latent=(1536, 512),
)  # fmt: skip
KIMI_K2 = Model(
    61, 7168, 163_840, 4096, 18_432, queries=64 * 192, keys=0, dense_layers=1, experts=9, expert_inner=2048,
    latent=(1536, 512),
)  # fmt: skip
LLAMA_405B = Model(126, 16_384, 128_256, 8192, 53_248, queries=16_384, keys=1024)
LLAMA_70B = Model(80, 8192, 128_256, 8192, 28_672, queries=8192, keys=1024)
GLM_45V = Model(
    46, 4096, 151_552, 4096, 10_944, queries=96 * 128, keys=8 * 128, dense_layers=1, experts=9, expert_inner=1408
)
LARGE = replace(DEEPSEEK_V3, layers=126)

# Name -> model, pipeline ranks, micro-batches, layout. None means Megatron's own split, counting embedding and loss.
LAYOUTS: dict[str, tuple[Model, int, int, str | None]] = {
    "deepseek-v3, Megatron-Core's documentation": (DEEPSEEK_V3, 16, 64, "Et*3|(tt|)*29,m|L"),
    "deepseek-v3, 16 ranks": (DEEPSEEK_V3, 16, 64, "Et*4|(t*4|)*14tmL"),
    "deepseek-v3, 8 ranks": (DEEPSEEK_V3, 8, 64, "Et*8|(t*8|)*6t*5mL"),
    "deepseek-v3, 4 ranks with 4 stages": (DEEPSEEK_V3, 4, 64, "Et*4|(t*4|)*14tmL"),
    "kimi-k2, 16 ranks with 2 stages": (KIMI_K2, 16, 64, "Et|(tt|)*30L"),
    "kimi-k2, 8 ranks with 2 stages": (KIMI_K2, 8, 64, "Et*4|(t*4|)*14tL"),
    "llama-3-405b, 16 ranks": (LLAMA_405B, 16, 64, None),
    "llama-3-405b, 8 ranks with 2 stages": (LLAMA_405B, 8, 64, None),
    "llama-3-70b, 8 ranks with 5 stages": (LLAMA_70B, 8, 64, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"),
    "126 layers, 3 of them dense, 1 MTP, 16 ranks with 4 stages": (LARGE, 16, 64, "Ett|(tt|)*62,mL"),
    "glm-4.5v without its vision encoder, 4 ranks": (GLM_45V, 4, 64, "Et*11|t*12|t*12|t*11L"),
    "glm-4.5v without its vision encoder, 8 ranks": (GLM_45V, 8, 64, "Et*5|(t*6|)*6t*5L"),
}
_STAGES = {"llama-3-405b, 16 ranks": 16, "llama-3-405b, 8 ranks with 2 stages": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only layouts with this text in their name")
    chosen = parser.parse_args().only
    print("| model | layout | slowest rank | iteration | ours | slowest rank | iteration | faster by | at most by |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (model, ranks, micro_batches, text) in LAYOUTS.items():
        if chosen in name:
            print(row(name, model, ranks, micro_batches, text), flush=True)


def row(name: str, model: Model, ranks: int, micro_batches: int, text: str | None) -> str:
    """Return a row of the table."""
    layout = Layout(engine="megatron", stages=[model.parts()])
    if text is None:
        counted = {"accounts_for_embedding": True, "accounts_for_loss": True}
        theirs = default_cut_of_megatron(layout, _STAGES[name], ranks, **counted)
    else:
        theirs = cut_of_megatron(text, layout)
    layout = layout.cut_into(theirs)
    stages_per_rank = len(theirs) // ranks
    kind = "interleaved" if stages_per_rank > 1 else "1f1b"
    ((_, schedule),) = choose_schedules([kind], micro_batches=[micro_batches], ranks=ranks, chunks=stages_per_rank)
    costs = costs_of(model, layout)
    begin_s = time.process_time()
    trained = may_hold(layout, schedule)
    found = best_partition(costs, schedule, known={"theirs": theirs}, may_hold=trained, is_planned=False)
    taken_s = time.process_time() - begin_s
    published, ours = found.known["theirs"], found.fastest
    ideal_s = micro_batches * sum(float(t.sum()) for t in costs.time_s.values()) / ranks
    cells = [f"{name}", f"`{text or megatron_layout(layout)}`"]
    cells += [f"{slowest(published, costs, ranks):.3f}", f"{published.time_s / ideal_s:.3f}"]
    cells += [f"`{megatron_layout(layout.cut_into(ours.cut))}`"]
    cells += [f"{slowest(ours, costs, ranks):.3f}", f"{ours.time_s / ideal_s:.3f}"]
    cells += [f"{1 - ours.time_s / published.time_s:.1%}", f"{found.time_gap:.1%} ({taken_s:.0f} s)"]
    return f"| {' | '.join(cells)} |"


def costs_of(model: Model, layout: Layout) -> LayerCosts:
    """Return the costs of the parts at one clock."""
    forward_s = np.array([[model.forward_flops(part.kind) / _FLOPS_PER_S] for part in layout.parts])
    time_s = {Kind.FORWARD: forward_s, Kind.BACKWARD: 2 * forward_s}
    zeros = np.zeros(len(layout.parts))
    return LayerCosts(
        clocks_mhz=(1000,), time_s=time_s, energy_j=time_s, parameters=zeros, fixed_bytes=zeros, held_bytes=zeros,
        blocking_power_w=0.0, gpu="none", simulated=True,
    )  # fmt: skip


def slowest(found: EvaluatedCut, costs: LayerCosts, ranks: int) -> float:
    """Return the work of the rank with the most work, relative to the mean."""
    work_s = sum(t[:, 0] for t in costs.time_s.values())
    of_stages = np.add.reduceat(work_s, np.cumsum([0, *found.cut[:-1]]))
    of_ranks = np.array([of_stages[rank::ranks].sum() for rank in range(ranks)])
    return float(of_ranks.max() / of_ranks.mean())


if __name__ == "__main__":
    main()
