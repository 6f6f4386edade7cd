"""The folder of this user, its locks, and sockets with long paths."""

import os
import platform
import subprocess
import sys

import psutil
import pytest
from run_log import wait_until

from perseus_ds.protocol import places


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSEUS_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("occupied", ["by a link", "by a file", "by a folder that others can write"])
def test_a_name_that_another_user_has_taken_is_replaced_by_one_that_all_processes_find(tmp_path, occupied):
    """As root can write everywhere, a folder with other rights replaces that of another user."""
    own = tmp_path / f"perseus-ds-{os.getuid()}"
    if occupied == "by a link":
        own.symlink_to(tmp_path)
    elif occupied == "by a file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777)
    other = places.user_folder()
    assert other not in (own, tmp_path)
    assert other.stat().st_mode & 0o777 == 0o700
    own.rename(tmp_path / "away")  # from now on the name could be used
    code = "from perseus_ds.protocol import places; print(places.user_folder())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == str(other)


def test_the_folder_is_the_same_whatever_the_environment(tmp_path, monkeypatch):
    """Jobs exclude each other from GPUs by files in it."""
    monkeypatch.delenv("PERSEUS_RUNTIME_DIR")
    monkeypatch.setattr(places, "IN_MEMORY", tmp_path)
    folders = set()
    for number in range(2):
        for variable in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
            named = tmp_path / f"{variable}{number}"
            named.mkdir()
            monkeypatch.setenv(variable, str(named))
        folders.add(places.user_folder())
    assert folders == {tmp_path / f"perseus-ds-{os.getuid()}"}


def test_modules_in_the_working_folder_do_not_replace_those_of_agent_and_server(tmp_path):
    """The working folder of both is the root folder of the node."""
    (tmp_path / "argparse.py").write_text("raise SystemError('not the standard library')")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "some_agent.py").write_text("import argparse\ndef main(): print('runs')")
    # An empty entry would be this working folder by its full path, which for agent and server is "/".
    path = os.pathsep.join(filter(None, [str(modules), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", places.main_of("some_agent")]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "runs\n", done.stderr


# The first thread ends, which makes the process a zombie until the other one ends.
LEADER_ENDS = """
import ctypes, sys, threading
from pathlib import Path
from perseus_ds.protocol import places
file = places.lock(Path(sys.argv[1]))
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).syscall(int(sys.argv[2]), 0)  # exit, of this thread only
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of the system call")
def test_a_lock_ends_with_the_last_thread_of_its_process(tmp_path):
    path = tmp_path / "locked"
    number = str({"x86_64": 60, "aarch64": 93}[platform.machine()])
    command = [sys.executable, "-c", LEADER_ENDS, str(path), number]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        wait_until(lambda: psutil.Process(started.pid).status() == psutil.STATUS_ZOMBIE, "the first thread's end")
        assert places.holder_of(path) == started.pid
        started.stdin.close()  # the other thread ends, and the process remains a zombie that is not waited for
        wait_until(lambda: places.holder_of(path) is None, "the end of the lock")


def test_a_file_that_was_removed_is_locked_as_a_new_one(tmp_path):
    path = tmp_path / "locked"
    first = places.lock(path)
    path.unlink()
    second = places.lock(path)
    assert places.is_at(path, second)
    assert not places.is_at(path, first)


def test_an_agents_socket_is_found_by_its_name_however_long_the_path_is(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("PERSEUS_RUNTIME_DIR", str(long))
    with pytest.raises(FileNotFoundError):
        places.connect("name")
    with places.listen("name") as listener, places.connect("name") as client:
        server, _ = listener.accept()
        server.send(b"1")
        assert client.recv(1) == b"1"
        server.close()
    with pytest.raises(ConnectionRefusedError):  # the agent is dead, and its socket is left
        places.connect("name")
    places.listen("name").close()


def test_agents_of_other_jobs_gpus_and_ports_have_other_names(monkeypatch):
    names = {places.agent_name("job"), places.agent_name("other"), places.agent_name("job", "nvml:GPU-1")}
    for port in ("1", "2"):
        monkeypatch.setenv("MASTER_PORT", port)
        names.add(places.agent_name())
        assert places.agent_name() in names
    assert len(names) == 5


EXCHANGE = """
import zmq
from perseus_ds.protocol import places
with zmq.Context() as context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as agent:
    server.setsockopt(zmq.IPV6, 1)
    agent.setsockopt(zmq.LINGER, 0)
    port = server.bind_to_random_port("tcp://*")
    address = places.from_this_node(f"tcp://node-6:{port}")
    agent.setsockopt(zmq.IPV6, places.is_ipv6(address))
    agent.connect(address)
    agent.send(b"a message")
    assert server.poll(20_000), address
"""


def test_a_name_that_has_only_an_address_of_ipv6_is_looked_up_as_such(tmp_path):
    """In a network with such an address, and with a name for it: ZeroMQ looks names up as IPv4 otherwise."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\nfd00::2 node-6\n")
    prepare = f"mount --bind {tmp_path}/hosts /etc/hosts && ip link set lo up && ip -6 address add fd00::2/64 dev lo"
    as_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    run = f'{prepare} && exec "{sys.executable}" -c "$0"'
    subprocess.run(["unshare", "--mount", "--net", *as_root, "sh", "-c", run, EXCHANGE], check=True)


@pytest.mark.parametrize("address", ["tcp://localhost:4711", "tcp://[::1]:4711", "tcp://no-such-node.invalid:4711"])
def test_other_names_and_addresses_stay_as_they_are(address):
    assert places.from_this_node(address) == address
