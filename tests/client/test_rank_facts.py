"""The facts of a rank that the server of a job receives."""

import pytest
import torch
from pipelines import one_f_one_b

from perseus_ds.client.meeting import EngineFacts, rank_facts
from perseus_ds.config import parse_block
from perseus_ds.protocol.job_messages import JobDescription, decode_description, encode
from perseus_ds.simulation.gpu import SimulatedGpu


@pytest.mark.parametrize(
    ("given", "expected"), [(10, 10), (1e9, 10**9), (float("inf"), None), (float("nan"), None), (10**30, None)]
)
def test_an_interval_of_printed_steps_in_any_notation_is_valid(given, expected):
    facts = EngineFacts(pipeline=(0,), copies=(0,), device=torch.device("cpu"), steps_per_print=given)
    own = rank_facts(parse_block({}), facts, one_f_one_b(ranks=1, micro_batches=2), SimulatedGpu.named("a100-sxm"))
    received = decode_description(encode(JobDescription.of(b"{}", (own,))))
    assert received.ranks[0].steps_per_print == expected
