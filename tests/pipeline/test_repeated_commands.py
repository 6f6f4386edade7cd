"""Commands that are read again in every iteration."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from perseus_ds.pipeline import commands
from perseus_ds.pipeline.commands import CommandReader, RepeatedReader, phase_of

NAMES = ("LoadMicroBatch", "ForwardPass", "BackwardOnlyPass", "WeightPass", "SendActivation", "CommitP2P", "Unknown")
CLASSES = [type(name, (), {}) for name in NAMES]


def command(class_number, phase):
    made = CLASSES[class_number]()
    made.phase = phase
    return made


ITERATION = st.lists(st.builds(command, st.integers(0, len(CLASSES) - 1), st.integers(0, 1)), max_size=12)


def read_by(reader, iteration):
    return [reader.read(command) for command in iteration]


@given(st.lists(ITERATION, max_size=4).flatmap(lambda known: st.lists(st.sampled_from(known or [[]]), max_size=8)))
def test_iterations_are_read_as_if_each_were_the_first(iterations):
    repeated = RepeatedReader(0, 2, batched=True)
    for iteration in iterations:
        fresh = CommandReader(0, 2, batched=True)
        repeated.begin_iteration()
        expected = [fresh.read(type(command), phase_of(command)) for command in iteration]
        assert read_by(repeated, iteration) == expected


def test_a_repeated_iteration_is_not_read_again(monkeypatch):
    @dataclass
    class ForwardPass:
        phase: int = 0

    repeated = RepeatedReader(0, 2, batched=False)
    repeated.begin_iteration()
    first = read_by(repeated, [ForwardPass(), ForwardPass()])
    monkeypatch.setattr(commands, "parts_of", None)
    repeated.begin_iteration()
    assert read_by(repeated, [ForwardPass(), ForwardPass()]) == first
