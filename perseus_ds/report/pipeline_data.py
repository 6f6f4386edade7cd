"""A pipeline and all its plans, small enough for a page that works out their timelines itself.

The timelines of a hundred plans of thousands of instructions would make a large file, so the page gets the data to
compute them: the DAG, the profile's rows, and each plan's clocks as 16-bit numbers.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.dag import Dag, Node
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Load, Other, Transfer
from perseus_ds.report.timeline import Timeline

KINDS = (*(kind.value for kind in Kind), "load", "other", "activation", "grad")


def pipeline_data(dag: Dag, profile: StageProfile, frontier: Frontier) -> dict[str, Any]:
    """Return the DAG's nodes in columns, in topological order, and the data to evaluate plans with.

    ``option`` says which of a plan's clocks is a node's, -1 for a node without; a plan's clocks are
    those of its ranks one after the other.
    """
    position = {
        instruction: number for number, instruction in enumerate(i for stream in frontier.instructions for i in stream)
    }
    fixed_s = dag.fixed_durations_s(profile.info.fixed_durations)
    nodes = [_described(node) for node in dag.nodes]
    return {
        "kinds": KINDS,
        "ranks": len(dag.schedule.ranks),
        "kind": [kind for kind, _, _, _ in nodes],
        "stage": [stage for _, stage, _, _ in nodes],
        "target": [target for _, _, target, _ in nodes],
        "micro_batch": [micro_batch for _, _, _, micro_batch in nodes],
        "node_ranks": [node.ranks for node in dag.nodes],
        "predecessors": dag.predecessors,
        "option": [position.get(node.work, -1) if isinstance(node.work, Instruction) else -1 for node in dag.nodes],
        "fixed_s": [round(float(value), 7) for value in fixed_s],
        "blocking_power_w": frontier.provenance.blocking_power_w,
        "rows": _rows(profile),
        "plans": [packed_clocks(plan) for plan in frontier.plans],
        "baseline": packed_clocks(frontier.baseline),
    }


def packed_clocks(plan: FrequencyPlan) -> str:
    """Return a plan's clocks [MHz], rank by rank, as base64 of little-endian 16-bit numbers."""
    clocks = np.array([clock for stream in plan.clocks_mhz for clock in stream], dtype="<u2")
    return base64.b64encode(clocks.tobytes()).decode()


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as the page draws it: what each rank does, and how long for."""
    return {
        "ranks": timeline.ranks,
        "time_s": timeline.time_s,
        "energy_j": None if np.isnan(timeline.energy_j) else timeline.energy_j,
        "bars": [
            [
                bar.rank,
                round(bar.start_s, 6),
                round(bar.end_s, 6),
                *_described(Node(bar.work, (bar.rank,))),
                bar.clock_mhz,
            ]
            for bar in timeline.bars
        ],
    }


def _described(node: Node) -> tuple[int, int, int, int]:
    """Return kind, stage, receiving stage (-1 if it is no transfer) and micro-batch."""
    match node.work:
        case Transfer(payload=payload, source=source, target=target, micro_batch=micro_batch):
            return KINDS.index(payload), source, target, micro_batch
        case Load(stage=stage, micro_batch=micro_batch):
            return KINDS.index("load"), stage, -1, micro_batch
        case Other(stage=stage, number=number):
            return KINDS.index("other"), stage, -1, number
        case Instruction(stage=stage, kind=kind, micro_batch=micro_batch):
            return KINDS.index(kind.value), stage, -1, micro_batch


def _rows(profile: StageProfile) -> dict[str, dict[int, Sequence[float]]]:
    """Return time [s] and energy [J] by clock, by stage and kind."""
    rows: dict[str, dict[int, Sequence[float]]] = {}
    for m in profile.measurements:
        key = f"{m.stage}/{KINDS.index(m.kind.value)}"
        rows.setdefault(key, {})[m.clock_mhz] = (m.time_s, float(f"{m.energy_j:.6g}"))
    return rows
