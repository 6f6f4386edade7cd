from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import EarlyRecomputation, GPipe, MergedTransfers, dual_pipe_v, one_f_one_b

from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.dag import Dag, FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Schedule, Transfer, Wait

fast = settings(deadline=None, max_examples=40)
SCHEDULES = [
    one_f_one_b(1, 3),
    one_f_one_b(2, 3),
    one_f_one_b(4, 6),
    dual_pipe_v(2, 5),
    read_schedule(GPipe, ranks=3, micro_batches=3),
    read_schedule(MergedTransfers, ranks=3, micro_batches=4),
    read_schedule(EarlyRecomputation, ranks=3, micro_batches=4),
]


def durations_of(dag, time_of):
    """Return node durations, given by a function for instructions and zero for others."""
    return np.array([time_of(n.work) if isinstance(n.work, Instruction) else 0.0 for n in dag.nodes])


def slack_of(dag, durations):
    return dag.latest_finish_s(durations, dag.makespan_s(durations)) - dag.finish_s(durations)


def random_durations(dag, seed):
    # In sixteenths, so that sums are exact.
    return np.random.default_rng(seed).integers(0, 64, len(dag.nodes)) / 16


@fast
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 64), st.integers(0, 64))
def test_1f1b_with_equal_stages_takes_a_pair_of_passes_for_each_micro_batch_and_each_other_stage(
    stages, micro_batches, forward_s, backward_s
):
    dag = Dag.build(one_f_one_b(stages, micro_batches))
    durations = durations_of(dag, lambda i: {Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s}.get(i.kind, 0.0))
    assert dag.makespan_s(durations) == (micro_batches + stages - 1) * (forward_s + backward_s)


def test_a_sender_waits_until_its_receiver_is_there():
    # During rank 1's first forward of 10 s, rank 0 can neither send its second micro-batch nor start its third.
    schedule = read_schedule(GPipe, ranks=2, micro_batches=3)

    def time_of(i):
        slow = (i.stage, i.micro_batch) in ((1, 0), (0, 2))
        return 0.0 if i.kind is not Kind.FORWARD else 10.0 if slow else 1.0

    dag = Dag.build(schedule)
    assert dag.makespan_s(durations_of(dag, time_of)) == 22.0


@fast
@given(st.sampled_from(SCHEDULES), st.integers(0, 2**32 - 1), st.data())
def test_slack_is_by_how_much_one_node_can_be_longer(schedule, seed, data):
    dag = Dag.build(schedule)
    durations = random_durations(dag, seed)
    slack, makespan = slack_of(dag, durations), dag.makespan_s(durations)
    assert (slack >= 0).all()
    node = data.draw(st.integers(0, len(dag.nodes) - 1))
    longer = durations.copy()
    longer[node] += slack[node]
    assert dag.makespan_s(longer) == makespan
    longer[node] += 1.0
    assert dag.makespan_s(longer) == makespan + 1.0


@fast
@given(st.sampled_from(SCHEDULES), st.integers(0, 2**32 - 1))
def test_the_critical_path_explains_the_makespan(schedule, seed):
    dag = Dag.build(schedule)
    durations = random_durations(dag, seed)
    path = dag.critical_path(durations)
    assert durations[path].sum() == dag.makespan_s(durations)
    assert not dag.predecessors[path[0]]
    assert all(a in dag.predecessors[b] for a, b in pairwise(path))
    assert (slack_of(dag, durations)[path] == 0).all()


def test_loads_transfers_and_tails_take_their_own_time():
    dag = Dag.build(one_f_one_b(2, 1))
    fixed = FixedDurations(
        load_s={0: 1.0, 1: 2.0},
        transfer_s={("activation", 0, 1): 4.0, ("grad", 1, 0): 8.0},
        tail_s={0: 16.0, 1: 64.0},
    )
    passes = durations_of(dag, lambda i: {Kind.FORWARD: 128.0, Kind.BACKWARD: 256.0}.get(i.kind, 0.0))
    durations = dag.fixed_durations_s(fixed) + passes
    # load 0, forward 0, send, load 1, forward 1, backward 1, send back; then backward 0 and its tail.
    until_gradient = 1 + 128 + 4 + 2 + 128 + 256 + 8
    assert dag.makespan_s(durations) == until_gradient + 256 + 16
    tail = next(n for n, node in enumerate(dag.nodes) if node.work == Instruction(1, Kind.TAIL, 0))
    assert dag.finish_s(durations)[tail] == until_gradient + 64


def forward(stage):
    return Compute(Instruction(stage, Kind.FORWARD, 0))


DOWN, UP = Transfer("activation", 0, 1, 0), Transfer("grad", 1, 0, 0)


def test_two_blocking_sends_to_each_other_deadlock_but_not_in_one_exchange():
    crossed = [(Exchange(sends=(DOWN,)), Exchange(receives=(UP,))), (Exchange(sends=(UP,)), Exchange(receives=(DOWN,)))]
    with pytest.raises(ScheduleError) as error:
        Dag.build(Schedule("test:Crossed", 1, tuple((forward(r), *own) for r, own in enumerate(crossed))))
    assert "test:Crossed deadlocks" in str(error.value)
    assert "rank 0, operation 1: send activation of micro-batch 0 from stage 0 to stage 1" in str(error.value)
    assert "rank 1, operation 1: send grad of micro-batch 0 from stage 1 to stage 0" in str(error.value)
    together = (Exchange(sends=(DOWN,), receives=(UP,)), Exchange(sends=(UP,), receives=(DOWN,)))
    streams = tuple((forward(rank), exchange) for rank, exchange in enumerate(together))
    assert len(Dag.build(Schedule("test:Batched", 1, streams)).nodes) == 4


def test_a_transfer_without_a_partner_names_the_rank():
    computing, sending, receiving = (forward(0),), (forward(0), Exchange(sends=(DOWN,))), (Exchange(receives=(DOWN,)),)
    for ranks, problem in (
        ((sending, (forward(1),)), "rank 0 sends it, no rank receives it"),
        ((computing, receiving), "rank 1 receives it, no rank sends it"),
    ):
        with pytest.raises(ScheduleError, match=f"activation of micro-batch 0 .* has no partner: {problem}"):
            Dag.build(Schedule("test:Unmatched", 1, ranks))


def test_a_launched_send_does_not_block_its_rank_until_the_wait_operation():
    second = Compute(Instruction(0, Kind.FORWARD, 1))
    busy = Compute(Instruction(1, Kind.FORWARD, 1))
    after = Compute(Instruction(0, Kind.BACKWARD, 0))
    schedule = Schedule(
        "test:Launched",
        2,
        (
            (forward(0), Launch(sends=(DOWN,)), second, Wait((DOWN,)), after),
            (busy, Exchange(receives=(DOWN,)), forward(1)),
        ),
    )
    dag = Dag.build(schedule)
    lasts = {forward(0): 1.0, second: 2.0, busy: 10.0, forward(1): 1.0, after: 4.0}
    durations = durations_of(dag, lambda i: lasts[Compute(i)])
    begins = {dag.nodes[n].work: dag.finish_s(durations)[n] - durations[n] for n in range(len(dag.nodes))}
    assert begins[second.instruction] == 1.0
    assert begins[DOWN] == begins[after.instruction] == 10.0
