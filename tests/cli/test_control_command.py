"""``perseus-ds control``: the command that it sends, and the answer that it prints."""

import json

import pytest

from perseus_ds.server.control_socket import ControlServer
from perseus_ds.server.progress import JobProgress


@pytest.fixture
def orders(run, tmp_path):
    """Commands received by a job with the current folder as output folder."""
    orders = []

    def handle(order):
        orders.append(order)
        if order.command == "status":
            return {"status": {**JobProgress().facts("gpt3", 0.0).model_dump(mode="json"), "paused": True}}
        return {"done": "as you say"}

    server = ControlServer(tmp_path, handle)
    yield orders
    server.close()


def test_status_is_printed_as_by_watch_or_as_json(run, orders):
    code, out, _ = run("control", "status", ".")
    assert code == 0
    words = " ".join(out.split())
    assert words.startswith("job gpt3 state no step yet phase starting policy none")
    assert "saved nothing yet: no iteration under a plan" in words
    status = json.loads(run("control", "status", ".", "--json")[1])
    assert (status["name"], status["paused"], status["saved_j"]) == ("gpt3", True, 0.0)


def test_an_order_is_sent_as_it_was_given(run, orders):
    code, out, _ = run("control", "policy", ".", "--name", "slowdown", "--max-slowdown", "0.05")
    assert (code, out) == (0, "as you say\n")
    assert (orders[0].policy.name, orders[0].policy.max_slowdown) == ("slowdown", 0.05)
    run("control", "straggler", ".", "--pipeline", "1", "--slowdown", "1.2")
    assert (orders[1].pipeline, orders[1].slowdown, orders[1].after_iterations) == (1, 1.2, 0)
    for duration in ("1.5h", "1h30min", "90min", "5400s", "1h29m60s"):
        run("control", "reduce", ".", "--power-fraction", "0.75", "--duration", duration, "--within", "30s")
        assert (orders[-1].power_fraction, orders[-1].duration_s, orders[-1].within_s) == (0.75, 5400.0, 30.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policy", "--name", "slowdown", "--max-slowdown", "5"], "--max-slowdown: expected a fraction below 1, got"),
        (["policy", "--name", "energy_optmal"], "did you mean 'energy_optimal'?"),
        (["reduce", "--power-fraction", "0.75", "--duration", "3"], "--duration: expected a time such as 90s, 30min"),
    ],
)
def test_a_wrong_or_incomplete_order_is_not_sent(run, orders, words, message):
    order, *options = words
    code, _, err = run("control", order, ".", *options)
    assert (code, orders) == (2, [])
    assert message in err
