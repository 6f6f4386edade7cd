"""``perseus-ds control``: the order that it sends, and the answer that it prints."""

import pytest

from perseus_ds.cli.main import main
from perseus_ds.policy.control_socket import ControlServer


@pytest.fixture
def job(tmp_path):
    """A job that takes every order: its output folder, and the orders it got."""
    orders = []

    def handle(order):
        orders.append(order)
        if order.command == "status":
            return {"status": {"next": {"plan": 3, "plans": [3, 7]}, "paused": False, "last": {"plan": 2}}}
        return {"done": "as you say"}

    server = ControlServer(tmp_path, handle)
    yield tmp_path, orders
    server.close()


def test_status_tells_the_last_iteration_from_the_next_one(job, capsys):
    folder, _ = job
    assert main(["control", "status", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["paused False", "next:", "plan 3", "plans [3, 7]", "last:", "plan 2"]


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
