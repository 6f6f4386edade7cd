"""Minimal output folders of training runs, for tests of reports and pictures."""

from dataclasses import dataclass
from pathlib import Path

from live_records import iteration, started, write
from pipelines import one_f_one_b, synthetic_profile

from perseus_ds.artifacts.evidence import CheckResult, Evidence, Figure, Machine
from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.layout import Layout, Part
from perseus_ds.artifacts.profile import StageProfile, TransferDuration
from perseus_ds.artifacts.run_events import PlanChosen
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.schedule import Transfer
from perseus_ds.report.timeline import timeline

RANKS, MICRO_BATCHES, PLANS = 3, 4, 12
LATE_S = 0.004
PARTS = (("embedding", "dense"), ("dense", "dense"), ("dense", "head"))


@dataclass
class Job:
    """Contents of the folders."""

    profile: StageProfile
    frontier: Frontier
    dag: Dag


def make_job() -> Job:
    transfers = [
        TransferDuration(payload=payload, source=source, target=target, time_s=0.003)
        for payload, source, target in (("activation", 0, 1), ("grad", 1, 0))
    ]
    profile = synthetic_profile(
        RANKS,
        simulated=True,
        gpu="simulated A100-SXM",
        micro_batches=MICRO_BATCHES,
        data_parallel=1,
        blocking_power_w=80.0,
        transfers=transfers,
        layout=Layout(engine="megatron", stages=[[Part(kind=kind) for kind in kinds] for kinds in PARTS]),
    )
    schedule = one_f_one_b(RANKS, MICRO_BATCHES)
    return Job(profile, optimize(schedule, profile, plans=PLANS), Dag.build(schedule))


def write_auto_run(folder: Path, job: Job, *, is_compared: bool = False, number: int = 2) -> None:
    """Write the output of ``auto`` mode: profile, frontier, records and timelines in one folder."""
    job.profile.save(folder / "profile.csv")
    job.frontier.save(folder)
    default, plan = job.frontier.baseline, job.frontier.plans[number]
    known = {"default_time_s": default.time_s, "default_energy_j": default.energy_j}
    compared = {**known, "predicted_time_s": plan.time_s} if is_compared else {}
    records = [started(job=None, time=1.0), iteration(1, "calibrate", 9.0, 9.0)]
    records += [iteration(n, "warm-up", default.time_s, default.energy_j) for n in (2, 3, 4)]
    records += [iteration(n, "profile", default.time_s * 1.1, default.energy_j, **known) for n in (5, 6)]
    records += [PlanChosen(plan=number, simulated=True)]
    records += [iteration(n, "run", plan.time_s, plan.energy_j, plan=number, **compared) for n in (7, 8, 9)]
    write(folder, records)
    kept = [measured(job, plan, 8, number), measured(job, default, 3, None)]
    file = TimelineFile(simulated=True, gpu="simulated A100-SXM", job=job.profile.info, iterations=kept)
    (folder / "timeline.json").write_text(file.model_dump_json(exclude_none=True))


def measured(job: Job, plan, iteration: int, number: int | None) -> MeasuredIteration:
    """Return an iteration as predicted but ``LATE_S`` late, with waits as part of transfers."""
    predicted = timeline(job.dag, job.profile, plan)
    ranks = [[] for _ in range(RANKS)]
    waits = {(rank, wait.awaited): wait.start_s for rank in range(RANKS) for wait in predicted.waits(rank)}
    for bar in predicted.bars:
        start_s = waits.get((bar.rank, bar.work), bar.start_s) if isinstance(bar.work, Transfer) else bar.start_s
        clock = None if number is None else bar.clock_mhz
        ranks[bar.rank].append(MeasuredOperation.of(bar.work, start_s + LATE_S, bar.end_s + LATE_S, clock))
    phase = "warm-up" if number is None else "run"
    return MeasuredIteration(
        iteration=iteration, phase=phase, plan=number, ranks=ranks, energy_j=None if number is None else plan.energy_j
    )


def make_evidence():
    """Return checks on a stand-in for a GPU: one passed, one failed."""
    late = Figure(name="lateness", value=3.5, unit="ms", at_most=2.0)
    return Evidence(
        made="2026-11-22 10:00 UTC",
        machine=Machine(simulated=True, gpu="simulated A100", driver=None, versions={"torch": "2.13.0"}),
        checks=[
            CheckResult(
                name="spans", title="Spans", outcome="passed", took_s=2.0, figures=[Figure(name="ratio", value=1)]
            ),
            CheckResult(
                name="requests", title="Requests", outcome="failed", reason="lateness: 3.5 ms (at most 2 ms)",
                took_s=3.0, figures=[late], notes=["<b>as measured</b>"],
            ),
        ],
        not_made=["Graphs"],
    )  # fmt: skip
