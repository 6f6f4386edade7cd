"""Agents and ranks as real processes, with the real pynvml and the stub NVML library."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from one_rank_server import OneRankServer
from run_log import GIVE_UP_S, wait_until
from stub_nvml.controller import StubNvml

from perseus_ds.agent.gpu_records import left_locked
from perseus_ds.client import lease as lease_module
from perseus_ds.client.lease import Lease
from perseus_ds.errors import GpuError, GpuPermissionError
from perseus_ds.gpu.base import gpu_facts
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.protocol import messages, places
from perseus_ds.protocol.job_messages import Program
from perseus_ds.protocol.messages import FindGpu
from perseus_ds.timebase import REAL_TIME, RealTime

IMPORTS = """
import os, signal, sys, time
from perseus_ds.client import lease
from perseus_ds.client.lease import Lease
from perseus_ds.gpu.nvml import NvmlGpu
"""
RANK = (
    f"{IMPORTS}GIVE_UP_S = {GIVE_UP_S}"
    + """
job, end, *indices = sys.argv[1:]
gpus = [NvmlGpu(int(index)) for index in indices]
if end == "handles SIGTERM":
    signal.signal(signal.SIGTERM, lambda number, frame: print("handled", flush=True))
leases = [Lease(gpu.address, job) for gpu in gpus]
for gpu in gpus:
    gpu.lock_clock(1200)
if end == "fork":
    if os.fork() == 0:
        time.sleep(600)
print(leases[0].agent_pid, flush=True)
if end == "watch":
    before = leases[0].agent_pid
    while leases[0].agent_pid in (before, None) or not leases[0].is_granted:
        time.sleep(0.01)
        leases[0].is_watched()
    print(leases[0].agent_pid, flush=True)
    print(*(lease.close(GIVE_UP_S) for lease in leases * 2), flush=True)
while True:
    for lease in leases:
        lease.memory.begin_iteration()
        time.sleep(0.01)
        lease.memory.end_iteration()
"""
)
FOLLOWS = (
    IMPORTS
    + """
from perseus_ds.protocol import messages
job, server, index = sys.argv[1:]
lease = Lease(NvmlGpu(int(index)).address, job)
lease.send(messages.decode_to_agent(bytes.fromhex(server)))
print(lease.agent_pid, flush=True)
while True:
    number = lease.memory.begin_iteration(0)
    lease.memory.mark_begun(number, time.perf_counter(), 0)
    lease.wake()
    time.sleep(0.01)
    lease.memory.end_iteration()
    lease.memory.mark_ended(number, time.perf_counter())
"""
)
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


class Node:
    """Starts ranks of one job on the stub's GPUs."""

    def __init__(self, stub: StubNvml, job: str) -> None:
        self.stub = stub
        self.job = job
        self.started: list[subprocess.Popen[str]] = []
        self.agents: set[int] = set()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.stub.environment}
        command = [sys.executable, "-c", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.started.append(process)
        return process

    def rank(self, end: str, *indices: int) -> subprocess.Popen[str]:
        """Start a rank that locks these GPUs and then does as ``end`` selects."""
        return self.start(RANK, self.job, end, *map(str, indices))

    def agent_of(self, rank: subprocess.Popen[str]) -> int:
        """Wait until a rank has locked its GPUs, or has registered again, and return its agent's process id."""
        assert rank.stdout is not None
        pid = int(rank.stdout.readline().split()[0])
        self.agents.add(pid)
        return pid

    def kill_job(self, index: int) -> None:
        """Start a rank, and kill it together with its agent, which leaves the clock of its GPU locked."""
        rank = self.rank("wait", index)
        kill(self.agent_of(rank))
        rank.kill()
        rank.wait()


@pytest.fixture
def node(stub_nvml: StubNvml, tmp_path: Path) -> Iterator[Node]:
    made = Node(stub_nvml, str(tmp_path))
    yield made
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including forked processes
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in made.agents), "the end of the agents")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(agent: int) -> None:
    """Kill an agent, and wait until its locks and sockets are released."""
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_running(agent), "the end of the agent")


def wait_until_clocks_are(stub: StubNvml, expected: list[int]) -> None:
    wait_until(lambda: stub.locked_clocks_mhz() == expected, f"clocks locked at {expected}")


def test_killing_the_launchers_process_tree_spares_the_agent(node: Node) -> None:
    """DeepSpeed's launcher ends all its descendants, first with SIGTERM, then with SIGKILL."""
    launcher = node.start(LAUNCHER, RANK, node.job, "wait", "0")
    agent = psutil.Process(node.agent_of(launcher))
    tree = [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]
    assert agent not in tree
    assert os.getpgid(agent.pid) != os.getpgid(launcher.pid)
    agent.terminate()  # Even if it receives a signal, it stays until its last rank has ended.
    for process in tree:
        process.kill()
    wait_until_clocks_are(node.stub, [0, 0, 0, 0])


def test_a_gpu_stays_locked_while_one_of_its_ranks_lives(node: Node) -> None:
    node.stub.gpus[3].locked_clock_mhz = 900  # locked by another user
    first, second, third = node.rank("fork", 0, 1), node.rank("wait", 1), node.rank("wait", 2)
    agent = node.agent_of(first)
    assert [node.agent_of(rank) for rank in (second, third)] == [agent] * 2, "ranks of one node share an agent"
    assert node.stub.locked_clocks_mhz() == [1200, 1200, 1200, 900]
    first.kill()  # its forked process lives on
    wait_until_clocks_are(node.stub, [0, 1200, 1200, 900])
    second.kill()
    third.kill()
    wait_until_clocks_are(node.stub, [0, 0, 0, 900])
    wait_until(lambda: not is_running(agent), "the end of the agent")
    assert node.stub.gpus[1].calls("reset_locked") == 1, "it is not reset when its first rank ends"
    assert node.stub.gpus[3].calls("reset_locked") == 0


def test_ranks_start_another_agent_when_theirs_has_died(node: Node) -> None:
    ranks = [node.rank("watch", 0), node.rank("watch", 1)]
    (dead,) = {node.agent_of(rank) for rank in ranks}
    kill(dead)
    for rank in ranks:
        assert rank.stdout is not None
        successor = int(rank.stdout.readline())
        node.agents.add(successor)
        assert successor != dead
        assert rank.stdout.readline() == "True True\n", "it restores the clock at the end, once"
    assert node.stub.locked_clocks_mhz() == [0, 0, 0, 0]


def test_a_record_that_is_removed_is_written_again(node: Node, tmp_path: Path) -> None:
    """The end of a login session removes its user's files in memory."""
    node.agent_of(node.rank("wait", 0))
    (record,) = (tmp_path / "memory").glob("*/gpu.*")
    record.unlink()
    wait_until(lambda: record.exists() and record.read_text(), "a record")


def test_a_driver_that_hangs_on_one_gpu_does_not_keep_the_others_locked(node: Node) -> None:
    ranks = [node.rank("wait", index) for index in range(3)]
    for rank in ranks:
        node.agent_of(rank)
    node.stub.gpus[0].hang("reset_locked")
    for rank in ranks[:2]:  # the third one keeps the agent
        rank.kill()
    wait_until_clocks_are(node.stub, [1200, 0, 1200, 0])
    node.stub.gpus[0].hang("reset_locked", False)
    wait_until_clocks_are(node.stub, [0, 0, 1200, 0])


def test_an_agent_that_starts_slowly_and_fails_says_why(stub_nvml: StubNvml, tmp_path: Path) -> None:
    code = "lease._CODE = 'import time; time.sleep(1); raise SystemError(1)'; Lease('nvml:GPU-dead', 'lost')"
    done = stub_nvml.run("-c", IMPORTS + code)
    assert "GpuError: The agent of this node failed to start: SystemError: 1" in done.stderr


def test_a_rank_whose_gpu_the_agent_cannot_open_gets_an_agent_of_its_own(
    node: Node, stub_nvml: StubNvml, stub_library: Path, tmp_path: Path
) -> None:
    """With ``srun --gpus-per-task=1``, each task has a control group with its own GPU."""
    hidden = StubNvml(stub_library, tmp_path / "hidden", 1)
    hidden.gpus[0].uuid = b"GPU-of-another-task"
    first = node.rank("wait", 0)
    agent = node.agent_of(first)
    node.stub = hidden
    second = node.rank("wait", 0)
    assert node.agent_of(second) != agent
    second.kill()
    wait_until_clocks_are(hidden, [0])
    first.kill()
    node.stub = stub_nvml
    wait_until_clocks_are(stub_nvml, [0, 0, 0, 0])


def test_a_signal_to_a_rank_resets_its_clock_and_one_to_the_agent_all_while_they_go_on(node: Node) -> None:
    """A scheduler may end all processes of a job."""
    ranks = [node.rank("handles SIGTERM", 0), node.rank("handles SIGTERM", 1)]
    (agent,) = {node.agent_of(rank) for rank in ranks}
    ranks[0].send_signal(signal.SIGTERM)
    wait_until_clocks_are(node.stub, [0, 1200, 0, 0])
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline() == "handled\n"
    os.kill(agent, signal.SIGTERM)
    wait_until_clocks_are(node.stub, [0, 0, 0, 0])
    assert is_running(agent), "ranks may still need it"
    assert [rank.poll() for rank in ranks] == [None, None]


def test_a_rank_that_is_stopped_has_its_clock_reset(node: Node) -> None:
    uuid = node.stub.gpus[1].uuid.decode()
    with OneRankServer() as server:
        ranks = [node.rank("wait", 0), node.start(FOLLOWS, node.job, messages.encode(server.connect).hex(), "1")]
        for rank in ranks:
            node.agent_of(rank)
        server.send(Program(0, 1110))
        wait_until_clocks_are(node.stub, [1200, 1110, 0, 0])
        shown = lambda: [path.name for path in places.user_folder().glob("*.prom")] == [f"slowed.{uuid}.prom"]  # noqa: E731
        wait_until(shown, "the file that shows which GPU is slowed on purpose")
        ranks[1].send_signal(signal.SIGSTOP)
        wait_until_clocks_are(node.stub, [1200, 0, 0, 0])


def test_an_agent_that_is_stopped_and_continues_leaves_a_gpu_alone_that_was_reset_from_outside(node: Node) -> None:
    rank = node.rank("wait", 0)
    agent = node.agent_of(rank)
    os.kill(agent, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(agent).status() == psutil.STATUS_STOPPED, "the agent is stopped")
    rank.kill()
    rank.wait()
    assert node.stub.run("-m", "perseus_ds", "reset").returncode == 0
    node.stub.gpus[0].locked_clock_mhz = 900  # locked by the next job
    os.kill(agent, signal.SIGCONT)
    wait_until(lambda: not is_running(agent), "the end of the agent")
    assert node.stub.locked_clocks_mhz()[0] == 900


def test_a_clock_that_another_job_left_locked_is_reset_and_named_once(node: Node, stub_nvml: StubNvml) -> None:
    stub_nvml.gpus[1].locked_clock_mhz = 900  # locked by another user
    node.kill_job(2)
    assert stub_nvml.locked_clocks_mhz() == [0, 900, 1200, 0]
    done = [stub_nvml.run("-c", IMPORTS + "Lease(NvmlGpu(0).address, 'another').close()") for _ in range(2)]
    assert stub_nvml.locked_clocks_mhz() == [0, 900, 0, 0]
    wait_until(lambda: not stub_nvml.agents(), "the end of the agents")
    assert places.agents() == [], "files of the killed agent are also removed"
    said = r"perseus: process \d+ died and left the clock of nvml:GPU-\S+ locked: it is reset\.\n"
    assert re.fullmatch(said, done[0].stderr)
    assert done[1].stderr == ""


def test_a_clock_that_the_same_job_left_locked_before_it_was_restarted_is_reset(
    node: Node, stub_nvml: StubNvml
) -> None:
    """For example, torchrun restarts ranks after all processes were killed."""
    node.kill_job(0)
    lease = f"gpu = NvmlGpu(0); held = Lease(gpu.address, {node.job!r}); print(gpu.clock_mhz())"
    done = stub_nvml.run("-c", IMPORTS + lease)
    assert done.stdout == "1410\n"


def test_a_gpu_of_another_job_is_refused_with_its_agent(node: Node, stub_nvml: StubNvml) -> None:
    agent = node.agent_of(node.rank("wait", 0))
    done = stub_nvml.run("-c", IMPORTS + "lease._HELD_S = 0.1; Lease(NvmlGpu(0).address, 'another')")
    assert f"is used by another job of this user (process {agent})" in done.stderr


@pytest.fixture
def address(stub_of_agents: StubNvml) -> str:
    """Address of a GPU that agents of this process can also open."""
    return NvmlGpu(0).address


def test_an_agent_that_may_not_set_clocks_ends_with_its_rank(address: str, tmp_path: Path, stub_nvml: StubNvml) -> None:
    """Most users may not set clocks, so there is nothing to restore for them or for the next job."""
    for function in ("set_locked", "reset_locked"):
        stub_nvml.gpus[0].fail(function, "no_permission")
    lease = Lease(address, str(tmp_path))
    assert lease.close(GIVE_UP_S)
    wait_until(lambda: not stub_nvml.agents(), "the end of the agent")
    assert list(left_locked("another")) == []


def test_a_clock_that_may_not_be_reset_is_named_and_stays_recorded(
    node: Node, address: str, tmp_path: Path, stub_nvml: StubNvml, caplog: pytest.LogCaptureFixture
) -> None:
    node.kill_job(0)
    stub_nvml.gpus[0].fail("reset_locked", "no_permission")
    assert Lease(address, "another job").close(GIVE_UP_S)
    assert re.search(r"left the clock of nvml:GPU-0\S+ locked: it cannot be reset \(.*needs root", caplog.text)
    wait_until(lambda: not stub_nvml.agents(), "the end of the agent")
    assert [record.gpu for record in left_locked("another")] == [address]


PLACE = FindGpu("nvml", 2, variables={"CUDA_VISIBLE_DEVICES": "0,1,3"}, cgroups=places.cgroups())


def test_an_agent_finds_and_describes_the_gpu_of_a_number(stub_of_agents: StubNvml, tmp_path: Path) -> None:
    stub_of_agents.gpus[3].power_limit_w = 300.0
    stub_of_agents.gpus[3].fail("reset_locked", "no_permission")
    lease = Lease(PLACE, str(tmp_path), checks_permission=True)
    known = lease.description
    assert lease.gpu == NvmlGpu(3).address
    assert known is not None
    assert known.text == str(NvmlGpu(3))
    assert known.clocks_mhz == NvmlGpu(3).supported_clocks_mhz()
    assert known.facts == gpu_facts(NvmlGpu(3))
    assert known.facts.settings is not None
    assert "its power limit is 300 W of 400 W" in known.notices[0]
    assert known.permission_fault is not None
    with pytest.raises(GpuPermissionError, match="needs root"):
        raise known.permission_fault.error()
    lease.close(GIVE_UP_S)


def test_a_lock_by_somebody_else_stays_while_a_job_only_reads(stub_of_agents: StubNvml, tmp_path: Path) -> None:
    stub_of_agents.gpus[3].locked_clock_mhz = 900
    lease = Lease(PLACE, str(tmp_path))
    assert stub_of_agents.locked_clocks_mhz()[3] == 900
    lease.close(GIVE_UP_S)


def test_a_number_in_other_control_groups_names_no_gpu_of_an_agent(stub_of_agents: StubNvml, tmp_path: Path) -> None:
    """With ``srun --gpus-per-task=1``, GPU 0 of every task is a different one."""
    other = msgspec.structs.replace(PLACE, cgroups="those of another task")
    with pytest.raises(GpuError, match="GPU 2 of a process of other control groups cannot be identified"):
        Lease(other, str(tmp_path))
    uuid = NvmlGpu(1).uuid
    lease = Lease(msgspec.structs.replace(other, uuid=uuid), str(tmp_path))
    assert lease.gpu == f"nvml:{uuid}"
    lease.close(GIVE_UP_S)


def test_a_gpu_that_cannot_be_found_is_an_error_that_says_why(stub_of_agents: StubNvml, tmp_path: Path) -> None:
    with pytest.raises(GpuError, match="GPU 7 of this process does not exist"):
        Lease(msgspec.structs.replace(PLACE, ordinal=7), str(tmp_path))
    wait_until(lambda: not stub_of_agents.agents(), "the end of the agents")


def test_a_driver_that_hangs_while_a_gpu_is_looked_for_is_an_error(
    stub_of_agents: StubNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Lease(NvmlGpu(0).address, str(tmp_path))  # the agent has started, and answers
    monkeypatch.setattr(lease_module, "_ANSWER_TIMEOUT_S", 1.0)
    for gpu in stub_of_agents.gpus:
        gpu.hang("name")
    with pytest.raises(GpuError, match="No agent answered within 1 s, so GPU 2 is not used"):
        Lease(PLACE, str(tmp_path))
    for gpu in stub_of_agents.gpus:
        gpu.hang("name", False)
    other.close()


def test_signals_are_never_written_into_another_file(address: str, tmp_path: Path) -> None:
    """Only the main thread can make the interpreter stop writing signals."""
    code = (
        "import os, signal, sys, threading\n"
        "from perseus_ds.client.lease import Lease\n"
        "lease = Lease(sys.argv[1], 'job')\n"
        "closer = threading.Thread(target=lease.close)\n"
        "closer.start()\n"
        "closer.join()\n"
        "files = [open(f'{sys.argv[2]}/{number}', 'wb', buffering=0) for number in range(8)]\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: None)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    subprocess.run([sys.executable, "-c", code, address, str(tmp_path)], check=True, capture_output=True)
    assert [path.stat().st_size for path in sorted(tmp_path.glob("[0-7]"))] == [0] * 8


def test_a_gpu_that_another_job_is_about_to_let_go_is_waited_for(node: Node, stub_nvml: StubNvml) -> None:
    agent = node.agent_of(rank := node.rank("wait", 0))
    patient = f"lease._HELD_S = lease._ANSWER_TIMEOUT_S = {GIVE_UP_S}; "
    waits = node.start(IMPORTS + patient + "print(Lease(NvmlGpu(0).address, 'another').agent_pid, flush=True)")
    wait_until(lambda: len(stub_nvml.agents()) == 2, "an agent of the other job")
    rank.kill()
    assert node.agent_of(waits) != agent


class Later(RealTime):
    """Real time that a test can advance."""

    later_s = 0.0

    def now_s(self) -> float:
        return REAL_TIME.now_s() + self.later_s


def test_an_agent_that_is_stopped_is_ended_and_replaced(address: str, tmp_path: Path, stub_of_agents: StubNvml) -> None:
    now = Later()
    lease = Lease(address, str(tmp_path), now)
    stub_of_agents.gpus[0].locked_clock_mhz = 600
    (stopped,) = stub_of_agents.agents()
    stopped.suspend()

    def is_replaced() -> bool:
        if is_running(stopped.pid):
            now.later_s += 0.5
        lease.is_watched()
        return lease.grants == 2

    wait_until(is_replaced, "another agent")
    assert not is_running(stopped.pid)
    wait_until_clocks_are(stub_of_agents, [0] * len(stub_of_agents.gpus))
    assert lease.close(GIVE_UP_S)


def test_a_pause_of_the_machine_is_no_silence_of_the_agent(
    address: str, tmp_path: Path, stub_of_agents: StubNvml
) -> None:
    now = Later()
    lease = Lease(address, str(tmp_path), now)
    (agent,) = stub_of_agents.agents()
    agent.suspend()
    lease.is_watched()
    now.later_s += 3600.0
    assert lease.is_watched()
    assert lease.is_granted
    agent.resume()
    assert lease.close(GIVE_UP_S)


@contextlib.contextmanager
def locked_by_another_process(path: Path) -> Iterator[None]:
    code = "import pathlib, sys; from perseus_ds.protocol import places; places.lock(pathlib.Path(sys.argv[1])); "
    command = [sys.executable, "-c", code + "print(flush=True); sys.stdin.read()", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def test_agents_that_cannot_start_are_started_less_and_less_often_and_by_one_rank(
    address: str, tmp_path: Path, stub_of_agents: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Later()
    lease = Lease(address, str(tmp_path), now)
    (agent,) = stub_of_agents.agents()
    kill(agent.pid)
    started_s: list[float] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        started_s.append(now.later_s)
        failed = subprocess.Popen(["false"], stderr=subprocess.PIPE)
        failed.wait()
        return failed

    monkeypatch.setattr(lease_module, "_start", start)
    with locked_by_another_process(places.start_lock_path(places.agent_name(str(tmp_path)))):
        while now.later_s < 100.0:
            lease.is_watched()
            now.later_s += 0.5
    assert not started_s
    while now.later_s < 400.0:
        lease.is_watched()
        now.later_s += 0.5
    assert len(started_s) < 15
    assert 55.0 < started_s[-1] - started_s[-2] < 65.0
    monkeypatch.undo()
    lease.close()


def test_a_lease_that_is_granted_again_is_watched_however_long_ago_it_was_lost(address: str, tmp_path: Path) -> None:
    """A rank checks its agent only between iterations, which may be long."""
    now = Later()
    lease = Lease(address, str(tmp_path), now)
    was_watched = False
    while lease.is_granted:
        now.later_s += 60.0  # so that the heartbeat is old
        was_watched = lease.is_watched()
    assert was_watched, "it was lost just now"
    now.later_s += 60.0
    is_watched: list[bool] = []

    def is_granted_again() -> bool:
        is_watched.append(lease.is_watched())
        return lease.grants == 2

    wait_until(is_granted_again, "another agent")
    assert is_watched == [False] * (len(is_watched) - 1) + [True], "from the call on in which it is granted"
    assert lease.close(GIVE_UP_S)


def test_an_agent_that_ends_while_a_rank_connects_is_replaced(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = places.connect

    def connect_to_one_that_ends(name: str) -> socket.socket:
        monkeypatch.setattr(places, "connect", connect)
        with places.listen(name):
            return connect(name)

    monkeypatch.setattr(places, "connect", connect_to_one_that_ends)
    assert Lease(address, str(tmp_path)).close(GIVE_UP_S)


def test_an_agent_is_of_the_package_that_starts_it(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "perseus_ds").mkdir()
    (tmp_path / "perseus_ds" / "__init__.py").write_text("raise ImportError('another version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert Lease(address, str(tmp_path)).close(GIVE_UP_S)


def test_an_agent_is_small_and_leaves_affinity_priority_and_profilers_of_its_rank_behind(node: Node) -> None:
    pinned = (
        "import os\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\n"
        "os.nice(5)\n"
        "os.environ |= {'LD_PRELOAD': '', 'OMP_NUM_THREADS': '1', 'NSYS_X': '1', 'CUDA_VISIBLE_DEVICES': '3'}\n"
    )
    rank = node.start(pinned + RANK, node.job, "wait", "0")
    agent = psutil.Process(node.agent_of(rank))
    assert os.getsid(agent.pid) == os.getsid(rank.pid), "in a session of its own it may wait for seconds on a busy node"
    assert set(agent.cpu_affinity() or ()) >= os.sched_getaffinity(0)
    assert agent.nice() == 0 or os.geteuid() != 0
    assert not {"LD_PRELOAD", "OMP_NUM_THREADS", "NSYS_X", "CUDA_VISIBLE_DEVICES"} & set(agent.environ())
    assert agent.cwd() == "/"
    assert agent.memory_info().rss < 60e6
    code = "import sys, perseus_ds.agent.process, perseus_ds.gpu.nvml; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "deepspeed", "numpy", "scipy", "pydantic", "transformers"} & set(modules)


BLOCKS_SIGNALS = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(Lease(NvmlGpu(0).address, sys.argv[1]).agent_pid, flush=True)
time.sleep(600)
"""


def test_an_agent_inherits_no_blocked_or_ignored_signals_of_its_rank(node):
    """It could not be terminated, and could not tell a server whose job has ended from one that was killed."""
    agent = node.agent_of(node.start(IMPORTS + BLOCKS_SIGNALS, node.job))
    lines = Path(f"/proc/{agent}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    assert int(status["SigBlk"], 16) == 0
    ignored = int(status["SigIgn"], 16)
    assert not ignored & 1 << signal.SIGCHLD - 1
    assert ignored & 1 << signal.SIGHUP - 1
