"""Commands of clients: split backwards, unknown, registered and repeated commands."""

import pytest
from deepspeed.runtime.pipe import schedule as ds
from hypothesis import given
from hypothesis import strategies as st

from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline import commands
from perseus_ds.pipeline.commands import CommandReader, RepeatedReader, read_schedule, register_command
from perseus_ds.pipeline.dag import Dag, FixedDurations
from perseus_ds.pipeline.dependencies import check_dependencies
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Other


class BackwardOnlyPass(ds.BufferOpInstruction): ...


class WeightPass(ds.BufferOpInstruction): ...


class Compress(ds.BufferOpInstruction): ...


class WithoutBase(ds.BufferOpInstruction): ...


class OwnForward(ds.ForwardPass): ...


class SplitBackward(ds.TrainSchedule):
    """Like zero-bubble schedules: the last backward of each rank is whole, the others are split."""

    def steps(self):
        left = self.micro_batches
        for step in super().steps():
            found = []
            for command in step:
                if type(command) is ds.BackwardPass and left > 1:
                    left -= 1
                    found += [BackwardOnlyPass(command.buffer_id)]
                elif type(command) is ds.ReduceTiedGrads:
                    found += [WeightPass(0) for _ in range(self.micro_batches - 1)] + [command]
                else:
                    found.append(command)
            yield found


class WithUnknown(ds.TrainSchedule):
    def steps(self):
        for step in super().steps():
            yield [x for c in step for x in ([Compress(0), c] if type(c) is ds.SendActivation else [c])]


class WithOwnForward(ds.TrainSchedule):
    def steps(self):
        for step in super().steps():
            yield [OwnForward(c.buffer_id) if type(c) is ds.ForwardPass else c for c in step]


def test_a_split_backward_is_two_kinds_of_the_same_micro_batches():
    schedule = read_schedule(SplitBackward, ranks=2, micro_batches=3)
    for stage, instructions in enumerate(schedule.instructions):
        by_kind = {kind: [i.micro_batch for i in instructions if i.kind is kind] for kind in Kind}
        assert by_kind[Kind.BACKWARD_INPUT] == by_kind[Kind.BACKWARD_WEIGHT] == [0, 1]
        assert by_kind[Kind.BACKWARD] == [2]
        assert len(set(instructions)) == len(instructions)
        assert {i.stage for i in instructions} == {stage}
    check_dependencies(schedule)


def test_a_command_that_is_not_known_has_a_fixed_duration_and_is_kept_in_files():
    schedule = read_schedule(WithUnknown, ranks=2, micro_batches=3)
    others = [[operation for operation in stream if isinstance(operation, Other)] for stream in schedule.ranks]
    assert others == [[Other("Compress", 0, n) for n in range(3)], []]
    dag = Dag.build(schedule)
    durations_s = dag.fixed_durations_s(FixedDurations(other_s={("Compress", 0): 0.5}))
    assert dag.makespan_s(durations_s) == pytest.approx(1.5)
    text = ScheduleStreams.of(schedule).model_dump_json()
    assert ScheduleStreams.model_validate_json(text).to_schedule() == schedule


def test_a_registered_command_is_what_it_was_registered_as(monkeypatch):
    monkeypatch.setattr(commands, "_REGISTERED", {})
    register_command("Compress", "recompute")
    schedule = read_schedule(WithUnknown, ranks=2, micro_batches=2)
    assert [i for i in schedule.instructions[0] if i.kind is Kind.RECOMPUTE] == [
        Instruction(0, Kind.RECOMPUTE, n) for n in range(2)
    ]
    register_command("Compress", "nothing")
    plain = read_schedule(ds.TrainSchedule, ranks=2, micro_batches=2)
    assert read_schedule(WithUnknown, ranks=2, micro_batches=2).ranks == plain.ranks
    with pytest.raises(ConfigError, match=r"register_command: Compress as 'squeeze': expected one of forward"):
        register_command("Compress", "squeeze")


def test_a_command_derived_from_a_known_one_is_that_one():
    ours = read_schedule(WithOwnForward, ranks=2, micro_batches=2)
    assert ours.ranks == read_schedule(ds.TrainSchedule, ranks=2, micro_batches=2).ranks


NAMES = ("LoadMicroBatch", "ForwardPass", "BackwardOnlyPass", "WeightPass", "SendActivation", "CommitP2P", "Unknown")
CLASSES = [type(name, (), {}) for name in NAMES]


def test_unknown_commands_are_numbered_by_their_own_classes():
    reader = CommandReader(0, 2, batched=True)
    found = [reader.read(kind) for kind in (Compress, WithoutBase, Compress)]
    assert found == [(Other("Compress", 0, 0),), (Other("WithoutBase", 0, 0),), (Other("Compress", 0, 1),)]


def command(class_number, phase):
    made = CLASSES[class_number]()
    made.phase = phase
    return made


ITERATION = st.lists(st.builds(command, st.integers(0, len(CLASSES) - 1), st.integers(0, 1)), max_size=12)


@given(st.lists(ITERATION, max_size=4).flatmap(lambda known: st.lists(st.sampled_from(known or [[]]), max_size=8)))
def test_iterations_are_read_as_if_each_were_the_first(iterations):
    repeated = RepeatedReader(0, 2, batched=True)
    for iteration in iterations:
        fresh = CommandReader(0, 2, batched=True)
        repeated.begin_iteration()
        expected = [fresh.read(type(command), command.phase) for command in iteration]
        assert [repeated.read(command) for command in iteration] == expected


def test_a_command_without_a_phase_is_of_the_only_stage_of_its_rank():
    (forward,) = RepeatedReader(1, 4, batched=False).read(ds.ForwardPass(buffer_id=0))
    assert forward.instruction == Instruction(1, Kind.FORWARD, 0)
