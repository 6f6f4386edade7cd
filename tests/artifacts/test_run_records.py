"""run.jsonl: what is written is read back, old files too, and whatever disks do to it."""

import json
import typing
from pathlib import Path

import pytest

from perseus_ds.artifacts.run_records import (
    Drifted,
    Ended,
    Event,
    Failed,
    IterationRecord,
    PlanChosen,
    Started,
    from_line,
    read_records,
    to_line,
)
from perseus_ds.errors import ConfigError

ITERATION = IterationRecord(iteration=3, phase="run", plan=1, time_s=2.0, energy_j=30.0, default_energy_j=40.0)


@pytest.mark.parametrize(
    "record",
    [
        ITERATION,
        Started(mode="auto", gpu="A100", job="f00", policy={"name": "slowdown", "max_slowdown": 0.05}, time=5.0),
        PlanChosen(plan=3, plans=(3, 7), straggler=1, slowdown=1.25),
        Drifted(drift=0.07, profiles_again=False),
        Failed(event="cache", error="no space"),
        Ended(iterations=9, planned=4, saved=0.25, slowdown=0.01, baseline="default clocks"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_is_read_as_it_was_written(record):
    assert from_line(to_line(record)) == record


def test_savings_and_lateness_follow_from_what_is_stored_and_are_not_stored():
    record = ITERATION.model_copy(update={"predicted_time_s": 1.6})
    assert (record.saved, record.power_w, record.late) == (0.25, 15.0, pytest.approx(0.25))
    assert {"saved", "power_w", "late"}.isdisjoint(json.loads(to_line(record)))


def test_an_event_of_a_later_version_is_read_as_an_event():
    event = from_line('{"event": "eclipse", "time": 3.0, "by": "the moon"}')
    assert type(event) is Event
    assert (event.event, event.time) == ("eclipse", 3.0)


def test_every_key_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "file-formats.md").read_text(encoding="utf-8")
    section = page[page.index("## `run.jsonl`") : page.index("## `timeline.json`")]
    models = [IterationRecord, *Event.__subclasses__()]
    assert not [key for model in models for key in model.model_fields if f"`{key}`" not in section]
    names = [name for model in models[1:] for name in typing.get_args(model.model_fields["event"].annotation)]
    assert len(names) > 8
    assert not [name for name in names if f"`{name}`" not in section]


def test_a_last_line_that_was_cut_off_is_left_out_and_any_other_is_named(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(to_line(ITERATION) + '{"iteration": 5, "ti')
    assert read_records(tmp_path) == read_records(path) == [ITERATION]
    path.write_text(to_line(ITERATION) + "[]\n" + to_line(ITERATION))
    with pytest.raises(ConfigError, match=r"run\.jsonl, line 2: not a record"):
        read_records(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        read_records(tmp_path / "none" / "run.jsonl")
