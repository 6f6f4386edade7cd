"""Partitions compared with all cuts of small models."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pipelines import dual_pipe_v, interleaved, one_f_one_b

from perseus_ds.errors import ConfigError
from perseus_ds.layouts.partition import LayerCosts, best_partition, shares_of
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.dag import Dag, FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Schedule
from perseus_ds.simulation.device_models import DEVICES

CLOCKS_MHZ = (810, 1005, 1200, 1410)


def costs(forward_s, backward_s, *, clocks_mhz=CLOCKS_MHZ, fixed_bytes=None, held_bytes=None):
    device, layers = DEVICES["a100-sxm"], len(forward_s)
    time_s = {
        kind: np.outer(times, [device.slowdown(clock) for clock in clocks_mhz])
        for kind, times in ((Kind.FORWARD, forward_s), (Kind.BACKWARD, backward_s))
    }
    return LayerCosts(
        clocks_mhz=clocks_mhz,
        time_s=time_s,
        energy_j={kind: times * [device.power_w(clock) for clock in clocks_mhz] for kind, times in time_s.items()},
        parameters=np.ones(layers),
        fixed_bytes=np.ones(layers) if fixed_bytes is None else np.array(fixed_bytes, dtype=float),
        held_bytes=np.zeros(layers) if held_bytes is None else np.array(held_bytes, dtype=float),
        blocking_power_w=device.blocking_power_w,
        gpu=device.name,
        simulated=True,
    )


def all_cuts(layers, stages):
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, layers)))


def time_s(model, schedule, cut):
    return problem_for(schedule, model.profile(shares_of(cut))).baseline.time_s


seconds = st.floats(0.01, 0.1)
models = st.integers(4, 7).flatmap(
    lambda layers: st.builds(costs, *(st.lists(seconds, min_size=layers, max_size=layers) for _ in range(2)))
)
# In these, several cuts are equally fast.
alike = st.builds(
    lambda layers, head: costs([0.01] * (layers - 1) + [head], [0.02] * (layers - 1) + [2 * head]),
    st.integers(5, 9),
    st.sampled_from([0.01, 0.015, 0.027]),
)


@settings(max_examples=25)
@given(models | alike, st.integers(1, 4), st.integers(1, 6))
def test_no_cut_is_faster_than_the_one_that_is_proven(model, stages, micro_batches):
    schedule = one_f_one_b(stages, micro_batches)
    # With one clock, there is nothing to plan.
    found = best_partition(one_clock(model), schedule)
    best_s = min(time_s(model, schedule, cut) for cut in all_cuts(model.layers, stages))
    assert found.fastest.time_s == pytest.approx(best_s, rel=1e-9)
    assert found.time_gap == 0
    assert found.time_bound_s <= best_s * (1 + 1e-9)


def one_clock(model):
    time_s, energy_j = ({kind: of[kind][:, -1:] for kind in of} for of in (model.time_s, model.energy_j))
    return replace(model, clocks_mhz=CLOCKS_MHZ[-1:], time_s=time_s, energy_j=energy_j)


@settings(max_examples=3)
@given(alike | models, st.integers(2, 3), st.integers(2, 4))
def test_no_cut_as_fast_uses_less_energy_than_the_bound(model, stages, micro_batches):
    schedule = one_f_one_b(stages, micro_batches)
    found = best_partition(model, schedule)
    deadline_s = found.fastest.time_s * (1 + 1e-9)
    as_fast = [cut for cut in all_cuts(model.layers, stages) if time_s(model, schedule, cut) <= deadline_s]
    planned_j = [
        optimize(schedule, model.profile(shares_of(cut)), plans=12).lookup(deadline_s).energy_j for cut in as_fast
    ]
    assert found.cut in as_fast
    assert found.most_frugal.planned_j == pytest.approx(planned_j[as_fast.index(found.cut)])
    assert found.most_frugal.planned_j <= found.fastest.planned_j < found.fastest.energy_j
    assert 0 < found.energy_bound_j <= min(planned_j) * (1 + 1e-9)


def test_a_large_model_with_many_equal_layers_is_proven():
    model = one_clock(costs([0.01] * 95 + [0.02], [0.02] * 95 + [0.04]))
    assert best_partition(model, one_f_one_b(8, 32)).time_gap == 0


def test_cuts_that_need_too_much_memory_are_left_out():
    model = costs([0.01] * 6, [0.02] * 6, clocks_mhz=(1410,), fixed_bytes=[5, 1, 1, 1, 1, 1], held_bytes=[1] * 6)
    schedule = one_f_one_b(2, 4)  # the first stage holds two micro-batches, the last one
    assert best_partition(model, schedule).fastest.cut == (3, 3)
    assert best_partition(model, schedule).fastest.memory_bytes == 5 + 1 + 1 + 2 * 3
    limited = best_partition(model, schedule, memory_bytes=12)
    assert limited.fastest.cut == (2, 4)
    assert limited.fastest.memory_bytes == 10
    with pytest.raises(ConfigError, match=r"with the best cut into 2 stages, \(., .\), the fullest one needs"):
        best_partition(model, schedule, memory_bytes=7)


@settings(max_examples=15)
@given(models, st.sampled_from([dual_pipe_v(2, 4), *(interleaved(2, *sizes) for sizes in ((2, 2), (2, 4), (3, 4)))]))
# The bounds of slower cuts are up to 10 % below the best time.
@example(costs([0.1, 0.02, 0.02, 0.08, 0.01, 0.02], [0.01, 0.06, 0.07, 0.1, 0.03, 0.1]), interleaved(2, 2, 4))
def test_with_several_stages_on_each_rank_too_no_cut_is_faster(model, schedule):
    fixed = FixedDurations(tail_s={0: 0.02, 1: 0.05}, transfer_s={("activation", 0, 1): 0.01})
    model = replace(one_clock(model), fixed=fixed)
    assume(model.layers >= schedule.num_stages)
    found = best_partition(model, schedule)
    dag = Dag.build(schedule)

    def iteration_s(cut):
        profile = model.profile(shares_of(cut))
        durations_s = dag.fixed_durations_s(fixed)
        for number, node in enumerate(dag.nodes):
            if isinstance(node.work, Instruction) and node.work.kind is not Kind.TAIL:
                durations_s[number] = profile.at_highest_clock(node.work.stage, node.work.kind).time_s
        return dag.makespan_s(durations_s)

    best_s = min(map(iteration_s, all_cuts(model.layers, schedule.num_stages)))
    assert found.fastest.time_s == pytest.approx(best_s, rel=1e-9)
    assert found.time_gap == 0


@settings(max_examples=6)
@given(models, st.integers(2, 4), st.integers(2, 6))
def test_the_bound_of_divided_layers_holds_for_every_cut(model, stages, micro_batches):
    schedule = one_f_one_b(stages, micro_batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perseus_ds.layouts.partition._MOST_PLACES", 0)
        found = best_partition(one_clock(model), schedule)
    best_s = min(time_s(model, schedule, cut) for cut in all_cuts(model.layers, stages))
    assert found.time_bound_s <= best_s * (1 + 1e-9)
    assert best_s <= found.fastest.time_s * (1 + 1e-9) <= found.known["uniform"].time_s * (1 + 2e-9)


def test_many_virtual_stages_are_cut_with_a_bound():
    model = costs([0.001] + [0.01] * 30 + [0.04], [0.002] + [0.02] * 30 + [0.08])
    found = best_partition(one_clock(model), interleaved(4, 4, 8))
    assert found.fastest.time_s < 0.92 * found.known["uniform"].time_s
    assert found.fastest.time_s >= found.time_bound_s > 0.7 * found.fastest.time_s


def test_only_stages_that_the_engine_trains_are_proposed():
    model, schedule = one_clock(costs([0.01] * 8, [0.02] * 8)), one_f_one_b(2, 4)
    may_hold = np.ones((2, 9, 9), dtype=bool)
    may_hold[0, 0, 4:] = False
    assert best_partition(model, schedule, may_hold=may_hold).cut == (3, 5)
    with pytest.raises(ConfigError, match="no cut into 2 stages that the engine supports"):
        best_partition(model, schedule, may_hold=np.zeros((2, 9, 9), dtype=bool))


def test_impossible_partitions_are_errors():
    with pytest.raises(ConfigError, match="1 to 2 stages, not 3"):
        best_partition(costs([0.1, 0.1], [0.2, 0.2]), one_f_one_b(3, 4))
    stream = [Compute(Instruction(0, kind, 0)) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
    with pytest.raises(ConfigError, match="backward_input, backward_weight; layers are measured"):
        best_partition(costs([0.1], [0.2]), Schedule("split", 1, (tuple(stream),)))
