"""Simulates nodes on one machine by namespaces.

A node has its own network, processes, mounts, host name and shared memory. It also has its own stub driver, and a disk,
which is a folder with the same path on every node but different contents.
When the process that has made the nodes ends for any reason, their first processes end, and everything else with them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from job import ENVIRONMENT
from stub_nvml.controller import StubNvml

from perseus_ds.protocol.places import IN_MEMORY, RUNTIME_VARIABLE

_NETWORK = "10.77.0"
_BRIDGE = "switch"
# The first process of a PID namespace is a shell, because it reaps processes with parents that have ended.
_WAIT = "while :; do sleep 1000; done"
_ROOT = Path(__file__).parents[2]


class CannotBeMadeError(Exception):
    """This system does not allow creating namespaces, or a network between them."""


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        port: Port of the switch to which it is connected.
        disk: Path of its own disk outside the node.
        init: Its first process. All others end with it.
        variables: Environment variables of its processes. ``DISK`` is the path of its disk inside the node.
    """

    name: str
    port: str
    gpus: StubNvml
    disk: Path
    init: psutil.Process
    variables: dict[str, str]

    @property
    def entry(self) -> list[str]:
        """Arguments that, before a command, run it on the node in the folder of its disk."""
        environment = [f"{name}={value}" for name, value in self.variables.items()]
        return [*_enter(self.init), "env", "--chdir", self.variables["DISK"], *environment]

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*self.entry, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def agents(self) -> list[psutil.Process]:
        return self.gpus.agents()


class Cluster:
    """Nodes that are connected by a network.

    Attributes:
        nodes: The nodes, from ``node-1`` on.
        folder: A folder that is visible on all nodes.
        disk: Path of each node's own disk on the node. Outside the nodes it is an empty folder.
    """

    BURST_BYTES = 16_000
    """Number of bytes that a slow link passes at full speed."""

    def __init__(self, folder: Path, library: Path, count: int) -> None:
        self.folder = folder
        self._library = library
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._holders: list[subprocess.Popen[str]] = []
        names = [f"node-{number}" for number in range(1, count + 1)]
        hosts = [f"{_NETWORK}.{number} {name}" for number, name in enumerate(names, 1)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        try:
            self._switch = self._hold([], f"ip link add {_BRIDGE} type bridge && ip link set {_BRIDGE} up")
            self.nodes = [self._node(number, name) for number, name in enumerate(names, 1)]
        except BaseException:
            self.close()
            raise

    def _node(self, number: int, name: str) -> Node:
        own, port = self.folder / name, f"port{number}"
        own.mkdir()
        prepare = [
            f"hostname {name}",
            f"mount --bind {own} {self.disk}",
            f"mount --bind {self.folder}/hosts /etc/hosts",
            "mount -t tmpfs tmpfs /dev/shm",
        ]
        init = self._hold(["--mount-proc", "--uts", "--ipc"], " && ".join(prepare))
        peer = f"type veth peer name eth0 netns {init.pid}"
        self._on_switch(f"ip link add {port} {peer} && ip link set {port} master {_BRIDGE} up")
        up = f"ip link set lo up && ip link set eth0 up && ip address add {_NETWORK}.{number}/24 dev eth0"
        _run([*_enter(init), "sh", "-c", up])
        gpus = StubNvml(self._library, self.folder / f"{name}.gpus", 1)
        variables = {
            **gpus.environment,
            RUNTIME_VARIABLE: str(IN_MEMORY),  # each node has its own
            **ENVIRONMENT,
            "DISK": str(self.disk),
            "XDG_CACHE_HOME": f"{self.disk}/cache",
            "PYTHONPATH": str(_ROOT),
        }
        return Node(name, port, gpus, own, init, variables)

    def _hold(self, kinds: Sequence[str], prepare: str) -> psutil.Process:
        """Create namespaces for network, processes, mounts and ``kinds``, and return their first process."""
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", *kinds]
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare, "sh", "-c", f"{prepare} && echo ready && {_WAIT}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if (said := holder.stdout.readline()) != "ready\n":
            raise CannotBeMadeError(said.strip())
        return psutil.Process(holder.pid).children()[0]

    def _on_switch(self, line: str) -> None:
        # Process ids are those in the namespace of this process.
        _run(["nsenter", "--target", str(self._switch.pid), "--net", "sh", "-c", line])

    def lose(self, node: Node) -> None:
        """End a node as if its power failed: first its network, then its processes."""
        self._on_switch(f"ip link set {node.port} down")
        node.init.kill()
        node.init.wait()

    def make_slow(self, megabits_per_s: int) -> None:
        """Limit the bandwidth at which each node receives."""
        for node in self.nodes:
            rate = f"tbf rate {megabits_per_s}mbit burst {self.BURST_BYTES} latency 1s"
            self._on_switch(f"tc qdisc replace dev {node.port} root {rate}")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()


def _enter(init: psutil.Process) -> list[str]:
    return ["nsenter", "--target", str(init.pid), "--net", "--mount", "--pid", "--uts", "--ipc"]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBeMadeError(f"{command[-1]}: {done.stderr.strip()}")
