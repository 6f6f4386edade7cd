"""Every numeric field of an iteration's record, of the last record and of a profile is right.

A row of a table compares a field with its source: the physics of the GPUs, the time, and what the engines did. A field
without a row is an error.
"""

import itertools
import math
import time
import typing
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import msgspec
import pytest
from frontiers import save_mixed_plan
from pipelines import one_f_one_b
from pydantic import BaseModel
from virtual.gpu import REFUSALS, RecordingGpu
from virtual.job import SLOWER, VirtualEngine, VirtualJob

from perseus_ds.artifacts.layout import Part, encode_parts
from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.run_events import Ended
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import GpuState
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Other
from perseus_ds.simulation.device_models import COMPUTE_BOUND, DEVICES

QUICK = {"min_clock_mhz": 1100, "sampling": "stride", "clock_stride": 6}
MODEL = DEVICES["a100-sxm"]
STAGES_S, TAIL_S, TRANSFER_S, LOAD_S, OTHER_S = (0.1, 0.12), 0.05, 0.004, 0.01, 0.02
PERIOD_S, MORE_W, LESS_MHZ = 0.1, (0.0, 0.0, 8.0, 8.0), (0, 15, 0, 0)
WAITING_W = MODEL.blocking_power_w + mean(MORE_W)
PIPELINES, TOKENS, ROWS, MEMORY_BYTES, PARAMETERS = 2, 64, 5, 10**9, 1000
SETTINGS = {
    "power_limit_w": 390.0,
    "application_clock_mhz": 1410,
    "memory_clock_mhz": 1593,
    "power_profiles": [],
    "power_smoothing": {"ramp_up": 7},
    "whole_module": False,
}


class Gpu(RecordingGpu):
    """A GPU with settings and figures of its own, whose counter a test may let fail.

    Attributes:
        more_w: Power that its counter always includes, such as that of a fan.
        less_mhz: How much lower the clock is that it reads, as at a limit.
    """

    settings = SETTINGS
    counter_fails = False

    def __init__(self, *arguments, seed, **settings):
        super().__init__(*arguments, seed=seed, **settings)
        self.temperature_c = 40.0 + seed
        self.more_w, self.less_mhz = MORE_W[seed], LESS_MHZ[seed]

    @property
    def state(self):
        return GpuState(self.temperature_c, "P0")

    def energy_j(self):
        if self.counter_fails:
            raise GpuError("Reading the energy counter failed")
        refreshed_s = math.floor(self.timebase.now_s() / PERIOD_S) * PERIOD_S
        return super().energy_j() + self.more_w * refreshed_s

    @property
    def true_energy_j(self):
        return super().true_energy_j + self.more_w * self.timebase.now_s()

    def clock_mhz(self):
        return super().clock_mhz() - self.less_mhz


class Job(VirtualJob):
    """A job that notes what really happens.

    Attributes:
        truth: What really happened in each iteration.
    """

    def __init__(self, folder, **keys):
        self.truth = []
        super().__init__(folder, gpu_class=Gpu, **keys)

    def _iterate(self, rank):
        before_j = [gpu.true_energy_j for gpu in self.gpus]
        before = [len(gpu.set_at) for gpu in self.gpus]
        super()._iterate(rank)
        if rank == 0:
            energies_j = [gpu.true_energy_j - used_j for gpu, used_j in zip(self.gpus, before_j, strict=True)]
            changes = sum(len(gpu.set_at) - count for gpu, count in zip(self.gpus, before, strict=True))
            self.truth.append(
                SimpleNamespace(
                    is_planned=self.taken[-1][0] == "run",
                    phase=self.taken[-1][0],
                    time_s=self.taken[-1][1],
                    energies_j=energies_j,
                    energy_j=sum(energies_j),
                    changes=changes,
                    plan=self.sessions[0].plan,
                    at_s=self.time.now_s(),
                    unix_s=time.time(),
                    tokens=self.schedule.micro_batches * sum(self.tokens),
                    micro_batches=self.schedule.micro_batches,
                )
            )


def schedule(micro_batches):
    """Return 1F1B of two stages, which load each micro-batch, with a command that Perseus does not know."""
    plain = one_f_one_b(ranks=2, micro_batches=micro_batches)
    *last, tail = plain.ranks[1]
    return replace(plain, ranks=(plain.ranks[0], (*last, Other("Log", 1, 0), tail)))


def described(engine, facts=VirtualEngine.facts):
    stage = engine._rank % 2
    parts = {stage: [Part(kind="dense", names=[str(stage)], parameters=PARAMETERS + stage)]}
    found = facts(engine)
    return msgspec.structs.replace(found, micro_batch_size=ROWS, engine="torch", parts=encode_parts(parts))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job that profiles, compares plans, stalls, and changes its number of micro-batches, after its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualEngine, "facts", described)
        job = Job(
            tmp_path_factory.mktemp("job"),
            stages_s=STAGES_S,
            tail_s=TAIL_S,
            transfer_s=TRANSFER_S,
            load_s=LOAD_S,
            other_s=OTHER_S,
            schedule=schedule(3),
            pipelines=PIPELINES,
            mode="auto",
            profile=QUICK,
            **SLOWER,
        )
    job.tokens = [TOKENS] * PIPELINES
    for rank in range(len(job.gpus)):
        job.runtimes[rank]._memory_bytes = lambda rank=rank: MEMORY_BYTES + rank
    job.train_until("run")
    job.train_until_compared()
    job.train(6)
    job.wait_s = 1.0
    job.train()  # a stall
    job.wait_s = 0.0
    job.train(6)
    job.schedule = schedule(5)
    job.train(12)
    job.gpus[3].counter_fails = True
    job.train(2)
    job.close()
    job.iterations = iterations(job)
    (job.ended,) = job.events(Ended)
    job.profile = StageProfile.load(job.folder)
    job.info = job.profile.info
    return job


def recorded(job, name, begin=0, end=None):
    return [getattr(record, name) for record in job.iterations[begin:end]]


def true(job, name):
    return [getattr(each, name) for each in job.truth]


def pairs_of(job, name):
    """Return the records with a value of a field, each with what really happened."""
    return [(r, t) for r, t in zip(job.iterations, job.truth, strict=True) if getattr(r, name) is not None]


def at_default_clocks(job, name, micro_batches):
    """Return the true mean at default clocks, once plans have been compared with them."""
    found = [each for each in job.truth if each.phase == "default" and each.micro_batches == micro_batches]
    return mean(getattr(each, name) for each in found[1:])


def compared(job, name, chosen):
    """Return the chosen iterations that are compared with default clocks, which contain no stall."""
    found = []
    for record, each in zip(job.iterations, job.truth, strict=True):
        is_known = name == "time_s" or record.energy_j is not None
        if chosen(each) and record.default_time_s is not None and each.time_s < 5.0 and is_known:
            found.append(each)
    return found


def default_of(job, name, chosen):
    """Return what default clocks take for the chosen iterations."""
    return sum(at_default_clocks(job, name, each.micro_batches) for each in compared(job, name, chosen))


def gain(job, name, chosen):
    """Return what default clocks take more than the chosen iterations."""
    return default_of(job, name, chosen) - sum(getattr(each, name) for each in compared(job, name, chosen))


def begin_of(job, phase, behind):
    """Return when the first iteration of a phase begins after another iteration [s]."""
    following = range(behind + 1, len(job.truth))
    number = next(number for number in following if job.iterations[number].phase == phase)
    return job.truth[number - 1].at_s


def next_in_s(job):
    found = [number for number, record in enumerate(job.iterations) if record.next_in_s is not None]
    expected = [begin_of(job, job.iterations[n].next_phase, n) - job.truth[n].at_s for n in found]
    return [job.iterations[n].next_in_s for n in found], pytest.approx(expected, abs=4.0)


def predicted(job, of_record, of_truth, rel):
    found = [(r, t) for r, t in pairs_of(job, of_record) if t.time_s < 5.0]
    expected = [getattr(t, of_truth) for _, t in found]
    return [getattr(r, of_record) for r, _ in found], pytest.approx(expected, rel=rel)


def default(job, of_record, of_truth, rel):
    """Return the means, because a counter has an error in each iteration."""
    found = pairs_of(job, of_record)
    expected = mean(at_default_clocks(job, of_truth, t.micro_batches) for _, t in found)
    return mean(getattr(r, of_record) for r, _ in found), pytest.approx(expected, rel=rel)


def energies(job, name, split):
    """Return the sums of a field with several energies, and those of the GPUs."""
    found = [(r, t) for r, t in pairs_of(job, name) if r.energy_j is not None]
    sums = [sum(part) for part in zip(*(getattr(r, name) for r, _ in found), strict=True)]
    of_gpus = [sum(t.energies_j[rank] for _, t in found) for rank in range(len(job.gpus))]
    return sums, pytest.approx(split(of_gpus), rel=0.01)


def last_profiled(job):
    return next(record for record in reversed(job.iterations) if record.phase == "profile")


def clocks_asked(job):
    """Return the last requested clocks while a profile was measured, which holds one clock for all."""
    held = {clock_mhz for clock_mhz in job.gpus[0].clocks_set if clock_mhz is not None}
    found = last_profiled(job).clocks_asked_mhz
    return (len(set(found)), found[0] in held, len(found)), (1, True, len(job.gpus))


def clocks_reached(job):
    asked_mhz = last_profiled(job).clocks_asked_mhz
    expected = [clock_mhz - gpu.less_mhz for clock_mhz, gpu in zip(asked_mhz, job.gpus, strict=True)]
    return list(last_profiled(job).clocks_reached_mhz), expected


def last_trial(job):
    return job.iterations[-1].trial


def slowdown_and_saving(job):
    plan = [each for each in job.truth if each.is_planned and each.micro_batches == 3 and each.time_s < 5.0][1:]
    time_s, energy_j = (mean(getattr(each, name) for each in plan) for name in ("time_s", "energy_j"))
    return time_s / at_default_clocks(job, "time_s", 3) - 1, 1 - energy_j / at_default_clocks(job, "energy_j", 3)


def completed_pairs(job):
    phases = [phase for phase, _ in itertools.groupby(true(job, "phase"))]
    return phases[phases.index("run") :].count("default")


ITERATION = {
    "iteration": lambda job: (recorded(job, "iteration"), list(range(1, 1 + len(job.truth)))),
    "ended": lambda job: (recorded(job, "ended"), pytest.approx(true(job, "unix_s"), rel=0, abs=60.0)),
    "next_in_s": next_in_s,
    "plan": lambda job: (recorded(job, "plan"), true(job, "plan")),
    "order": lambda job: (
        [{3: None, 5: 1}[each.micro_batches] for each in job.truth[:61] + job.truth[63:]],
        recorded(job, "order", 0, 61) + recorded(job, "order", 63),
    ),
    "time_s": lambda job: (recorded(job, "time_s"), pytest.approx(true(job, "time_s"), rel=1e-4)),
    "energy_j": lambda job: (
        sum(r.energy_j for r, _ in pairs_of(job, "energy_j")),
        pytest.approx(sum(t.energy_j for _, t in pairs_of(job, "energy_j")), rel=0.005),
    ),
    "energy_by_pipeline_j": lambda job: energies(
        job, "energy_by_pipeline_j", lambda of_gpus: [sum(of_gpus[:2]), sum(of_gpus[2:])]
    ),
    "energy_by_rank_j": lambda job: energies(job, "energy_by_rank_j", lambda of_gpus: of_gpus),
    "predicted_time_s": lambda job: predicted(job, "predicted_time_s", "time_s", 0.002),
    "predicted_energy_j": lambda job: predicted(job, "predicted_energy_j", "energy_j", 0.01),
    "default_time_s": lambda job: default(job, "default_time_s", "time_s", 0.0005),
    "default_energy_j": lambda job: default(job, "default_energy_j", "energy_j", 0.01),
    "tokens": lambda job: (recorded(job, "tokens"), true(job, "tokens")),
    "trial.pairs": lambda job: (last_trial(job).pairs, completed_pairs(job)),
    "trial.slowdown": lambda job: (last_trial(job).slowdown, pytest.approx(slowdown_and_saving(job)[0], rel=0.01)),
    "trial.slowdown_error": lambda job: (last_trial(job).slowdown_error, pytest.approx(0.0, abs=0.002)),
    "trial.saved": lambda job: (
        last_trial(job).saved,
        pytest.approx(slowdown_and_saving(job)[1], rel=0, abs=last_trial(job).saved_error),
    ),
    "trial.saved_error": lambda job: (last_trial(job).saved_error, pytest.approx(0.01, abs=0.01)),
    "drift": None,
    "clock_changes": lambda job: (recorded(job, "clock_changes"), true(job, "changes")),
    "clock_skips": None,
    "failed_ranks": None,
    "more_failed_ranks": None,
    "clocks_asked_mhz": clocks_asked,
    "clocks_reached_mhz": clocks_reached,
    "highest_temperature_c": lambda job: (set(recorded(job, "highest_temperature_c")), {43.0}),
}
"""By field, a function that returns what is recorded and what is true. None if another test compares them."""


def is_planned(each):
    return each.is_planned


def is_any(each):
    return True


def planned_share(job, name, chosen):
    """Return the share of iterations under plans in what default clocks take for the chosen ones."""
    return default_of(job, name, is_planned) / default_of(job, name, chosen)


def saving(part, chosen):
    """Return the rows of a summary of the saving of chosen iterations."""

    def of(job):
        return getattr(job.ended, part)

    return {
        f"{part}.iterations": lambda job: (of(job).iterations, sum(map(chosen, job.truth))),
        f"{part}.stalls": lambda job: (of(job).stalls, 1),
        f"{part}.saved_j": lambda job: (
            of(job).saved_j,
            pytest.approx(gain(job, "energy_j", chosen), rel=0.05),
        ),
        f"{part}.gained_s": lambda job: (
            of(job).gained_s,
            pytest.approx(gain(job, "time_s", chosen), rel=0.15),
        ),
        f"{part}.saved": lambda job: (
            of(job).saved,
            pytest.approx(gain(job, "energy_j", chosen) / default_of(job, "energy_j", chosen), rel=0.15),
        ),
        f"{part}.saved_error": lambda job: (
            of(job).saved_error,
            pytest.approx(last_trial(job).saved_error * planned_share(job, "energy_j", chosen), rel=0.1),
        ),
        f"{part}.slowdown": lambda job: (
            of(job).slowdown,
            pytest.approx(-gain(job, "time_s", chosen) / default_of(job, "time_s", chosen), rel=0.15),
        ),
        f"{part}.slowdown_error": lambda job: (
            of(job).slowdown_error,
            pytest.approx(last_trial(job).slowdown_error * planned_share(job, "time_s", chosen), rel=0.1),
        ),
        f"{part}.pairs": lambda job: (of(job).pairs, completed_pairs(job)),
    }


def of_plans(job, name):
    return [getattr(each, name) for each in job.ended.plans]


def of_orders(job, name):
    return [getattr(each, name) for each in job.ended.orders if each.order != 255]


def by_micro_batches(job, count):
    return [count(lambda each, n=n: each.micro_batches == n) for n in (3, 5)]


def gains(job, name):
    return by_micro_batches(job, lambda has: gain(job, name, lambda each: has(each) and each.is_planned))


def planned(job):
    return by_micro_batches(job, lambda has: sum(has(each) and each.is_planned for each in job.truth))


def per_token(job, of_truth, *, is_default):
    found = [
        t for r, t in pairs_of(job, "energy_j") if t.is_planned and r.default_time_s is not None and t.time_s < 5.0
    ]
    if is_default:
        amount = sum(at_default_clocks(job, of_truth, each.micro_batches) for each in found)
    else:
        amount = sum(getattr(each, of_truth) for each in found)
    return amount / sum(each.tokens for each in found)


END = {
    "time": lambda job: (job.ended.time, pytest.approx(job.truth[-1].unix_s, rel=0, abs=60.0)),
    "iterations": lambda job: (job.ended.iterations, len(job.truth)),
    "time_s": lambda job: (job.ended.time_s, pytest.approx(sum(true(job, "time_s")), rel=1e-4)),
    "energy_j": lambda job: (
        job.ended.energy_j,
        pytest.approx(sum(t.energy_j for _, t in pairs_of(job, "energy_j")), rel=0.005),
    ),
    # The counter is read after the end of an iteration, so the one before the fault may be affected.
    "without_energy": lambda job: (job.ended.without_energy, pytest.approx(2.5, abs=0.5)),
    "clock_changes": lambda job: (job.ended.clock_changes, sum(true(job, "changes"))),
    "clock_skips": None,
    **saving("under_plans", is_planned),
    **saving("whole", is_any),
    "tokens.energy_j": lambda job: (
        job.ended.tokens.energy_j,
        pytest.approx(per_token(job, "energy_j", is_default=False), rel=0.02),
    ),
    "tokens.per_s": lambda job: (
        job.ended.tokens.per_s,
        pytest.approx(1 / per_token(job, "time_s", is_default=False), rel=0.01),
    ),
    "tokens.default_energy_j": lambda job: (
        job.ended.tokens.default_energy_j,
        pytest.approx(per_token(job, "energy_j", is_default=True), rel=0.02),
    ),
    "tokens.default_per_s": lambda job: (
        job.ended.tokens.default_per_s,
        pytest.approx(1 / per_token(job, "time_s", is_default=True), rel=0.01),
    ),
    "plans.plan": lambda job: (of_plans(job, "plan"), sorted({plan for plan in true(job, "plan") if plan is not None})),
    "plans.order": lambda job: (of_plans(job, "order"), [0, 1]),
    "plans.iterations": lambda job: (of_plans(job, "iterations"), planned(job)),
    "plans.saved_j": lambda job: (of_plans(job, "saved_j"), pytest.approx(gains(job, "energy_j"), rel=0.3)),
    "plans.gained_s": lambda job: (of_plans(job, "gained_s"), pytest.approx(gains(job, "time_s"), rel=0.3)),
    "orders.order": lambda job: (of_orders(job, "order"), [0, 1]),
    "orders.micro_batches": lambda job: (of_orders(job, "micro_batches"), [3, 5]),
    "orders.iterations": lambda job: (sum(each.iterations for each in job.ended.orders), len(job.truth)),
    "orders.planned": lambda job: (of_orders(job, "planned"), planned(job)),
    "orders.saved_j": lambda job: (of_orders(job, "saved_j"), pytest.approx(gains(job, "energy_j"), rel=0.3)),
    "orders.gained_s": lambda job: (of_orders(job, "gained_s"), pytest.approx(gains(job, "time_s"), rel=0.3)),
}


def of_rows(job, name, of_row):
    """Return a figure of the measured rows, and what it should be."""
    rows = [row for row in job.info.rows if row.samples]
    return [getattr(row, name) for row in rows], [of_row(row) for row in rows]


def time_s_at(stage, kind, clock_mhz):
    factor = {Kind.FORWARD: 1, Kind.BACKWARD: 2}[kind]
    return factor * STAGES_S[stage] * MODEL.slowdown(clock_mhz, COMPUTE_BOUND)


def measurements(job, value, of_stage, rel):
    found = [row for row in job.profile.measurements if row.kind is not Kind.TAIL]
    return [value(row) for row in found], pytest.approx([of_stage(row) for row in found], rel=rel)


def measured_clocks(job):
    held = {clock_mhz for clock_mhz in job.gpus[0].clocks_set if clock_mhz is not None}
    return {row.clock_mhz for row in job.info.rows if row.samples}, held


def measured_backwards(job):
    """Return the measured backwards of a stage, of which each profiled iteration has three, and how many ran.

    The last iteration was under way when the profile was complete, and is not part of it.
    """
    backwards = [row for row in job.info.rows if (row.stage, row.kind) == (1, Kind.BACKWARD)]
    profiled = sum(record.phase == "profile" for record in job.events(IterationRecord))
    return sum(row.samples for row in backwards), 3 * (profiled - 1)


PROFILE = {
    **{
        f"settings.{name}": lambda job, name=name: (getattr(job.info.settings, name), SETTINGS[name])
        for name in ("power_limit_w", "application_clock_mhz", "memory_clock_mhz", "power_smoothing")
    },
    "blocking_power_w": lambda job: (job.info.blocking_power_w, pytest.approx(WAITING_W, rel=0.01)),
    "default_clock_mhz": lambda job: (
        job.info.default_clock_mhz,
        pytest.approx(MODEL.reached_clock_mhz(MODEL.top_clock_mhz, COMPUTE_BOUND), rel=0.01),
    ),
    "least_dwell_s": lambda job: (max(job.info.least_dwell_s.values()), pytest.approx(2 * 0.015, rel=0.01)),
    "pass_variation": lambda job: (job.info.pass_variation, pytest.approx(0.0, abs=1e-6)),
    "layout.stages.parameters": lambda job: (
        [[part.parameters for part in parts] for parts in job.info.layout.stages],
        [[PARAMETERS], [PARAMETERS + 1]],
    ),
    "memory_bytes": lambda job: (job.info.memory_bytes, [MEMORY_BYTES + rank for rank in range(2)]),
    "stages": lambda job: (job.info.stages, 2),
    "pipeline_ranks": lambda job: (job.info.pipeline_ranks, 2),
    "data_parallel": lambda job: (job.info.data_parallel, PIPELINES),
    "tensor_parallel": lambda job: (job.info.tensor_parallel, 1),
    "micro_batches": lambda job: (job.info.micro_batches, 3),
    "micro_batch_size": lambda job: (job.info.micro_batch_size, ROWS),
    "tokens_per_micro_batch": lambda job: (job.info.tokens_per_micro_batch, pytest.approx(TOKENS)),
    "load_s": lambda job: (job.info.load_s, pytest.approx({0: LOAD_S, 1: LOAD_S}, rel=0.01)),
    "tail_s": lambda job: (job.info.tail_s, pytest.approx({0: TAIL_S, 1: TAIL_S}, rel=0.01)),
    "transfers.source": lambda job: ([each.source for each in job.info.transfers], [0, 1]),
    "transfers.target": lambda job: ([each.target for each in job.info.transfers], [1, 0]),
    "transfers.time_s": lambda job: (
        [each.time_s for each in job.info.transfers],
        pytest.approx([TRANSFER_S] * 2, rel=0.01),
    ),
    "others.stage": lambda job: ([each.stage for each in job.info.others], [1]),
    "others.time_s": lambda job: ([each.time_s for each in job.info.others], [pytest.approx(OTHER_S, rel=0.01)]),
    "rows.stage": lambda job: ({row.stage for row in job.info.rows}, {0, 1}),
    "rows.clock_mhz": measured_clocks,
    "rows.samples": measured_backwards,
    "rows.time_relative_error": lambda job: of_rows(
        job, "time_relative_error", lambda row: pytest.approx(0.0, abs=0.002)
    ),
    "rows.energy_relative_error": lambda job: of_rows(
        job, "energy_relative_error", lambda row: pytest.approx(0.025, abs=0.025)
    ),
    "rows.temperature_c": lambda job: of_rows(job, "temperature_c", lambda row: pytest.approx(41.0 + row.stage, abs=1)),
    "time": lambda job: measurements(
        job, lambda row: row.time_s, lambda row: time_s_at(row.stage, row.kind, row.clock_mhz), 0.002
    ),
    "energy": lambda job: measurements(
        job,
        lambda row: row.energy_j,
        lambda row: (
            time_s_at(row.stage, row.kind, row.clock_mhz) * (MODEL.power_w(row.clock_mhz, COMPUTE_BOUND) + mean(MORE_W))
        ),
        0.03,
    ),
}
TABLES = {"iteration": ITERATION, "end": END, "profile": PROFILE}
ROWS_OF_TABLES = [(table, name) for table, rows in TABLES.items() for name, row in rows.items() if row is not None]


@pytest.mark.parametrize(("table", "name"), ROWS_OF_TABLES)
def test_a_recorded_figure_is_the_true_one(job, table, name):
    found, expected = TABLES[table][name](job)
    assert found == expected


def numeric_fields(model, before=""):
    """Return the names of all fields with numbers, also of models within a model."""
    found = set()
    for name, field in model.model_fields.items():
        kinds = [field.annotation]
        for kind in kinds:
            kinds += typing.get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= numeric_fields(kind, f"{before}{name}.")
            elif kind in (int, float):
                found.add(before + name)
    return found


def test_every_numeric_field_has_a_row():
    assert numeric_fields(IterationRecord) == set(ITERATION)
    assert numeric_fields(Ended) == set(END)
    of_file = {name for name in numeric_fields(ProfileInfo) if not name.startswith("streams.")}
    assert of_file | {"time", "energy"} == set(PROFILE)


def iterations(job):
    return [record for record in job.records() if isinstance(record, IterationRecord)]


def test_drift_is_the_longer_time_of_passes(tmp_path):
    job = VirtualJob(tmp_path, mode="auto", profile=QUICK, **SLOWER)
    job.train_until("run")
    job.train(3)
    job.slowdowns = [1.04]
    job.train(10)
    job.close()
    drifts = [record.drift for record in iterations(job) if record.drift is not None]
    assert drifts[-1] == pytest.approx(0.04, abs=0.002)


def test_failed_ranks_are_named_up_to_a_number(tmp_path):
    job = VirtualJob(tmp_path, pipelines=20, gpu_class=RecordingGpu, mode="auto", profile=QUICK, **SLOWER)
    job.train_until("run")
    for gpu in job.gpus[1:]:
        gpu.refusal = REFUSALS["driver error"]
    job.train(3)
    job.close()
    record = iterations(job)[-1]
    assert (record.failed_ranks, record.more_failed_ranks) == (tuple(range(1, 17)), 3)


def test_changes_that_are_omitted_and_made_are_those_of_the_plan(tmp_path):
    """A driver that takes longer than an instruction omits some."""
    profiled = VirtualJob(tmp_path / "profile", stages_s=(0.1, 0.13), mode="profile", profile=QUICK)
    profiled.train_until("observe")
    profiled.close()
    save_mixed_plan(tmp_path / "frontier", profiled.schedule, StageProfile.load(tmp_path / "profile"))
    found = {}
    for name, factor, lock_latency_s in (("quick", 1.0, 0.005), ("slow", 0.1, 0.06)):
        job = VirtualJob(
            tmp_path / name,
            stages_s=(0.1 * factor, 0.13 * factor),
            mode="run",
            frontier=str(tmp_path / "frontier"),
            gpu={"lock_latency_s": lock_latency_s},
        )
        job.train(8)
        job.close()
        (ended,) = job.events(Ended)
        assert ended.clock_skips == sum(record.clock_skips for record in iterations(job))
        found[name] = [(record.clock_changes, record.clock_skips) for record in iterations(job)[1:-1]]
    assert found == {"quick": [(9, 0)] * 6, "slow": [(6, 3)] * 6}
