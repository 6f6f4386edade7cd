"""Commands over the Unix socket: permissions, format and effects."""

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
from perseus_ds.policy.commands import parse_command
from perseus_ds.policy.goal import Goal
from perseus_ds.server import control_socket
from perseus_ds.server.control_socket import ControlServer, send_command
from perseus_ds.server.job_control import JobControl


@pytest.fixture
def control():
    return job_control()


def job_control(goal=Goal()):  # noqa: B008 - it is frozen
    return JobControl(goal, pipelines=2, timebase=VirtualTime())


@pytest.fixture
def folder(tmp_path, control):
    server = ControlServer(tmp_path / "run", control.carry_out)
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
        send_command(tmp_path, {"command": "status"})


def test_commands_are_carried_out(folder, control):
    answer = send_command(folder, {"command": "set", "goal": {"max_slowdown": None, "watts": 5000}})
    assert answer["done"] == "least energy, watts 5000.0, once the job runs under plans"
    assert control.goal == Goal(max_slowdown=None, watts=5000)
    assert send_command(folder, {"command": "clear"})["done"].startswith("no slower than default clocks")
    assert control.goal == Goal()
    send_command(folder, {"command": "straggler", "pipeline": 1, "slowdown": 1.3, "after_iterations": 2})
    assert control.straggler() is None
    control.steps += 2
    assert (control.straggler().pipeline, control.straggler().slowdown) == (1, 1.3)
    send_command(folder, {"command": "straggler", "pipeline": 1, "slowdown": 1.0})
    assert control.straggler() is None
    send_command(folder, {"command": "pause"})
    assert send_command(folder, {"command": "status"})["status"]["paused"] is True
    send_command(folder, {"command": "resume"})
    assert not control.paused


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (b'{"command": "explode"}', "command: expected 'status', "),
        (b'{"command": "straggler", "pipeline": 5, "slowdown": 2}', "no pipeline 5"),
        (b'{"command": "set", "goal": {"watts": NaN}}', "watts"),
        (b'{"command": "set", "goal": {"watts": null}}', 'the command "clear" ends a limit'),
        (b'{"command": "set", "goal": {"finish_by": "2020-01-01T00:00:00Z", "total_steps": 9}}', "has passed"),
        (
            b'{"command": "set", "goal": {"watts": 900, "until": "2020-01-01T00:00:00Z"}}',
            "goal.until: 2020-01-01T00:00:00",
        ),
        (b'{"command": "pause", "now": true}', "now: unknown key"),
        (b"[]", "expected a JSON object"),
        (b'{"command": ' + b"[" * 30_000, "expected a JSON object"),
        (b'{"command": ' + b"9" * 5000 + b"}", "expected a JSON object"),
    ],
    ids=lambda part: str(part)[:60],
)
def test_a_wrong_command_is_explained_and_changes_nothing(folder, control, command, message):
    before = control.state()
    answer = answer_to(folder, command)
    assert answer["ok"] is False
    assert message in answer["error"]
    assert control.state() == before
    assert send_command(folder, {"command": "status"})["ok"]


def test_the_status_of_a_job_of_thousands_of_ranks_arrives(tmp_path):
    status = {"clocks_asked_mhz": [1410] * 4096, "last": {"energy_by_rank_j": [123.456789] * 4096}}
    server = ControlServer(tmp_path, lambda command: {"status": status})
    assert send_command(tmp_path, {"command": "status"})["status"] == status
    server.close()


def test_no_command_is_given_to_a_process_of_another_user(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(control_socket, "user_of", lambda connection: 1001)
    with pytest.raises(ConfigError, match="belongs to another user"):
        send_command(folder, {"command": "status"})


def test_state_survives_a_restart_but_for_a_goal_changed_in_the_config(control):
    limit = {"power_fraction": 0.8, "until": "2030-01-31T18:00:00+01:00"}
    control.carry_out(parse_command({"command": "set", "goal": limit}))
    control.carry_out(parse_command({"command": "straggler", "pipeline": 1, "slowdown": 1.4}))
    control.steps = 70
    state = json.loads(json.dumps(control.state()))
    same, changed = job_control(), job_control(Goal(max_slowdown=0.1))
    assert same.restore(state)
    assert not changed.restore(state)
    assert (same.state(), same.goal) == (control.state(), Goal(**limit))
    assert changed.goal == Goal(max_slowdown=0.1)
    assert (changed.steps, changed.straggler().slowdown) == (70, 1.4)


def test_of_steps_that_the_host_reports_before_their_iterations_none_are_negative(control):
    control.add_steps(-7)  # eight iterations of one step, of which none is finished
    assert job_control().restore(control.state())
    control.count_step(1)
    assert control.steps == 1


@pytest.mark.parametrize(
    "damage",
    [{"steps": math.inf}, {"stragglers": {"0": [1, 0.5]}}, {"changes": {"watts": -1}}, {"configured": None}],
    ids=str,
)
def test_of_a_damaged_state_nothing_counts(control, caplog, damage):
    fresh = job_control()
    before = fresh.state()
    assert not fresh.restore({**control.state(), "paused": True, **damage})
    assert fresh.state() == before
    assert "cannot be read" in caplog.text


def answer_to(folder, line):
    """Send a line and return the answer."""
    with connected(folder) as connection:
        connection.sendall(line + b"\n")
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


def test_clients_that_say_nothing_do_not_keep_others_from_being_answered(folder):
    with contextlib.ExitStack() as silent:
        for _ in range(30):
            silent.enter_context(connected(folder)).sendall(b'{"command":')
        assert send_command(folder, {"command": "status"})["ok"]


def test_a_line_without_end_closes_the_connection(folder):
    with connected(folder) as connection:
        connection.sendall(b"x" * 70_000)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            connection.sendall(b"x" * 10_000_000)
    assert send_command(folder, {"command": "status"})["ok"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [(b"{\n", "expected a JSON object, got b'{"), (b"x" * 5_000_000, "expected a JSON object, got b'xxx")],
    ids=["no JSON", "too long"],
)
def test_a_process_that_answers_something_else_is_named(tmp_path, answer, message):
    address = tmp_path / "here.sock"
    (tmp_path / "control.json").write_text(json.dumps({"socket": str(address), "pid": 7}))

    def answer_once():
        with server.accept()[0] as connection:
            connection.recv(4096)
            with contextlib.suppress(OSError):  # an answer that is too long is refused before its end
                connection.sendall(answer)

    with socket.create_server(str(address), family=socket.AF_UNIX) as server:
        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(ConfigError, match=rf"process 7 does not answer \(.*{message}"):
            send_command(tmp_path, {"command": "status"})
        thread.join(GIVE_UP_S)


def test_a_command_that_fails_is_answered(tmp_path):
    def fail(command):
        raise ZeroDivisionError

    server = ControlServer(tmp_path, fail)
    assert answer_to(tmp_path, b'{"command": "status"}') == {"ok": False, "error": "ZeroDivisionError"}
    server.close()
