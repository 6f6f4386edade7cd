"""Local sockets: one JSON object a line, from whom, and what is refused."""

import os
import socket
import socketserver
import stat
import threading

import pytest
from run_log import GIVE_UP_S

from perseus_ds.policy import local_socket
from perseus_ds.policy.local_socket import LocalServer, LocalSocketError


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    for end in (ours, theirs):
        end.settimeout(GIVE_UP_S)
    with ours, theirs:
        yield ours, theirs


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        local_socket.send(self.request, {"from": local_socket.peer(self.request), **local_socket.receive(self.request)})


def test_a_process_connects_by_path(tmp_path):
    address = str(tmp_path / "here.sock")
    with LocalServer(address, Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with local_socket.connect(address, GIVE_UP_S) as connection:
            assert local_socket.exchange(connection, {"n": 1}) == {"n": 1, "from": [os.getpid(), os.getuid()]}
            assert local_socket.peer(connection) == (os.getpid(), os.getuid())
        server.shutdown()
        thread.join(GIVE_UP_S)
    assert stat.S_IMODE(os.stat(address).st_mode) == 0o600
    with pytest.raises(ConnectionRefusedError):
        local_socket.connect(address, GIVE_UP_S)


def test_another_user_is_not_served(tmp_path, monkeypatch):
    with LocalServer(str(tmp_path / "here.sock"), Echo) as server:
        monkeypatch.setattr(local_socket, "peer", lambda connection: (1, os.getuid() + 1))
        assert not server.verify_request(None, None)


def test_messages_are_kept_apart_and_may_arrive_in_parts(ends):
    ours, theirs = ends
    long = {"text": "x" * 20_000}
    for message in ({"n": 1}, long):
        local_socket.send(theirs, message)
        assert local_socket.receive(ours) == message


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"{\n", "expected a JSON object, got b'{"),
        (b"\xff\n", "expected a JSON object"),
        (b"[]\n", "expected a JSON object"),
        (b'{"n": 1}', "got 8 bytes without its end"),
        (b"", "got 0 bytes without its end"),
        (b"x" * 70_000, "bytes without its end"),
    ],
)
def test_anything_else_is_refused(ends, sent, message):
    ours, theirs = ends
    theirs.sendall(sent)
    if len(sent) < local_socket.LONGEST_LINE:  # one that is too long is refused before its end
        theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(LocalSocketError, match=message):
        local_socket.receive(ours)


def test_what_comes_with_a_line_after_its_end_is_dropped(ends):
    ours, theirs = ends
    theirs.sendall(b'{"n": 1}\n{"n": 2}\n')
    assert local_socket.receive(ours) == {"n": 1}


class Dripping:
    """A connection over which one byte comes each second, and what time it is."""

    def __init__(self, timeout_s):
        self.timeout_s = timeout_s
        self.now_s = 0.0

    def gettimeout(self):
        return self.timeout_s

    def settimeout(self, timeout_s):
        self.timeout_s = timeout_s

    def recv(self, size):
        self.now_s += 1.0
        return b" "


def test_the_time_out_is_of_the_whole_line(monkeypatch):
    connection = Dripping(5.0)
    monkeypatch.setattr(local_socket.time, "monotonic", lambda: connection.now_s)
    with pytest.raises(TimeoutError):
        local_socket.receive(connection)
    assert connection.now_s == 5.0
    assert connection.timeout_s == 5.0


def test_a_silent_end_is_waited_for_only_so_long(ends):
    ours, _ = ends
    ours.settimeout(0.01)
    with pytest.raises(TimeoutError):
        local_socket.receive(ours)
