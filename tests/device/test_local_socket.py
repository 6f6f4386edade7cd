"""Local sockets: one JSON object a line, from whom, and what is refused."""

import os
import socket
import stat

import pytest

from perseus_ds.device import local_socket
from perseus_ds.device.local_socket import LocalSocketError

GENEROUS_S = 60.0
"""Only ends a test that hangs."""


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    for end in (ours, theirs):
        end.settimeout(GENEROUS_S)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("is_file", [True, False])
def test_a_process_connects_by_path_or_by_abstract_name(tmp_path, is_file):
    address = str(tmp_path / "here.sock") if is_file else f"\0perseus-ds-test/{tmp_path}"
    with local_socket.listen(address) as listener, local_socket.connect(address, GENEROUS_S) as connection:
        accepted, _ = listener.accept()
        with accepted:
            local_socket.send(accepted, {"to": "client"})
            assert local_socket.exchange(connection, {"to": "server"}) == {"to": "client"}
            assert local_socket.receive(accepted) == {"to": "server"}
            assert local_socket.peer(connection) == local_socket.peer(accepted) == (os.getpid(), os.getuid())
    if is_file:
        assert stat.S_IMODE(os.stat(address).st_mode) == 0o600


def test_a_name_has_one_listener(tmp_path):
    address = f"\0perseus-ds-test/{tmp_path}"
    with local_socket.listen(address), pytest.raises(OSError, match="Address already in use"):
        local_socket.listen(address)
    with pytest.raises(ConnectionRefusedError):
        local_socket.connect(address, GENEROUS_S)


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
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(LocalSocketError, match=message):
        local_socket.receive(ours)


def test_what_comes_with_a_line_after_its_end_is_dropped(ends):
    ours, theirs = ends
    theirs.sendall(b'{"n": 1}\n{"n": 2}\n')
    assert local_socket.receive(ours) == {"n": 1}


@pytest.mark.parametrize("length", [0, 50_000])
def test_sockets_are_sent_with_a_message(ends, length):
    ours, theirs = ends
    here, there = socket.socketpair()
    message = {"text": "x" * length}
    with here, there:
        local_socket.send(theirs, message, [there])
        there.close()
        received, (copy,) = local_socket.receive_with_sockets(ours)
        with copy:
            assert received == message
            assert not copy.get_inheritable()
            copy.sendall(b"hello")
            assert here.recv(5) == b"hello"
        assert here.recv(1) == b"", "no other copy is left"


def test_a_message_without_sockets_has_none(ends):
    ours, theirs = ends
    local_socket.send(theirs, {"n": 1})
    assert local_socket.receive_with_sockets(ours) == ({"n": 1}, [])


def test_sockets_of_a_message_that_is_refused_are_closed(ends):
    ours, theirs = ends
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(theirs, [b"[]\n"], [there.fileno()])
        there.close()
        with pytest.raises(LocalSocketError, match="expected a JSON object"):
            local_socket.receive_with_sockets(ours)
        assert here.recv(1) == b""


def test_a_line_without_end_does_not_fill_the_memory(ends):
    ours, theirs = ends
    theirs.sendall(b"x" * 70_000)  # and the connection stays open
    with pytest.raises(LocalSocketError, match="without its end"):
        local_socket.receive(ours)


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
