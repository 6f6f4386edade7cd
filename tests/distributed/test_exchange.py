"""Numbers go to rank 0 and answers come back, through all levels, on the modelled network and on gloo."""

import numpy as np
import pytest
import scale
from scale_network import Network

from perseus_ds.distributed import MOST_MESSAGE_BYTES, Messages, Widths
from perseus_ds.distributed.tree import GROUP_SIZE


def exchange(size, answers, message_bytes=0, messages=None):
    """Let ranks exchange their number; return the answer to each, and the network."""
    network = Network(range(size))
    for rank, content in (messages or {}).items():
        network.messages[rank].add(content)
    return exchange_on(network, answers, message_bytes), network


def exchange_on(network, answers, message_bytes=0):
    network.begin_round()
    widths = Widths(2, 1, message_bytes)
    ranks = range(network.size)
    pending = [network.exchange(rank, [float(rank), 1.0], answers, widths) for rank in reversed(ranks)]
    network.finish_round()
    return np.array([each.result() for each in reversed(pending)])


def sums_and_half(numbers):
    return numbers.sum(axis=0), numbers[:, :1] + 0.5


@pytest.mark.parametrize("size", [1, 2, GROUP_SIZE, GROUP_SIZE + 1, 2 * GROUP_SIZE**2 + 3, 23 * GROUP_SIZE])
def test_each_rank_gets_its_own_answer_made_of_the_numbers_of_all(size):
    answers, _ = exchange(size, sums_and_half)
    assert answers.tolist() == [[size * (size - 1) / 2, size, rank + 0.5] for rank in range(size)]


def test_answers_that_cannot_be_made_keep_no_rank_waiting(caplog):
    answers, _ = exchange(GROUP_SIZE + 3, lambda numbers: 1 / 0)
    assert np.isnan(answers).all()
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_leaf_sends_and_receives_once_however_many_ranks_there_are():
    small, large = (exchange(size, sums_and_half)[1] for size in (GROUP_SIZE, 3 * GROUP_SIZE**2))
    assert small.messages_of[1] == large.messages_of[1] == [2]
    assert small.bytes_of[1] == large.bytes_of[1] == [40]


@pytest.mark.parametrize("size", [GROUP_SIZE**2 + 1, 20 * GROUP_SIZE, 3 * GROUP_SIZE**2 - 5, 8 * GROUP_SIZE**2 + 1])
def test_rank_0_sends_and_receives_in_proportion_to_the_ranks(size):
    """Members of a group send as much as the largest of them, so groups are such that few stand for less."""
    each = 3 * 8
    assert exchange(size, sums_and_half)[1].bytes_of[0][0] <= 1.25 * each * size


def test_messages_go_to_rank_0_with_the_numbers_and_do_not_change_them():
    size = 2 * GROUP_SIZE**2 + 3
    told = {rank: f"rank {rank} has something to tell".encode() for rank in (1, GROUP_SIZE, 70, size - 1)}
    answers, network = exchange(size, sums_and_half, message_bytes=4 * 64, messages=told)
    assert answers[-1].tolist() == [size * (size - 1) / 2, size, size - 0.5]
    arrived = network.messages[0].take_all()
    assert sorted(content for _, content in arrived) == sorted(told.values())
    assert all(0 <= age_s < 60 for age_s, _ in arrived)
    assert not any(messages.size for messages in network.messages.values())


def test_messages_that_have_no_place_go_with_a_later_exchange():
    size = GROUP_SIZE**2
    told = {rank: f"rank {rank}".encode() for rank in range(1, size)}
    _, network = exchange(size, sums_and_half, message_bytes=100, messages=told)
    arrived, rounds = [content for _, content in network.messages[0].take_all()], 1
    assert 0 < len(arrived) < len(told)
    while len(arrived) < len(told):
        exchange_on(network, sums_and_half, message_bytes=100)
        found = [content for _, content in network.messages[0].take_all()]
        assert found, "each exchange brings some"
        arrived, rounds = arrived + found, rounds + 1
    assert (sorted(arrived), rounds > 1) == (sorted(told.values()), True)


def test_a_message_that_is_longer_than_a_block_is_cut_off_and_keeps_no_other_waiting():
    messages = Messages()
    messages.add(b"x" * 2 * MOST_MESSAGE_BYTES)
    messages.add(b"after it")
    blocks = [messages.take_block(MOST_MESSAGE_BYTES), messages.take_block(MOST_MESSAGE_BYTES)]
    for block in blocks:
        messages.add_block(block)
    long, after = [content for _, content in messages.take_all()]
    assert (len(long) > MOST_MESSAGE_BYTES / 2, after) == (True, b"after it")


def test_the_benchmark_of_scale_runs_the_real_code_and_its_costs_grow_with_the_ranks_at_most():
    small, large = (scale.modelled(ranks, until_run=36, measured=4) for ranks in (64, 192))
    for name in ("leaf: sent and received [bytes]", "leaf: messages", "set-up: collectives that wait for all ranks"):
        assert small[name] == large[name]
    for name in ("rank 0: sent and received [bytes]", "run.jsonl [bytes an iteration]", "control status [bytes]"):
        assert large[name] <= 3.3 * small[name]


@pytest.mark.extended
def test_reports_and_events_pass_through_two_levels_on_gloo():
    figures = scale.real(2 * GROUP_SIZE, iterations=5)
    assert figures["leaf: training thread [ms]"] > 0
