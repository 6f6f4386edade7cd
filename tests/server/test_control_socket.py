"""Orders over the Unix socket: permissions, format and effects."""

import contextlib
import json
import math
import os
import socket
import stat
import threading
from pathlib import Path

import pytest
from run_log import GIVE_UP_S
from virtual.time import VirtualTime

from perseus_ds.errors import ConfigError
from perseus_ds.policy.orders import parse_order
from perseus_ds.policy.policies import POLICY, EnergyOptimalPolicy, SlowdownPolicy
from perseus_ds.server import control_socket
from perseus_ds.server.control_socket import ControlServer, send_order
from perseus_ds.server.job_control import JobControl


@pytest.fixture
def orders():
    return job_control()


def job_control(policy=SlowdownPolicy()):  # noqa: B008 - it is frozen
    return JobControl(policy, pipelines=2, timebase=VirtualTime())


@pytest.fixture
def folder(tmp_path, orders):
    server = ControlServer(tmp_path / "run", orders.carry_out)
    yield tmp_path / "run"
    server.close()


def test_only_the_owner_can_reach_it_and_nothing_is_left_behind(tmp_path):
    server = ControlServer(tmp_path, dict)
    path = Path(json.loads((tmp_path / "control.json").read_text())["socket"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.close()
    server.close()
    assert not path.parent.exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no job runs with this folder"):
        send_order(tmp_path, {"command": "status"})


def test_orders_are_carried_out(folder, orders):
    send_order(folder, {"command": "policy", "policy": {"name": "energy_optimal"}})
    assert orders.policy == EnergyOptimalPolicy(name="energy_optimal")
    send_order(folder, {"command": "straggler", "pipeline": 1, "slowdown": 1.3, "after_iterations": 2})
    assert orders.straggler() is None
    orders.steps += 2
    assert (orders.straggler().pipeline, orders.straggler().slowdown) == (1, 1.3)
    send_order(folder, {"command": "straggler", "pipeline": 1, "slowdown": 1.0})
    assert orders.straggler() is None
    send_order(folder, {"command": "pause"})
    assert send_order(folder, {"command": "status"})["status"]["paused"] is True
    send_order(folder, {"command": "resume"})
    assert not orders.paused


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"command": "explode"}, "command: expected 'status', "),
        ({"command": "straggler", "pipeline": 5, "slowdown": 2}, "no pipeline 5"),
        ({"command": "straggler", "pipeline": 1, "slowdown": 0.5}, "greater than or equal to 1"),
        ({"command": "policy", "policy": {"name": "power_cap"}}, 'policy: expected either "watts" or "signal"'),
        ({"command": "pause", "now": True}, "now: unknown key"),
    ],
)
def test_a_wrong_order_is_explained_and_changes_nothing(folder, orders, order, message):
    before = orders.state()
    with pytest.raises(ConfigError, match=message):
        send_order(folder, order)
    assert orders.state() == before


def test_the_status_of_a_job_of_thousands_of_ranks_arrives(tmp_path):
    status = {"clocks_asked_mhz": [1410] * 4096, "last": {"energy_by_rank_j": [123.456789] * 4096}}
    server = ControlServer(tmp_path, lambda order: {"status": status})
    assert send_order(tmp_path, {"command": "status"})["status"] == status
    server.close()


def test_no_order_is_given_to_a_process_of_another_user(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(control_socket, "user_of", lambda connection: 1001)
    with pytest.raises(ConfigError, match="belongs to another user"):
        send_order(folder, {"command": "status"})


POLICIES = [
    {"name": "energy_optimal"},
    {"name": "reduce", "power_fraction": 0.8, "until": "2030-01-31T18:00:00+01:00"},
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_state_survives_a_restart_but_for_a_policy_changed_in_the_config(orders, policy):
    orders.policy = POLICY.validate_python(policy)
    orders.carry_out(parse_order({"command": "straggler", "pipeline": 1, "slowdown": 1.4}))
    orders.steps = 70
    state = json.loads(json.dumps(orders.state()))
    same, changed = job_control(), job_control(SlowdownPolicy(max_slowdown=0.1))
    same.restore(state)
    changed.restore(state)
    assert (same.state(), same.policy) == (orders.state(), orders.policy)
    assert changed.policy == SlowdownPolicy(max_slowdown=0.1)
    assert (changed.steps, changed.straggler().slowdown) == (70, 1.4)


MISSING = "a key that another version does not write"
DAMAGED = {
    "steps": [MISSING, math.inf, 10**400, -1],
    "stragglers": [None, {"x": [1, 2]}, {"0": [1, math.inf]}, {"0": [1, 0.5]}],
    "policy": [MISSING, {"name": "nothing"}],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in DAMAGED.items() for value in values],
    ids=lambda part: str(part)[:20],
)
def test_of_a_damaged_state_or_one_of_another_version_nothing_counts(orders, caplog, key, value):
    fresh = job_control()
    before = fresh.state()
    state = {**orders.state(), "paused": True, key: value}
    assert not fresh.restore({k: v for k, v in state.items() if v != MISSING})
    assert fresh.state() == before
    assert "cannot be read" in caplog.text


DEADLINE = '{"command": "policy", "policy": {"name": "deadline", "finish_by": "2030-01-01T00:00Z", "total_steps": %s}}'


@pytest.mark.parametrize(
    "order",
    [
        *(b"{", b"\xff", b"[]", b""),
        DEADLINE % "1e400",
        DEADLINE % ("9" * 400),
        DEADLINE % "1000000000001",
        '{"command": "policy", "policy": {"name": "power_cap", "watts": NaN}}',
        '{"command": "policy", "policy": {"name": "power_cap", "watts": 1e300}}',
        '{"command": "straggler", "pipeline": 1, "slowdown": 1e300}',
        '{"command": "straggler", "pipeline": 1, "slowdown": 2, "after_iterations": 1e30}',
        '{"command": ' + "[" * 30_000,
        '{"command": ' + "9" * 5000 + "}",
        '{"command": {"command": {}}}',
    ],
    ids=lambda order: str(order)[:60],
)
def test_a_line_that_is_no_order_changes_nothing_and_the_server_lives_on(folder, orders, order):
    before = orders.state()
    for _ in range(2):
        assert said(folder, (order if isinstance(order, bytes) else order.encode()) + b"\n")["ok"] is False
    assert orders.state() == before
    assert send_order(folder, {"command": "status"})["ok"]


def said(folder, line):
    """Send a line and return the answer."""
    with connected(folder) as connection:
        connection.sendall(line)
        return json.loads(connection.makefile().readline())


def connected(folder):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(json.loads((folder / "control.json").read_text())["socket"])
    connection.settimeout(GIVE_UP_S)
    return connection


def test_another_user_is_not_served(folder, monkeypatch):
    monkeypatch.setattr(control_socket, "user_of", lambda connection: os.getuid() + 1)
    with connected(folder) as connection, contextlib.suppress(ConnectionError):  # it may be closed before it is used
        connection.sendall(b'{"command": "status"}\n')
        assert connection.recv(1) == b""


def test_an_order_may_arrive_in_parts_and_what_comes_after_its_line_is_dropped(folder, orders):
    with connected(folder) as connection:
        connection.sendall(b'{"command": ')
        connection.sendall(b'"pause"}\n{"command": "resume"}\n')
        assert json.loads(connection.makefile().readline())["ok"]
    assert orders.paused


def test_clients_that_say_nothing_do_not_keep_others_from_being_answered(folder):
    with contextlib.ExitStack() as silent:
        for _ in range(30):
            silent.enter_context(connected(folder)).sendall(b'{"command":')
        assert send_order(folder, {"command": "status"})["ok"]


def test_a_line_without_end_closes_the_connection(folder):
    with connected(folder) as connection:
        connection.sendall(b"x" * 70_000)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            connection.sendall(b"x" * 10_000_000)
    assert send_order(folder, {"command": "status"})["ok"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"{\n", "expected a JSON object, got b'{"),
        (b'{"ok": true}', "got 12 bytes without a newline"),
        (b"x" * 5_000_000, "bytes without a newline"),
    ],
)
def test_a_process_that_answers_something_else_is_named(tmp_path, answer, message):
    address = tmp_path / "here.sock"
    (tmp_path / "control.json").write_text(json.dumps({"socket": str(address), "pid": 7}))
    with socket.create_server(str(address), family=socket.AF_UNIX) as server:
        thread = threading.Thread(target=answers_once, args=(server, answer))
        thread.start()
        with pytest.raises(ConfigError, match=rf"process 7 does not answer \(.*{message}"):
            send_order(tmp_path, {"command": "status"})
        thread.join(GIVE_UP_S)


def answers_once(server, answer):
    with server.accept()[0] as connection:
        connection.recv(4096)
        with contextlib.suppress(OSError):  # an answer that is too long is refused before its end
            connection.sendall(answer)


class Dripping:
    """A connection that receives one byte per second."""

    now_s = 0.0

    def settimeout(self, timeout_s):
        assert timeout_s > 0

    def recv(self, size):
        self.now_s += 1.0
        return b" "


def test_the_time_out_is_of_the_whole_line(monkeypatch):
    connection = Dripping()
    monkeypatch.setattr(control_socket.time, "monotonic", lambda: connection.now_s)
    with pytest.raises(TimeoutError):
        control_socket.receive_line(connection, 100, timeout_s=5.0)
    assert connection.now_s == 5.0


def test_an_order_that_fails_is_answered_and_the_server_lives_on(tmp_path):
    answers = iter([RuntimeError("broken"), ZeroDivisionError()])
    server = ControlServer(tmp_path, lambda order: (_ for _ in ()).throw(next(answers)))
    for expected in ("broken", "ZeroDivisionError", "StopIteration"):
        assert said(tmp_path, b'{"command": "status"}\n') == {"ok": False, "error": expected}
    server.close()
