"""What an engine reports does not depend on what is timed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from perseus_ds.config import parse_block
from perseus_ds.engines.engine import Session, SessionState, token_ids
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange


def test_all_operations_and_their_inputs_are_reported_also_while_nothing_is_timed():
    reported = []

    def operation(*reports):
        reported.append(reports)
        return nullcontext()

    runtime = SimpleNamespace(
        iteration=lambda *_: nullcontext(),
        operation=operation,
        add_tokens=lambda count: None,
        close=lambda: None,
    )
    session = Session(SimpleNamespace(read=None), parse_block({}))
    session.runtime, session.state = runtime, SessionState.BETWEEN
    forward = Compute(Instruction(0, Kind.FORWARD, 0)), ((8, 128),)
    with session.iteration("1f1b"):
        for reports in (forward, (Exchange(),)):
            with session.operation(*reports):
                pass
    session.end_iteration()
    session.close()
    assert reported == [forward, (Exchange(),)]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        pytest.param([torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)], 16, id="ids first"),
        pytest.param([None, torch.zeros(2, 8, dtype=torch.int32)], 16, id="after none"),
        pytest.param([torch.zeros(2, 8)], 0, id="floats"),
        pytest.param([torch.zeros(2, 3, 8, 8, dtype=torch.uint8)], 0, id="images"),
        pytest.param([], 0, id="nothing"),
    ],
)
def test_only_integers_of_a_batch_of_sequences_are_token_ids(inputs, expected):
    assert token_ids(inputs) == expected
