"""``perseus-ds control``: the order that it sends, and the answer that it prints."""

import json

import pytest

from perseus_ds.cli.main import main
from perseus_ds.policy.control_socket import ControlServer
from perseus_ds.runtime.progress import JobProgress


@pytest.fixture
def job(tmp_path):
    """A job that takes every order: its output folder, and the orders it got."""
    orders = []

    def handle(order):
        orders.append(order)
        if order.command == "status":
            return {"status": {**JobProgress().facts("gpt3", 0.0).model_dump(mode="json"), "paused": True}}
        return {"done": "as you say"}

    server = ControlServer(tmp_path, handle)
    yield tmp_path, orders
    server.close()


def test_status_is_told_as_watch_tells_it(job, capsys):
    folder, _ = job
    assert main(["control", "status", str(folder)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith("job gpt3 state no step yet phase starting policy none")
    assert "saved nothing yet: no iteration under a plan" in words


@pytest.mark.parametrize("word", ["json=true", "--json"])
def test_status_is_an_object_for_programs(job, capsys, word):
    folder, _ = job
    assert main(["control", "status", str(folder), word]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["name"], status["paused"], status["saved_j"]) == ("gpt3", True, 0.0)


def test_a_policy_is_sent_as_it_was_given(job, capsys):
    folder, orders = job
    assert main(["control", "policy", str(folder), "policy.name=slowdown", "policy.max_slowdown=0.05"]) == 0
    assert capsys.readouterr().out == "as you say\n"
    assert (orders[0].policy.name, orders[0].policy.max_slowdown) == ("slowdown", 0.05)


def test_a_wrong_policy_is_not_sent(job, capsys):
    folder, orders = job
    assert main(["control", "policy", str(folder), "policy.name=slowdown", "policy.max_slowdown=5"]) == 2
    assert "policy.max_slowdown: expected a fraction below 1, got 5; was 0.05 meant" in capsys.readouterr().err
    assert main(["control", "policy", str(folder), "policy.name=energy_optmal"]) == 2
    assert "did you mean 'energy_optimal'?" in capsys.readouterr().err
    assert orders == []


def test_all_that_an_order_lacks_is_named_at_once(job, capsys):
    folder, orders = job
    assert main(["control", "straggler", str(folder)]) == 2
    assert "pipeline and slowdown are missing: write pipeline=… slowdown=…" in capsys.readouterr().err
    assert orders == []


def test_a_reduction_is_sent_in_seconds(job):
    folder, orders = job
    assert main(["control", "reduce", str(folder), "power_fraction=0.75", "duration=1.5h", "within=30s"]) == 0
    assert (orders[0].power_fraction, orders[0].duration_s, orders[0].within_s) == (0.75, 5400.0, 30.0)


def test_a_time_without_a_unit_is_not_sent(job, capsys):
    folder, orders = job
    assert main(["control", "reduce", str(folder), "power_fraction=0.75", "duration=3"]) == 2
    assert "duration=3: expected a time such as 90s, 30min or 3h" in capsys.readouterr().err
    assert orders == []
