"""Costs of kinds of layers, estimated from stages, and the resulting layouts."""

from dataclasses import replace

import numpy as np
import pytest
from layouts import COSTS_S, job_of, layout_of, profile_of
from pipelines import interleaved, one_f_one_b

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ConfigError, ProfileError
from perseus_ds.layouts.balance import Balance, MeasuredJob, kind_costs
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.instruction import Kind


def test_stages_of_different_mixtures_give_each_kind():
    layout = layout_of("Edd", "ddm", "mmm", "mM", "hmm")
    found = kind_costs([(layout, profile_of(layout))])
    assert found.kinds == ("embedding", "dense", "moe", "mtp", "head")
    for n, name in enumerate(found.kinds):
        assert found.time_s[Kind.FORWARD][n] == pytest.approx([1.3 * COSTS_S[name][0], COSTS_S[name][0]], rel=1e-6)
        assert found.energy_j[Kind.BACKWARD][n, 1] == pytest.approx(350 * COSTS_S[name][1], rel=1e-6)


def test_errors_are_those_of_repeated_measurements():
    layout = layout_of("Edd", "ddd", "dddd", "dd", "dh")
    estimates = [kind_costs([(layout, profile_of(layout, noise=0.01, seed=seed))]) for seed in range(100)]
    for n in (1, 2):  # the cost of an embedding is bounded by zero
        values = np.array([found.time_s[Kind.BACKWARD][n, -1] for found in estimates])
        claimed = np.mean([found.time_covariance[Kind.BACKWARD][n, n] ** 0.5 for found in estimates])
        assert values.mean() == pytest.approx(COSTS_S[layout.parts[-1].kind if n == 2 else "dense"][1], rel=0.01)
        assert 0.8 < claimed / values.std() < 1.6


def test_kinds_that_cannot_be_distinguished_lead_to_a_proposed_layout():
    first = layout_of("Edddd", "ddddh")
    with pytest.raises(ConfigError, match="distinguished: embedding, dense and head") as error:
        kind_costs([(first, profile_of(first))])
    assert "--pipeline-model-parallel-layout 'Et*3|t*5L'" in str(error.value)
    second = first.cut_into((4, 6))
    found = kind_costs([(first, profile_of(first)), (second, profile_of(second))])
    assert found.time_s[Kind.FORWARD][:, -1] == pytest.approx([COSTS_S[kind][0] for kind in found.kinds], abs=1e-9)


def test_the_prediction_for_todays_layout_is_that_of_its_profile():
    job = job_of("Eddd", "dddd", "dddd", "ddddh")
    balance = Balance(job)
    found = balance.partition({"today": job.layout.cut})
    baseline = problem_for(job.schedule, job.profile).baseline
    today = found.known["today"]
    assert (today.time_s, today.energy_j) == pytest.approx((baseline.time_s, baseline.energy_j), rel=1e-6)
    assert found.most_frugal.time_s < 0.85 * today.time_s
    assert found.time_gap == 0
    assert job.layout.cut_into(found.cut).stages[-1][-1].kind == "head"


def below_blocking(job, clocks_mhz):
    """Return the job with powers below blocking power at these clocks."""
    rows = [replace(m, energy_j=70.0 * m.time_s) if m.clock_mhz in clocks_mhz else m for m in job.profile.measurements]
    return replace(job, profile=StageProfile(rows, job.profile.info))


def test_rows_below_blocking_power_are_said_once_and_are_refused_if_they_are_most(caplog):
    job = job_of("Ed", "dd", "ddh", micro_batches=3)
    clocks_mhz = job.profile.options(0, Kind.FORWARD).clock_mhz.tolist()
    Balance(below_blocking(job, clocks_mhz[:1])).partition({"today": job.layout.cut})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "rows do not exceed the blocking power" in caplog.text
    with pytest.raises(ProfileError, match="do not exceed the blocking power of 80"):
        Balance(below_blocking(job, clocks_mhz))


@pytest.mark.parametrize("seed", range(2))
def test_the_error_of_an_iteration_covers_what_was_measured_wrongly(seed):
    job = job_of("Ed", "dd", "ddh", micro_batches=3)
    noisy = replace(job, profile=profile_of(job.layout, noise=0.01, seed=seed))
    balance = Balance(noisy)
    today = balance.partition({"today": job.layout.cut}).known["today"]
    true_s = problem_for(job.schedule, job.profile).baseline.time_s
    time_error, energy_error = balance.errors((1.0, today))
    assert abs(today.time_s - true_s) < 5 * time_error
    assert 0 < time_error < 0.05 * true_s
    assert energy_error > 0


def test_mtp_layers_stay_together_on_the_last_stage_of_a_rank():
    layout, other = layout_of("Ed", "dd", "ddd", "ddMMh"), layout_of("Ed", "dd", "ddddMM", "h")
    job, other_job = (MeasuredJob(each, profile_of(each), interleaved(2, 2, 4)) for each in (layout, other))
    found = Balance(job, [other_job]).partition({"today": layout.cut})
    stages = layout.cut_into(found.cut).stages
    (with_mtp,) = [stage for stage, parts in enumerate(stages) if any(part.kind == "mtp" for part in parts)]
    assert with_mtp >= 2


def test_a_tied_head_needs_a_schedule_with_both_ends_on_one_rank():
    balance = Balance(job_of("Edd", "ddd", "dddh"), tied_on_one_rank=True)
    with pytest.raises(ConfigError, match=r"--tied-on-one-rank: .*different ranks"):
        balance.partition({"today": (3, 3, 4)})


def test_other_sizes_keep_gpus_and_batch():
    job = job_of("Eddd", "dddd", "dddd", "ddddh", data_parallel=2)
    balance = Balance(job)

    def schedule_of(ranks, stages_per_rank, micro_batches):
        is_single = stages_per_rank == 1
        return one_f_one_b(ranks, micro_batches) if is_single else interleaved(ranks, stages_per_rank, micro_batches)

    half = balance.of_size(2, 2, schedule_of)
    assert (half.pipelines, half.micro_batches) == (4, 4)
    assert half.found.bubble < balance.of_size(4, 1, schedule_of).found.bubble
    assert "not a multiple of 3" in balance.of_size(3, 1, schedule_of).problem
    assert "fewer than its stages" in balance.of_size(8, 4, schedule_of).problem
    few = Balance(job_of("Eddd", "dddd", "dddd", "ddddh", micro_batches=6))
    assert "Megatron-Core needs a multiple of the pipeline size" in few.of_size(4, 2, schedule_of).problem


def test_memory_of_ranks_follows_from_parameters_and_layers_held():
    sizes = {"embedding": 100, "dense": 10, "head": 100}
    layout = layout_of("Eddd", "dddd", "ddddd", "ddddh", parameters=sizes)
    schedule = one_f_one_b(4, 8)
    held = [4, 3, 2, 1]  # micro-batches held by each stage
    known = [
        1000 + 16 * sum(part.parameters for part in parts) + 50 * held[s] * sum(p.kind == "dense" for p in parts)
        for s, parts in enumerate(layout.stages)
    ]
    balance = Balance(MeasuredJob(layout, profile_of(layout), schedule, memory_bytes=known))
    assert balance.memory == pytest.approx((1000, 16, 50))
    assert balance.memory_bytes(layout) == known
    moved = layout.cut_into((5, 4, 5, 4))
    assert balance.memory_bytes(moved)[0] == pytest.approx(1000 + 16 * 140 + 50 * 4 * 4)
    most = balance.partition({"today": layout.cut}, memory_bytes=4000).most_frugal
    assert max(balance.memory_bytes(layout.cut_into(most.cut))) <= 4000
    with pytest.raises(ConfigError, match=r"--memory-gib: .*at least three ranks"):
        Balance(replace(balance.job, memory_bytes=())).partition({"today": layout.cut}, memory_bytes=1e9)
