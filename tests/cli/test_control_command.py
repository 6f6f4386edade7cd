"""``perseus-ds control``: the command that it sends, and the answer that it prints."""

import json
from datetime import datetime, timedelta, timezone

import pytest
from live_records import facts_at

from perseus_ds.policy.goal import Goal
from perseus_ds.server.control_socket import ControlServer


@pytest.fixture
def received(run, tmp_path):
    """Commands received by a job with the current folder as output folder."""
    received = []

    def handle(command):
        received.append(command)
        if command.command == "status":
            return {"status": {**facts_at([], 0.0).model_dump(mode="json"), "paused": True}}
        return {"done": "as you say"}

    server = ControlServer(tmp_path, handle)
    yield received
    server.close()


def test_status_is_printed_as_by_watch_or_as_json(run, received):
    code, out, _ = run("control", "status", ".")
    assert code == 0
    words = " ".join(out.split())
    assert words.startswith("job gpt3 state no step yet phase starting")
    assert "saved nothing yet: no iteration under a plan" in words
    status = json.loads(run("control", "status", ".", "--json")[1])
    assert (status["name"], status["paused"], status["under_plans"]) == ("gpt3", True, None)


def test_a_command_is_sent_as_it_was_given(run, received):
    code, out, _ = run("control", "set", ".", "--max-slowdown", "0.05", "--watts", "900")
    assert (code, out) == (0, "as you say\n")
    assert received[-1].goal == Goal(max_slowdown=0.05, watts=900)
    run("control", "set", ".", "--max-slowdown", "none")
    assert received[-1].goal.model_dump(exclude_unset=True) == {"max_slowdown": None}
    run("control", "set", ".", "--finish-by", "2030-01-31T08:00:00Z", "--total-steps", "9")
    assert received[-1].goal == Goal(finish_by="2030-01-31T08:00:00Z", total_steps=9)
    run("control", "clear", ".", "--limit", "power")
    assert received[-1].limit == "power"
    run("control", "straggler", ".", "--pipeline", "1", "--slowdown", "1.2")
    assert (received[-1].pipeline, received[-1].slowdown, received[-1].after_iterations) == (1, 1.2, 0)


@pytest.mark.parametrize("later", ["1.5h", "1h30min", "90min", "5400s", "1h29m60s"])
def test_a_time_may_be_given_by_how_much_later_it_is(run, received, later):
    before = datetime.now(timezone.utc).replace(microsecond=0)
    run("control", "set", ".", "--power-fraction", "0.75", "--until", later)
    after = datetime.now(timezone.utc)
    assert before <= received[-1].goal.until - timedelta(seconds=5400) <= after


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set", "--max-slowdown", "5"], "--max-slowdown: expected a fraction below 1, got"),
        (["set", "--watts", "900", "--until", "2030-01-31T08:00:00"], "--until: expected a time with its time zone"),
        (["set"], "no limit is given. Give one, such as --max-slowdown 0.05"),
    ],
)
def test_a_wrong_or_incomplete_command_is_not_sent(run, received, words, message):
    command, *options = words
    code, _, err = run("control", command, ".", *options)
    assert (code, received) == (2, [])
    assert message in err
