"""``perseus-ds partition``: proposes how to cut a model into stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from perseus_ds.cli.values import (
    BlockingPower,
    Count,
    Counts,
    OptionalAmount,
    OptionalCount,
    Paths,
    ScheduleName,
    Text,
)
from perseus_ds.errors import ConfigError
from perseus_ds.units import columns, joules, number, percent, plain

if TYPE_CHECKING:
    from perseus_ds.layouts.balance import Balance, MeasuredJob, OtherSize
    from perseus_ds.layouts.partition import Cut
    from perseus_ds.layouts.partition import Partition as Cuts
    from perseus_ds.pipeline.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class PartitionCommand:
    """Find the fastest cut of a model into stages, and the most frugal one of those as fast.

    For a job that has trained under Perseus in any mode, the costs of each kind of layer are estimated from the times
    of its stages, and the best layout is printed in the notation of the job's engine. A Hugging Face model need not
    have trained: each of its layers is measured alone on this machine's GPU. Without a GPU, or with --gpu, the GPU is
    simulated, and the work of a layer is computed from its floating-point operations.
    """

    examples = (
        "perseus-ds partition perseus",
        "perseus-ds partition perseus --pipeline-sizes 4 8 16 --virtual-stages 1 2 4",
        "perseus-ds partition Qwen/Qwen3-0.6B --stages 8 --micro-batches 32",
        "perseus-ds partition my-model --stages 4 --micro-batches 16 --gpu h100-sxm --memory-gib 80",
    )

    model: Positional[str]
    """output_dir of a job or its profile.csv, or the name or folder (with config.json) of a Hugging Face model"""
    also: Paths = field(default_factory=list)
    """further runs of the same model with other layouts, to distinguish kinds of layers"""
    layout: Text = None
    """layout to compare with: Megatron-Core's string, the number of parts of each stage, such as 9,8,8,7, or even"""
    pipeline_sizes: Counts = field(default_factory=list)
    """numbers of pipeline ranks to compare, with the same number of GPUs"""
    virtual_stages: Counts = field(default_factory=list)
    """numbers of stages per rank to compare"""
    tied_on_one_rank: bool = False
    """keep the embedding and the head on one rank, for a shared weight"""
    blocking_power_w: BlockingPower = None
    stages: OptionalCount = None
    """stages of the pipeline; for a job, by default its own"""
    micro_batches: OptionalCount = None
    """micro-batches per iteration; for a job, by default its own"""
    schedule: ScheduleName = None
    memory_gib: OptionalAmount = None
    """maximum memory of a stage [GiB]; for a Hugging Face model, by default the memory of this machine's GPU"""
    micro_batch_size: Count = 1
    """for a Hugging Face model: sequences per micro-batch"""
    sequence_length: OptionalCount = None
    """for a Hugging Face model: tokens per sequence; by default 2048, or the model's maximum if that is less"""
    gradient_checkpointing: bool = False
    """for a Hugging Face model: recompute activations in the backward pass"""
    gpu: Text = None
    """for a Hugging Face model: GPU to simulate: a100-sxm, a40, h100-sxm or h200"""

    def execute(self) -> int:
        from perseus_ds.cli.inputs import is_measured_job, progress_bar

        is_job = is_measured_job(Path(self.model))
        with progress_bar("layouts"):
            text = self._of_job() if is_job else self._of_huggingface()
        print("\n".join(map(plain, text.splitlines())))
        return 0

    def _of_huggingface(self) -> str:
        from perseus_ds.cli.inputs import check_size, find_schedule
        from perseus_ds.huggingface.partition import partition

        if self.stages is None or self.micro_batches is None:
            missing = "--stages" if self.stages is None else "--micro-batches"
            raise ConfigError(
                f"{missing} is missing: {self.model} is not a job's folder, so it must be a Hugging Face model."
            )
        schedule = self.schedule or "1f1b"
        check_size(self.stages, self.micro_batches)
        find_schedule(None, schedule)  # suppresses DeepSpeed's warnings on import
        found = partition(
            self.model,
            stages=self.stages,
            micro_batches=self.micro_batches,
            schedule=schedule,
            micro_batch_size=self.micro_batch_size,
            sequence_length=self.sequence_length,
            gradient_checkpointing=self.gradient_checkpointing,
            memory_gib=self.memory_gib,
            gpu=self.gpu,
        )
        where = f"{self.stages} stages, {self.micro_batches} micro-batches, {found.costs.gpu}"
        return f"{self.model}, {where}\n{table_of(found)}"

    def _of_job(self) -> str:
        from perseus_ds.cli.inputs import measured_job
        from perseus_ds.layouts.balance import Balance

        job, *others = (
            measured_job(
                path,
                schedule=self.schedule,
                micro_batches=self.micro_batches,
                blocking_power_w=self.blocking_power_w,
            )
            for path in (Path(self.model), *self.also)
        )
        balance = Balance(job, others, tied_on_one_rank=self.tied_on_one_rank)
        sizes = self.pipeline_sizes or ([self.stages] if self.stages else [])
        lines = [*_of_kinds(balance), ""]
        if sizes or self.virtual_stages:
            sizes = sizes or [job.ranks]
            virtual = self.virtual_stages or [1]
            found = [balance.of_size(ranks, count, _schedule_of) for ranks in sizes for count in virtual]
            return "\n".join([*lines, *_of_sizes(job, found)])
        known = {"today": job.layout.cut}
        if self.layout is not None:
            known["given"] = _given(self.layout, job)
        memory_bytes = None if self.memory_gib is None else self.memory_gib * 2**30
        return "\n".join([*lines, *_of_layouts(balance, balance.partition(known, memory_bytes=memory_bytes))])


def _schedule_of(ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    from perseus_ds.cli.schedules import choose_schedules

    name = "interleaved" if stages_per_rank > 1 else "1f1b"
    ((_, found),) = choose_schedules([name], micro_batches=[micro_batches], ranks=ranks, chunks=stages_per_rank)
    return found


def _given(text: str, job: MeasuredJob) -> Cut:
    """Return the cut of the layout that the user gave."""
    from perseus_ds.layouts.notations import check_cut_of_megatron, cut_of_megatron, default_cut_of_megatron
    from perseus_ds.layouts.partition import uniform_cut

    parts = len(job.layout.parts)
    if text == "even":
        if job.layout.engine == "megatron":
            return default_cut_of_megatron(job.layout, job.schedule.num_stages, job.ranks)
        return uniform_cut(parts, job.schedule.num_stages)
    if all(word.strip().isdigit() for word in text.split(",")):
        cut = tuple(int(word) for word in text.split(","))
        if sum(cut) != parts or 0 in cut:
            raise ConfigError(
                f"--layout {text}: the stages have {sum(cut)} parts, the model {parts}, the embedding and the head "
                "included. Give each stage at least one part, and all of them together the parts of the model."
            )
    else:
        cut = cut_of_megatron(text, job.layout)
        check_cut_of_megatron(job.layout, cut, job.ranks)
    if len(cut) != job.schedule.num_stages:
        raise ConfigError(
            f"--layout {text}: {len(cut)} stages, the job has {job.schedule.num_stages}. Compare other numbers of "
            "stages with --pipeline-sizes and --virtual-stages."
        )
    return cut


def _of_kinds(balance: Balance) -> Iterator[str]:
    """Yield a description of the measurements and the costs of each kind of part."""
    from perseus_ds.profiler.observed import UNREAD_CLOCK_MHZ

    job, kinds = balance.job, balance.kinds
    info = job.profile.info
    stages = f"{job.schedule.num_stages} stages on {job.ranks} ranks, {job.schedule.micro_batches} micro-batches"
    clock = "default clocks" if list(kinds.clocks_mhz) == [UNREAD_CLOCK_MHZ] else f"{kinds.clocks_mhz[-1]} MHz"
    yield f"{info.model or 'a model'} on {info.gpu}, {stages}, at {clock}"
    yield ""
    costs = [("ms", 1e3, kinds.time_s, kinds.time_covariance)]
    costs += [("J", 1.0, kinds.energy_j, kinds.energy_covariance)] if job.has_energy else []
    rows = [["kind", "parts", *(f"{kind} [{unit}]" for unit, *_ in costs for kind in kinds.time_s)]]
    for n, name in enumerate(kinds.kinds):
        count = sum(part.kind == name for part in job.layout.parts)
        cells = [
            _with_error(scale * values[kind][n, -1], scale * covariance[kind][n, n] ** 0.5)
            for _, scale, values, covariance in costs
            for kind in kinds.time_s
        ]
        rows.append([name, str(count), *cells])
    yield from columns(rows)


def _with_error(value: float, error: float) -> str:
    return f"{number(value)} ± {number(error, 2)}"


def _of_layouts(balance: Balance, found: Cuts) -> Iterator[str]:
    """Yield a comparison of today's layout and the proposed one."""
    from perseus_ds.layouts.notations import spelled, summary

    job = balance.job
    has_energy, planned = job.has_energy, found.is_planned
    cuts = {**found.known, "proposed": found.most_frugal}
    if job.time_s is not None:
        yield f"measured: {number(job.time_s)} s per iteration at default clocks, with today's layout"
    rows = [["layout", "iteration [s]", "bubble", *["energy [J]"] * has_energy, *["best plan [J]"] * planned]]
    rows[0] += ["memory [GiB]"] * bool(balance.memory_bytes(job.layout))
    for name, each in cuts.items():
        time_error, energy_error = balance.errors((1.0, each))
        cells = [_with_error(each.time_s, time_error), f"{each.bubble:.1%}"]
        cells += [_with_error(each.energy_j, energy_error)] * has_energy
        cells += [_with_error(each.planned_j, energy_error * each.planned_j / each.energy_j)] if planned else []
        if needed := balance.memory_bytes(job.layout.cut_into(each.cut)):
            cells.append(f"{max(needed) / 2**30:.2f}")
        rows.append([name, *cells])
    yield from columns(rows)
    yield ""
    for name, each in cuts.items():
        yield f"{name:10} {summary(job.layout.cut_into(each.cut))}"
    today, proposed = found.known["today"], found.most_frugal
    time_error, energy_error = balance.errors((1.0, proposed), (-1.0, today))
    gain = f"{percent(proposed.time_s / today.time_s - 1)} ± {percent(time_error / today.time_s, 2).lstrip('+')} time"
    if has_energy:
        energy = percent(proposed.energy_j / today.energy_j - 1)
        gain += f", {energy} ± {percent(energy_error / today.energy_j, 2).lstrip('+')} energy"
    yield f"The proposed layout changes an iteration at default clocks by {gain}."
    if not has_energy:
        yield (
            "Energy is unknown: the job was only observed, and all ranks wait equally long. Give --blocking-power-w, "
            'or train in "profile" mode.'
        )
    elif len(balance.kinds.clocks_mhz) < 2:
        yield 'Other clocks were not measured: train in "profile" or "auto" mode to see layouts under the best plan.'
    elif not planned:
        yield "No plans were computed, since this would take minutes: train with the layout in auto mode."
    yield from _simulated(job)
    yield (
        "No layout is faster: proven for these costs."
        if not found.time_gap
        else f"A layout may be faster by at most {percent(found.time_gap)} by these costs: the search was stopped."
    )
    if proposed.cut == today.cut:
        yield "Keep today's layout."
    else:
        yield from ("Train with:", spelled(job.layout.cut_into(proposed.cut)))


def _of_sizes(job: MeasuredJob, sizes: Sequence[OtherSize]) -> Iterator[str]:
    """Yield a table of the best layouts for other sizes of the pipeline."""
    from perseus_ds.layouts.notations import spelled, summary

    yield "All GPUs, with the same batch; the best layout of each size, at default clocks and under the best plan:"
    energies = ["energy [J]", "best plan [J]"] if job.has_energy else []
    rows = [["ranks", "stages a rank", "pipelines", "micro-batches", "iteration [s]", *energies, "bubble"]]
    for size in sizes:
        row = [str(n) for n in (size.ranks, size.stages_per_rank, size.pipelines, size.micro_batches)]
        if (found := size.found) is not None:
            row.append(number(found.time_s))
            row += [number(size.pipelines * energy_j) for energy_j in (found.energy_j, found.planned_j)][
                : len(energies)
            ]
            row.append(f"{found.bubble:.1%}")
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    layouts = ["layout", *(size.problem if size.layout is None else summary(size.layout) for size in sizes)]
    yield from (f"{line}  {layout}" for line, layout in zip(columns(rows), layouts, strict=True))
    yield "Transfers take the mean of the measured ones; reduction and optimizer step scale with a rank's share."
    yield from _simulated(job)
    possible = [(size.found.time_s, size, size.layout) for size in sizes if size.found and size.layout]
    if possible:
        _, best, layout = min(possible, key=lambda found: found[0])
        stages = "one stage" if best.stages_per_rank == 1 else f"{best.stages_per_rank} stages"
        yield f"Fastest: {best.ranks} ranks with {stages} each:\n{spelled(layout)}"


def _simulated(job: MeasuredJob) -> Iterator[str]:
    if job.profile.info.simulated:
        yield "The GPUs are SIMULATED: times and energies are not those of real GPUs."


def table_of(found: Cuts) -> str:
    """Return a comparison of the cuts, the proven bounds, and the cut to train with."""
    rows = [("cut", "layers", "iteration", "default clocks", "under Perseus", "memory")]
    for name, each in {**found.known, "fastest": found.fastest, "most frugal": found.most_frugal}.items():
        under, memory = joules(each.planned_j) if found.is_planned else "-", f"{each.memory_bytes / 2**30:.1f} GiB"
        rows.append((name, str(list(each.cut)), f"{number(each.time_s)} s", joules(each.energy_j), under, memory))
    lines = columns(rows)
    lines.append(
        "No cut is faster than the fastest one: proven."
        if not found.time_gap
        else f"A cut may be faster by at most {percent(found.time_gap)}: the search was stopped."
    )
    if found.energy_bound_j is not None and found.energy_gap is not None:
        lines.append(
            f"No cut as fast has a plan of less energy than {joules(found.energy_bound_j)}; the most frugal one found "
            f"is {percent(found.energy_gap, 2)} above that."
        )
    lines.append("Energies are per iteration of one pipeline, one GPU per rank; transfers and the tail take no time.")
    if found.costs.simulated:
        lines.append("The GPU is SIMULATED: nothing was measured, work is computed from floating-point operations.")
    lines.append(f"Train with cut={list(found.cut)}.")
    return "\n".join(lines)
