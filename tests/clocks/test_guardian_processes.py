"""The guardian with real processes, the real pynvml and the stub NVML library."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from run_log import GIVE_UP_S, wait_until
from stub_nvml.controller import StubNvml

from perseus_ds.clocks import guardian
from perseus_ds.clocks.guardian import Guardian
from perseus_ds.gpu.nvml import NvmlGpu

RANK = (
    f"GIVE_UP_S = {GIVE_UP_S}"
    + """
import signal, sys, time
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.clocks.guardian import Guardian
job, end, *indices = sys.argv[1:]
gpus = [NvmlGpu(int(index)) for index in indices]
guardian = Guardian([gpu.address for gpu in gpus], job)
for gpu in gpus:
    gpu.lock_clock(1200)
print(guardian.pid, flush=True)
if end == "close":
    print(guardian.close(GIVE_UP_S), guardian.close(GIVE_UP_S), flush=True)
if end == "register again":
    before = guardian.pid
    while guardian.pid in (before, None):
        time.sleep(0.01)
    print(guardian.pid, guardian.alive, flush=True)
    print(guardian.close(GIVE_UP_S), flush=True)
if end == "watch":
    sys.executable = "/bin/false"  # so that no other guardian can be started
    while guardian.alive:
        time.sleep(0.01)
    print("dead", gpus[0].clock_mhz(), flush=True)
signal.pause()
"""
)
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


class Node:
    """Starts ranks of one job on the stub's GPUs."""

    def __init__(self, stub: StubNvml, job: str) -> None:
        self.stub = stub
        self.job = job
        self.started: list[subprocess.Popen[str]] = []
        self.guardians: set[int] = set()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.stub.environment}
        command = [sys.executable, "-c", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.started.append(process)
        return process

    def rank(self, end: str, *indices: int) -> subprocess.Popen[str]:
        """Start a rank that locks these GPUs and then ends as told."""
        return self.start(RANK, self.job, end, *map(str, indices))

    def guardian_of(self, rank: subprocess.Popen[str]) -> int:
        """Wait until a rank has locked its GPUs, or has registered again; returns its guardian's process id."""
        assert rank.stdout is not None
        pid = int(rank.stdout.readline().split()[0])
        self.guardians.add(pid)
        return pid


@pytest.fixture
def node(stub_nvml: StubNvml, tmp_path: Path) -> Iterator[Node]:
    made = Node(stub_nvml, str(tmp_path))
    yield made
    for process in made.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in made.guardians), "the end of the guardians")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_clocks_are(stub: StubNvml, expected: list[int]) -> None:
    wait_until(lambda: stub.locked_clocks_mhz() == expected, f"clocks locked at {expected}")


def test_killing_every_rank_restores_exactly_their_gpus(node: Node) -> None:
    node.stub.gpus[3].locked_clock_mhz = 900  # Somebody else's.
    ranks = [node.rank("wait", index) for index in range(3)]
    assert len({node.guardian_of(rank) for rank in ranks}) == 1, "ranks of one node share a guardian"
    assert node.stub.locked_clocks_mhz() == [1200, 1200, 1200, 900]
    for rank in ranks:
        rank.kill()
    wait_until_clocks_are(node.stub, [0, 0, 0, 900])
    assert node.stub.gpus[3].calls("reset_locked") == 0


def test_killing_the_launchers_process_tree_spares_the_guardian(node: Node) -> None:
    """DeepSpeed's launcher ends all its descendants, first by SIGTERM, then by SIGKILL."""
    launcher = node.start(LAUNCHER, RANK, node.job, "wait", "0")
    guardian = psutil.Process(node.guardian_of(launcher))
    tree = [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]
    assert guardian not in tree
    assert os.getsid(guardian.pid) != os.getsid(launcher.pid)
    guardian.terminate()  # Even if somebody finds it, it stays as long as there is a rank.
    for process in tree:
        process.kill()
    wait_until_clocks_are(node.stub, [0, 0, 0, 0])


def test_a_gpu_stays_locked_while_one_of_its_ranks_lives(node: Node) -> None:
    first, second, third = node.rank("wait", 0, 1), node.rank("wait", 1), node.rank("wait", 2)
    guardian = node.guardian_of(first)
    assert [node.guardian_of(rank) for rank in (second, third)] == [guardian] * 2
    first.kill()
    wait_until_clocks_are(node.stub, [0, 1200, 1200, 0])
    second.kill()
    third.kill()
    wait_until_clocks_are(node.stub, [0, 0, 0, 0])
    wait_until(lambda: not is_running(guardian), "the end of the guardian")
    assert node.stub.gpus[1].calls("reset_locked") == 1, "not when the first of its ranks was gone"


def test_close_restores_before_it_returns(node: Node) -> None:
    rank = node.rank("close", 2)
    node.guardian_of(rank)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "True True\n"
    assert node.stub.locked_clocks_mhz() == [0, 0, 0, 0]
    assert rank.poll() is None


def test_ranks_start_another_guardian_when_theirs_has_died(node: Node) -> None:
    ranks = [node.rank("register again", 0), node.rank("register again", 1)]
    (dead,) = {node.guardian_of(rank) for rank in ranks}
    os.kill(dead, signal.SIGKILL)
    for rank in ranks:
        assert rank.stdout is not None
        successor, is_alive = rank.stdout.readline().split()
        node.guardians.add(int(successor))
        assert int(successor) != dead
        assert is_alive == "True"
        assert rank.stdout.readline() == "True\n", "it restores the clock at the end"
    assert node.stub.locked_clocks_mhz() == [0, 0, 0, 0]


def test_records_that_are_removed_while_ranks_live_are_made_again(node: Node, tmp_path: Path) -> None:
    """As the end of a login session does with files of its user in memory."""
    rank = node.rank("wait", 0)
    node.guardian_of(rank)
    shutil.rmtree(next((tmp_path / "runtime").iterdir()))
    wait_until(lambda: node.stub.has_guardian(1), "a record and a guardian")
    rank.kill()
    wait_until_clocks_are(node.stub, [0, 0, 0, 0])


def test_a_rank_whose_guardian_cannot_be_replaced_notices_it_and_nothing_else_happens(node: Node) -> None:
    rank = node.rank("watch", 0)
    os.kill(node.guardian_of(rank), signal.SIGKILL)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "dead 1200\n"
    assert rank.poll() is None
    assert node.stub.locked_clocks_mhz()[0] == 1200


def test_a_driver_that_hangs_on_one_gpu_does_not_keep_the_others_locked(node: Node) -> None:
    ranks = [node.rank("wait", index) for index in range(3)]
    for rank in ranks:
        node.guardian_of(rank)
    node.stub.gpus[1].hang("reset_locked")
    for rank in ranks:
        rank.kill()
    wait_until_clocks_are(node.stub, [0, 1200, 0, 0])
    node.stub.gpus[1].hang("reset_locked", False)
    wait_until_clocks_are(node.stub, [0, 0, 0, 0])


def test_a_guardian_that_cannot_open_the_gpu_says_why(stub_nvml: StubNvml, tmp_path: Path) -> None:
    start = "from perseus_ds.clocks.guardian import Guardian; Guardian(['nvml:GPU-dead'], 'lost')"
    done = stub_nvml.run("-c", start)
    assert done.returncode == 1
    assert "GpuError: The guardian process failed to start: " in done.stderr
    assert "GPU UUID 'GPU-dead' fits 0 of the GPUs" in done.stderr


@pytest.fixture
def address(stub_nvml_here: StubNvml, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU that guardians of this process see, too."""
    for name, value in stub_nvml_here.environment.items():
        monkeypatch.setenv(name, value)
    return NvmlGpu(0).address


@pytest.mark.parametrize(
    "run",
    [
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"',
        "#!/bin/sh\nexit 1",
        "#!/bin/sh\nsleep 600",
        "#!/no/such/interpreter",
    ],
    ids=["works", "refuses", "is stuck", "cannot be run"],
)
def test_the_guardian_gets_a_scope_of_systemd_where_the_user_may_have_one_and_else_does_without(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """The stand-in for ``systemd-run`` only notes that it was asked."""
    command, asked = tmp_path / "systemd-run", tmp_path / "asked"
    first, *others = run.splitlines()
    command.write_text("\n".join([first, f'echo "$@" >> {asked}', *others]))
    command.chmod(0o755)
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd" / "private").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    is_stuck = "sleep 600" in others
    monkeypatch.setattr(guardian, "SCOPE_TIMEOUT_S", 0.5 if is_stuck else GIVE_UP_S)
    started = Guardian([address], str(tmp_path))
    assert started.close(GIVE_UP_S)
    wait_until(lambda: started.pid is None, "the end of the guardian")
    if not is_stuck:  # one that is may be killed before it has noted anything
        assert asked.read_text().startswith("--user --scope ") if others else not asked.exists()


def test_a_guardian_is_of_the_package_that_starts_it(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "perseus_ds").mkdir()
    (tmp_path / "perseus_ds" / "__init__.py").write_text("raise ImportError('another version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert Guardian([address], str(tmp_path)).close(GIVE_UP_S)


def test_jobs_do_not_share_a_guardian(node: Node, stub_nvml: StubNvml, tmp_path: Path) -> None:
    other = Node(stub_nvml, f"{tmp_path}/other")
    mine, theirs = node.rank("wait", 0), other.rank("wait", 1)
    assert node.guardian_of(mine) != other.guardian_of(theirs)
    theirs.kill()
    wait_until_clocks_are(node.stub, [1200, 0, 0, 0])
    theirs.communicate()


def test_the_guardian_is_small_and_imports_no_framework(node: Node) -> None:
    assert psutil.Process(node.guardian_of(node.rank("wait", 0))).memory_info().rss < 60e6
    code = "import sys, perseus_ds.clocks.guardian_daemon, perseus_ds.gpu.nvml; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "deepspeed", "numpy", "scipy", "pydantic", "transformers"} & set(modules)
