"""Numbers go to rank 0 and answers come back, through all levels, on the modelled network and on gloo."""

import numpy as np
import pytest
import scale
from scale_network import Network

from perseus_ds.distributed.tree import GROUP_SIZE


def exchange(size, answers):
    """Let ranks exchange their number; return the answer to each, and the network."""
    network = Network(range(size))
    network.begin_round()
    pending = [network.exchange(rank, [float(rank), 1.0], answers, 2) for rank in reversed(range(size))]
    network.finish_round()
    return np.array([each.result() for each in reversed(pending)]), network


@pytest.mark.parametrize("size", [1, 2, GROUP_SIZE, GROUP_SIZE + 1, 2 * GROUP_SIZE**2 + 3])
def test_each_rank_gets_its_own_answer_made_of_the_numbers_of_all(size):
    answers, _ = exchange(
        size, lambda numbers: np.stack([numbers[:, 0] + 0.5, numbers.sum(axis=0)[[1] * size]], axis=1)
    )
    assert answers.tolist() == [[rank + 0.5, size] for rank in range(size)]


def test_answers_that_cannot_be_made_keep_no_rank_waiting(caplog):
    answers, _ = exchange(GROUP_SIZE + 3, lambda numbers: 1 / 0)
    assert np.isnan(answers).all()
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_leaf_sends_and_receives_once_however_many_ranks_there_are():
    small, large = (exchange(size, np.array)[1] for size in (GROUP_SIZE, 3 * GROUP_SIZE**2))
    assert small.messages_of[1] == large.messages_of[1] == [2]
    assert small.bytes_of[1] == large.bytes_of[1] == [32]
    assert large.bytes_of[0][0] <= 3 * GROUP_SIZE * small.bytes_of[0][0] * 1.5, "in proportion to the ranks"


def test_the_benchmark_of_scale_runs_the_real_code_and_its_costs_grow_with_the_ranks_at_most():
    small, large = (scale.modelled(ranks, until_run=36, measured=4) for ranks in (64, 192))
    for name in ("leaf: sent and received [bytes]", "leaf: messages", "set-up: collectives"):
        assert small[name] == large[name]
    for name in ("rank 0: sent and received [bytes]", "run.jsonl [bytes an iteration]", "control status [bytes]"):
        assert large[name] <= 3.3 * small[name]


@pytest.mark.extended
def test_reports_pass_through_two_levels_on_gloo():
    figures = scale.real(GROUP_SIZE + 4, iterations=5)
    assert figures["leaf: training thread [ms]"] > 0
