"""The server process of a job: accepted agents, invalid messages, restarts and its end."""

import itertools
import logging
import math
import os
import resource
import stat
import struct
import threading

import msgspec
import pytest
import zmq
from job_descriptions import KEY, description, request
from msgspec import structs
from run_log import wait_until
from virtual.time import VirtualTime

from perseus_ds.agent.job_server import JobServerChild, Uplink
from perseus_ds.errors import ConfigError
from perseus_ds.protocol.job_messages import (
    Joined,
    LatencyTable,
    Left,
    Measured,
    OrderNumbers,
    RankReport,
    Report,
    Say,
    Spans,
    ToServer,
)
from perseus_ds.protocol.messages import Connect, StartServer
from perseus_ds.server.control_socket import send_command
from perseus_ds.server.output_folder import FolderLock
from perseus_ds.server.process import ServerProcess

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(ToServer).decode
PUBLIC_KEY, SECRET_KEY = zmq.curve_keypair()


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Return a server whose loop is run by the test."""
    monkeypatch.chdir(tmp_path)  # restores the folder, because a server changes to that of rank 0
    process = ServerProcess(request(tmp_path / "perseus", mode="observe", public_key=PUBLIC_KEY))
    yield process
    process.close()


@pytest.fixture
def connect(process):
    """Return a function that connects an agent with given keys."""
    uplinks = []

    def connect(public_key, secret_key):
        server_key = process._request.server_key
        uplinks.append(Uplink(Connect(0, process.address, server_key, public_key, secret_key)))
        return uplinks[-1]

    yield connect
    for uplink in uplinks:
        uplink.close()


def are_connected(process, uplink):
    """Let server and agent exchange messages, and return whether both have received one."""
    uplink.exchange()
    process._receive()
    return process._has_received and uplink.is_heard


@pytest.fixture
def uplink(process, connect):
    """Return the connection of an accepted agent."""
    found = connect(PUBLIC_KEY, SECRET_KEY)
    found.join(0, lambda: 3)
    wait_until(lambda: are_connected(process, found), "server and agent have exchanged messages")
    return found


def test_agents_of_other_jobs_and_users_are_not_heard(process, connect):
    other, own = connect(*zmq.curve_keypair()), connect(PUBLIC_KEY, SECRET_KEY)
    refusals = other._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    other.join(1, lambda: 1000)
    own.join(0, lambda: 3)
    wait_until(lambda: are_connected(process, other) or refusals.poll(10), "the other agent is refused")
    other._socket.disable_monitor()
    assert not process._connections.agents
    wait_until(lambda: are_connected(process, own), "the job's own agent is heard")
    assert process.server.runs.issued == 3


@pytest.mark.parametrize(("host", "address"), [("::1", "tcp://[::1]:"), ("localhost", "tcp://localhost:")])
def test_agents_reach_a_server_by_ipv6_and_by_a_name(tmp_path, monkeypatch, host, address):
    monkeypatch.chdir(tmp_path)
    asked = structs.replace(request(tmp_path / "perseus", mode="observe", public_key=PUBLIC_KEY), host=host)
    process = ServerProcess(asked)
    uplink = Uplink(Connect(0, process.address, asked.server_key, PUBLIC_KEY, SECRET_KEY))
    try:
        assert process.address.startswith(address)
        wait_until(lambda: are_connected(process, uplink), "server and agent have exchanged messages", within_s=20.0)
    finally:
        uplink.close()
        process.close()


def test_what_is_no_message_is_passed_over_by_server_and_agent(process, uplink):
    uplink._outbox += [(b"\x00\x00\x00\x00", b"\xc1"), (b"x", b"y")]
    uplink.send(0, Joined(5))
    wait_until(lambda: are_connected(process, uplink) and process.server.runs.issued == 5, "the valid message has come")
    (agent,) = process._connections.agents
    process._connections.put(agent, b"\x00\x00\x00\x00", b"\xc1")
    process._connections.put(agent, b"\x00\x00\x00\x00", encode(Say("a message")))
    assert wait_until(uplink.exchange, "the valid message has come") == [(0, Say("a message"))]


def test_heartbeats_do_not_wait_for_the_messages_of_many_ranks(process, uplink, monkeypatch):
    connections, send, sent = process._connections, zmq.Socket.send_multipart, []
    (agent,) = connections.agents

    def recorded(socket, frames, *arguments):
        sent.append("heartbeat" if len(frames) == 2 else "message")  # the first frame is the agent
        return send(socket, frames, *arguments)

    monkeypatch.setattr("perseus_ds.server.connections._HEARTBEAT_S", 0.0)
    monkeypatch.setattr(zmq.Socket, "send_multipart", recorded)
    wait_until(lambda: len(sent) > 1, "heartbeats are due all the time")
    message = encode(Say("a message"))
    connections._outgoing.extend([(agent, b"\x00\x00\x00\x00", message)] * 1000)
    connections.put(agent, b"\x00\x00\x00\x00", message)
    wait_until(lambda: sent.count("message") == 1001, "all messages are sent")
    in_a_row = [len([*group]) for kind, group in itertools.groupby(sent) if kind == "message"]
    assert max(in_a_row) <= 300


def test_a_rank_that_is_heard_through_another_connection_is_sent_its_programs_again(process, connect, uplink):
    """Messages through the first connection may be lost."""
    process._flush()
    second = connect(PUBLIC_KEY, SECRET_KEY)
    second.send(0, Spans(4, b""))

    def received():
        second.flush()
        process._receive()
        process._flush()
        return [type(message) for _, message in second.exchange()]

    assert wait_until(received, "the programs have come")[0] is OrderNumbers


def test_an_error_does_not_end_the_server(process, uplink, monkeypatch):
    def fail(rank, message):
        raise OSError("no space left on device")

    process.server.start()
    monkeypatch.setattr(process.server, "receive", fail)
    uplink.send(0, Joined(5))
    expected = 0, Say("perseus: no space left on device. Training continues at default clocks.", warns=True)
    wait_until(lambda: are_connected(process, uplink) and expected in process._outbox, "it is said")


def test_a_state_that_cannot_be_saved_does_not_end_the_server(process, monkeypatch):
    state, failures = process.server.state, [ValueError("no state")]

    def fail_once():
        if failures:
            raise failures.pop()
        process.server.is_over = True
        return state()

    monkeypatch.setattr(process.server, "state", fail_once)
    monkeypatch.setattr("perseus_ds.server.process._STATE_S", 0.0)
    process.serve()
    assert Say("perseus: no state. Training continues at default clocks.", warns=True) in dict(process._outbox).values()


@pytest.fixture
def rare_heartbeats(monkeypatch):
    """Heartbeats of servers come once an hour, so that other messages do not go with them."""
    monkeypatch.setattr("perseus_ds.server.connections._HEARTBEAT_S", 3600.0)


@pytest.mark.parametrize("step", ["making", "writing"])
def test_a_last_state_that_cannot_be_saved_is_said_and_records_are_still_written(process, monkeypatch, step):
    def fail(*_):
        raise ValueError("not a number")

    process.server.start()
    process.server.is_over = True
    monkeypatch.setattr(*((process.server, "state") if step == "making" else (process._state, "_write")), fail)
    process.serve()
    said = [message.text for _, message in process._outbox if isinstance(message, Say)]
    assert any("cannot be saved (ValueError('not a number'))" in text for text in said)
    assert (process.server.job.output_dir / "run.jsonl").exists()


@pytest.mark.parametrize("damage", ["[" * 100_000, "[]", "{"], ids=["deep", "list", "cut off"])
def test_a_damaged_state_file_is_a_warning_and_the_job_begins_anew(monkeypatch, tmp_path, damage):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "perseus").mkdir()
    (tmp_path / "perseus" / "state.json").write_text(damage)
    process = ServerProcess(request(tmp_path / "perseus", mode="observe", public_key=PUBLIC_KEY))
    process.close()
    said = " ".join(message.text for _, message in process._outbox if isinstance(message, Say))
    assert "state.json cannot be read" in said
    assert "the job begins anew" in said


def test_a_damaged_part_of_the_state_is_a_warning_on_rank_0(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = request(tmp_path / "perseus", mode="observe", public_key=PUBLIC_KEY)
    process = ServerProcess(asked)
    process._state.save_last({**process._kept(), "plans": {"lateness": -1}})
    process.close()
    process = ServerProcess(asked)
    process.close()
    said = [message.text for _, message in process._outbox if isinstance(message, Say) and message.warns]
    assert any("the state of an earlier start cannot be read" in text for text in said)


def test_a_message_put_while_the_thread_wakes_up_delays_no_later_one(rare_heartbeats, process, uplink, monkeypatch):
    connections, read = process._connections, os.read
    (agent,) = connections.agents
    coming = [encode(Say("comes while it wakes up"))]

    def read_late(file, length):
        if file == connections._wake_read and coming:
            connections.put(agent, b"\0\0\0\0", coming.pop())
        return read(file, length)

    uplink._beat_at_s = math.inf
    monkeypatch.setattr(os, "read", read_late)
    for text in ("the first", "the next"):
        connections.put(agent, b"\0\0\0\0", encode(Say(text)))
        wait_until(lambda text=text: (0, Say(text)) in uplink.exchange(), f"{text} has come", within_s=20.0)


def test_a_server_that_falls_behind_discards_reports_and_continues_at_default_clocks(tmp_path, monkeypatch):
    """Decisions on old reports would come ever later. A server that was stopped processes what has arrived."""
    monkeypatch.chdir(tmp_path)
    now, backlog = VirtualTime(), 100
    monkeypatch.setattr("perseus_ds.server.process.REAL_TIME", now)
    process = ServerProcess(request(tmp_path / "perseus", mode="auto", public_key=PUBLIC_KEY))
    received = []

    class Arrived:
        """The reports that have arrived, each of which takes 10 ms."""

        def __len__(self):
            return backlog - len(received)

        def popleft(self):
            if len(received) == backlog:
                raise IndexError
            now.sleep(0.01)
            received.append(len(received) // 2 + 1)
            report = RankReport(Report(received[-1], 0, 0, KEY, 0.01))
            return b"agent", [struct.pack("=I", len(received) % 2), encode(report)]

    process._connections.received = Arrived()
    process.server.start()
    try:
        assert process.server.next.phase == "warm-up"
        now.sleep(20.0)
        while len(received) < backlog:
            process._receive()
        process._receive()
        assert process.server.next.phase == "warm-up"
        backlog += 1500
        while process.server.next.phase == "warm-up":
            process._receive()
            assert len(received) < backlog
        assert process.server.next.phase == "observe"
        assert len(received) == pytest.approx(600, abs=20), "the last ones are 5 s old"
        recorded = process.server.recorder.last.iteration
        while len(received) < backlog:
            process._receive()
        assert process.server.recorder.last.iteration == recorded
        assert process.server.next.phase == "observe"
        process._receive()
        backlog += 2
        process._receive()
        assert process.server.recorder.last.iteration == 801
    finally:
        process.close()


def test_a_slow_output_folder_does_not_delay_decisions(process, monkeypatch):
    begins, may_end, written = threading.Event(), threading.Event(), []

    def write_slowly(path, content):
        begins.set()
        may_end.wait(60.0)
        written.append(content)

    monkeypatch.setattr("perseus_ds.server.output_folder.write_atomically", write_slowly)
    process._save()
    assert begins.wait(60.0)
    process._state_at_s = 0.0
    process._save()
    assert not written
    may_end.set()
    process._state.save_last(process._kept())
    assert len(written) == 1, "the same state is written once"


def test_agents_hear_a_server_that_decides_for_a_long_time(uplink):
    """The process does nothing here, as if it were computing."""
    for _ in range(3):
        uplink.is_heard = False
        wait_until(lambda: uplink.exchange() is not None and uplink.is_heard, "a heartbeat has come", within_s=20.0)


def test_agents_do_not_hear_a_server_that_hangs_until_it_continues(process, uplink, connect, monkeypatch):
    """They return to default clocks, and another server replaces it."""
    now = VirtualTime()
    monkeypatch.setattr("perseus_ds.server.connections.REAL_TIME", now)
    connections, before = process._connections, {*process._connections.agents}
    connections.wait(0.0)
    now.seconds += 31.0
    other = connect(PUBLIC_KEY, SECRET_KEY)
    other.join(1, lambda: 0)
    wait_until(lambda: other.exchange() is None or connections.agents > before, "a new agent has joined")
    (agent,) = connections.agents - before
    connections.put(agent, b"\1\0\0\0", encode(Say("after what else was sent")))
    wait_until(other.exchange, "a message has come")
    assert not other.is_heard
    now.seconds += 1.0
    connections.wait(0.0)
    wait_until(lambda: other.exchange() is None or other.is_heard, "a heartbeat has come")


def test_a_server_that_is_never_heard_is_started_again_after_pauses_that_grow(tmp_path, monkeypatch):
    now = VirtualTime()
    child = JobServerChild(StartServer("127.0.0.1", 0, 0), b"no description", now)

    def silence_s():
        begun_s = now.now_s()
        while not child.is_silent(is_heard=False):
            now.sleep(0.5)
        return now.now_s() - begun_s

    def fail(epoch):
        raise OSError("too many processes")

    try:
        assert wait_until(child.answer, "the server has answered").error
        assert silence_s() == pytest.approx(5.5)
        child.restart()
        wait_until(lambda: child._process.poll() is not None, "the server has ended")
        with monkeypatch.context() as broken:
            broken.setattr(child, "_start", fail)
            with pytest.raises(OSError, match="too many processes"):
                child.start_again()
        assert not child.start_again(), "only after another silence"
        assert silence_s() == pytest.approx(10.5)
        child.restart()
        wait_until(child.start_again, "another server is started")
        assert wait_until(child.answer, "the server has answered").error
        assert not child.is_silent(is_heard=True)
        assert silence_s() == pytest.approx(5.5)
    finally:
        child.end()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_orders_from_another_node_reach_the_server_by_its_port(tmp_path, monkeypatch, host):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "perseus"
    process = ServerProcess(structs.replace(request(folder, mode="auto", public_key=PUBLIC_KEY), host=host))
    ends = threading.Event()

    def serve():
        while not ends.is_set():
            with process._lock:
                process._receive()
                process._flush()
            ends.wait(0.01)

    process._supervise()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert stat.S_IMODE((folder / "control.key").stat().st_mode) == 0o600
        monkeypatch.setattr("perseus_ds.server.control_socket.boot_id", lambda: "another node")
        assert send_command(folder, {"command": "status"})["status"]["phase"]
        with pytest.raises(ConfigError, match="fly"):
            send_command(folder, {"command": "fly"})
        (folder / "control.key").write_text("{}")
        with pytest.raises(ConfigError, match=r"control.key: .* cannot be read .* on the node of rank 0"):
            send_command(folder, {"command": "status"})
    finally:
        ends.set()
        thread.join()
        process.close()
    assert not (folder / "control.key").exists()


def test_once_the_job_has_ended_the_folder_is_soon_free_though_a_node_was_lost(process, uplink, monkeypatch):
    now = VirtualTime()
    monkeypatch.setattr("perseus_ds.server.process.REAL_TIME", now)
    process._received_s = now.now_s()
    now.sleep(10.0)
    assert process._is_needed(), "the network may recover"
    process.server.has_ended = True
    assert not process._is_needed()


def test_a_server_whose_job_has_ended_is_not_to_be_started_again_and_one_that_was_killed_is(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] - 1, limits[1]))
    child = JobServerChild(StartServer("127.0.0.1", 0, 0), description(tmp_path / "perseus", mode="observe"))
    try:
        answer = wait_until(child.answer, "the server has started")
        assert not child.is_over
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (limits[1], limits[1]), "a file for each agent"
        uplink = Uplink(Connect(0, answer.address, answer.server_key, answer.public_key, answer.secret_key))
        for rank in (0, 1):
            uplink.join(rank, int)
            uplink.send(rank, Left())
        wait_until(lambda: uplink.exchange() is not None and child.is_over, "the server has ended with its job")
        uplink.close()
        child.restart()
        child.end()
        assert not child.is_over
    finally:
        child.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_agent_that_replaces_another_one_starts_the_server_again_in_the_same_folder_if_that_dies(tmp_path):
    other_job = FolderLock()
    other_job.acquire(tmp_path / "perseus")
    request, content = StartServer("127.0.0.1", 0, 0), description(tmp_path / "perseus", mode="observe")
    child, now = JobServerChild(request, content), VirtualTime()
    try:
        started = wait_until(child.answer, "the server has started")
        assert started.output_dir == str(tmp_path / "perseus-2")
        other_job.release()
        later = JobServerChild(structs.replace(request, running=started), content, now)
        assert later.file is None, "nothing is started while the server may live"
        child.end()
        for _ in range(11):
            assert not later.is_silent(is_heard=False)
            now.sleep(0.5)
        assert later.is_silent(is_heard=False)
        now.sleep(100.0)
        later.restart()
        assert later.start_again()
        assert wait_until(later.answer, "another server has started") == started
        uplink = Uplink(Connect(0, started.address, started.server_key, started.public_key, started.secret_key))
        wait_until(lambda: uplink.exchange() is not None and uplink.is_heard, "it is heard at the same address")
        assert int(uplink._epoch) >= 100, "its programs are newer"
        uplink.close()
    finally:
        child.end()
        later.end()


def test_a_rank_that_joins_again_after_its_agent_was_stopped_has_not_left(process):
    server = process.server
    for rank in (0, 1):
        server.receive(rank, Joined(0))
    server.receive(1, Left())
    server.receive(1, Joined(3))
    server._left_s = server._left_s and server._left_s - 60.0
    server.tick()
    assert not server.has_ended
    for rank in (0, 1):
        server.receive(rank, Left())
    server.tick()
    assert server.is_over


def test_a_warning_that_cannot_be_formatted_does_not_end_the_server(process, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("perseus_ds").warning("%d", "no number")
    assert not process._outbox


def test_an_agent_repeats_to_the_next_server_what_it_has_said_once(uplink):
    latencies, measured = LatencyTable({(1200, True): [0.015]}), Measured(0.1, 0.2, 70.0)
    for message in (latencies, measured):
        uplink.send(0, message)
    uplink.flush()
    uplink._outbox.clear()
    uplink._note_message([b"1000"])
    assert [decode(content) for _, content in uplink._outbox] == [Joined(3), latencies, measured]
