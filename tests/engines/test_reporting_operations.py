"""What an engine reports does not depend on what is timed."""

from contextlib import nullcontext
from types import SimpleNamespace

from perseus_ds.config import parse_block
from perseus_ds.engines.engine import Session
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
        close=lambda: None,
    )
    session = Session(SimpleNamespace(read=None), parse_block({}))
    session.runtime = runtime
    forward = Compute(Instruction(0, Kind.FORWARD, 0)), ((8, 128),)
    with session.iteration("1f1b"):
        for reports in (forward, (Exchange(),)):
            with session.operation(*reports):
                pass
    session.end_iteration()
    session.close()
    assert reported == [forward, (Exchange(),)]
