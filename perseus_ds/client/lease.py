"""A rank's lease of its GPU: the right to change its clock while an agent watches the rank's process.

The first rank of a job on a node starts the agent (:mod:`perseus_ds.agent.process`). If the agent dies, its ranks
notice it at the end of an iteration, and one of them starts another one. If its heartbeat is old, because it is stopped
or hangs, they end it first. This module never waits during training and starts no thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import math
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from perseus_ds.client.signals import SignalPipe
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.protocol import layout, memory_files, messages, places
from perseus_ds.protocol.layout import RankMemory
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_ANSWER_TIMEOUT_S = 30.0
_AGAIN_S = 0.02
_POLL_S = 0.0005
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
"""Pauses between starts of agents. Each one without success doubles the pause."""
_HELD_S = 5.0
"""Time to wait for a GPU that another job's agent may be about to reset and release."""
_OLD_S = 5.0
"""Age of a heartbeat from which its agent counts as stopped. An agent that has ended has closed its socket."""
_COUNTED_S = 1.0
"""Maximum time between two checks of the heartbeat that counts as silence."""
_REPLACED_WITHIN_S = 10.0
_STATUS_TIMEOUT_S = 10.0
# Variables that set profilers, preloaded libraries or numbers of threads for all processes of a job, or hide GPUs.
_NOT_INHERITED = (
    "LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "COVERAGE_PROCESS_START",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
)  # fmt: skip
_NOT_INHERITED_PREFIXES = ("OMP_", "KMP_", "MKL_", "GOMP_", "NSYS_", "VTUNE_")
_CODE = places.main_of("perseus_ds.agent.process")


class Lease:
    """The lease of one GPU, from its creation until :meth:`close` or the end of the process.

    While it lasts, the agent receives the process's signals, and resets the clock upon SIGTERM or SIGINT.

    Attributes:
        gpu: The GPU's :attr:`~perseus_ds.gpu.base.Gpu.address`. Empty until an agent has found the GPU.
        description: Description of the GPU by the agent. None if the agent did not have to find the GPU.
        grants: Number of times that an agent has granted the lease.
        is_granted: Whether an agent has granted the lease and is connected.
    """

    def __init__(
        self,
        gpu: str | messages.FindGpu,
        job: str | None = None,
        timebase: Timebase = REAL_TIME,
        *,
        files: Sequence[int] = (),
        checks_permission: bool = False,
        keep_busy: Callable[[float], object] | None = None,
    ) -> None:
        """Request the lease from the node's agent and wait for it.

        An agent is started if there is none.

        Args:
            gpu: The GPU's ``address``, or identifiers by which the agent finds it.
            job: Ranks with the same text share an agent. By default the job's ``MASTER_ADDR`` and ``MASTER_PORT``, or
                this process alone.
            timebase: Timebase for waiting.
            files: File descriptors of a simulated GPU's logs.
            checks_permission: Whether the agent is to check that clocks may be set, which resets the clock.
            keep_busy: Keeps the GPU busy for some time [s] while the lease is waited for. By default, it may be idle.

        Raises:
            GpuBusyError: Another job uses the GPU.
            GpuError: No agent can be started, or none can use the GPU.
        """
        self._place = gpu if isinstance(gpu, messages.FindGpu) else None
        self.gpu = "" if isinstance(gpu, messages.FindGpu) else gpu
        self.description: messages.GpuDescription | None = None
        self._checks_permission = checks_permission
        self._time = timebase
        self._pause = keep_busy or timebase.sleep
        self._process = os.getpid()
        self.shared = SharedMemory(layout.LENGTH)
        self.memory = RankMemory.create(self.shared.view)
        # The lease itself: the kernel ends this lock with the process.
        fcntl.lockf(self.shared.file, fcntl.LOCK_EX)
        self._connection: socket.socket | None = None
        self._hangup = select.poll()
        self._signals = SignalPipe()
        self._name = places.agent_name(job)
        self._starting: subprocess.Popen[bytes] | None = None
        self._start_lock: int | None = None
        self._next_start_s = -math.inf
        self._pause_s = _FIRST_PAUSE_S
        self._lost_s: float | None = None
        self._files = [self.shared.file, self._signals.reader, *files]
        self._inbox: list[messages.ToClient] = []
        self._outbox: list[tuple[bytes, tuple[int, ...]]] = []
        self.grants = 0
        self._heartbeat_s, self._silent_s, self._checked_s = -1.0, 0.0, timebase.now_s()
        self.is_granted = self._is_released = False
        try:
            self._request(job)
        except BaseException as error:
            self._disconnect()
            self._leave_starting()
            self._signals.close()
            os.close(self.shared.file)
            if isinstance(error, OSError):
                raise GpuError(f"No agent can be reached: {error}.") from error
            raise

    @property
    def agent_pid(self) -> int | None:
        with contextlib.suppress(OSError):
            return places.holder_of(places.agent_lock_path(self._name))
        return None

    def is_watched(self) -> bool:
        """Return True if an agent watches this process, or was lost less than 10 s ago.

        If it was lost, another one is started, without waiting. Called between iterations.
        """
        now_s = self._time.now_s()
        if self.memory.heartbeat_s != self._heartbeat_s:
            self._heartbeat_s, self._silent_s = self.memory.heartbeat_s, 0.0
        else:  # a pause of the machine pauses the agent as well
            self._silent_s += min(now_s - self._checked_s, _COUNTED_S)
        self._checked_s = now_s
        if self.is_granted and self._hangup.poll(0):
            self._read_all()
        if self._silent_s < _OLD_S:
            if self.is_granted:
                self._lost_s = None
                self._reap()
                return True
        elif self._connection is not None:
            self._end_silent_agent(self._connection)
        if self._lost_s is None:
            self._lost_s = now_s
        with contextlib.suppress(OSError, GpuError):  # for example no memory for another process: try again later
            self._progress()
        return self.is_granted or now_s - self._lost_s < _REPLACED_WITHIN_S

    def _end_silent_agent(self, connection: socket.socket) -> None:
        """Disconnect from an agent that is stopped or hangs, and end it: another one cannot replace it otherwise."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", credentials)
        self._disconnect()
        # Another rank may have replaced it already. 0: a process that is not visible here.
        if pid and pid == self.agent_pid:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def send(
        self, message: messages.ToClocks | messages.Connect | messages.StartServer, file: int | None = None
    ) -> None:
        """Send a message and an optional file without waiting. It is lost if there is no agent."""
        if self.is_granted:
            self._outbox.append((messages.encode(message), () if file is None else (file,)))
            self._flush()

    def received(self) -> list[messages.ToClient]:
        self._read_all()
        self._flush()
        received, self._inbox = self._inbox, []
        return received

    def _read_all(self) -> None:
        """Read all messages, and disconnect if the agent has closed the connection after them."""
        with contextlib.suppress(GpuError):  # a message of another version: another agent is started
            while self.is_granted and (message := self._receive()) is not None:
                self._inbox.append(message)

    def wake(self) -> None:
        if self._connection is not None and self.is_granted:
            with contextlib.suppress(OSError):
                self._connection.send(messages.WAKE)

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be a message from the agent, or until the timeout."""
        self._time.sleep(min(timeout_s, _POLL_S))

    def close(self, timeout_s: float = 3.0) -> bool:
        """End the lease, and wait until the agent has reset the clock. Has no effect when called again.

        Returns False if it may not be reset: the agent is lost, or the driver refuses or hangs.
        """
        if os.getpid() != self._process:
            return False
        self._signals.close()
        self._leave_starting()
        if self._connection is not None and not self._is_released:
            end_s = self._time.now_s() + timeout_s
            with contextlib.suppress(OSError, GpuError):
                self._connection.send(messages.encode(messages.Release()))
                while self._connection is not None and not self._is_released and self._time.now_s() < end_s:
                    message = self._receive()
                    self._is_released = isinstance(message, messages.Released)
                    if message is None:
                        self._time.sleep(_AGAIN_S / 10)
            self._disconnect()
        return self._is_released

    def _request(self, job: str | None) -> None:
        end_s = self._time.now_s() + _ANSWER_TIMEOUT_S
        alone = places.agent_name(job, self.gpu or str(self._place))
        while not self.is_granted:
            refused = self._progress()
            if refused is not None:
                # An agent that another rank started may not see this rank's GPU, if each has its own control group.
                if refused.reason == "held" and self._time.now_s() < end_s - _ANSWER_TIMEOUT_S + _HELD_S:
                    self._time.sleep(_AGAIN_S)
                    continue
                if refused.reason != "unusable" or self._name == alone:
                    raise (GpuBusyError if refused.reason == "held" else GpuError)(refused.error)
                self._leave_starting()
                self._name, self._next_start_s = alone, -math.inf
            elif self._time.now_s() > end_s:
                gpu = self.gpu if self._place is None else f"GPU {self._place.ordinal}"
                raise GpuError(
                    f"No agent answered within {_ANSWER_TIMEOUT_S:.0f} s, so {gpu} is not used. Without an agent its "
                    "clock would stay locked after a kill -9; `perseus-ds reset` restores it."
                )
            elif not self.is_granted:
                self._pause(_AGAIN_S)
        if self._starting is not None:  # it has ended, or ends soon since another agent serves
            self._starting.wait()
            self._reap()

    def _progress(self) -> messages.Refused | None:
        """Take the next step towards a lease, without waiting. Returns a refusal, if any."""
        if self._connection is None:
            try:
                self._connection = places.connect(self._name)
                self._silent_s = 0.0
                self._hangup = select.poll()
                self._hangup.register(self._connection, 0)  # only for the end of the connection
                if self._place is not None and not self.gpu:
                    self._connection.send(messages.encode(self._place))
                else:
                    self._send_request(self._connection)
            except (FileNotFoundError, ConnectionError):
                self._disconnect()
                self._start_if_due()
                return None
        answer = self._receive()
        if isinstance(answer, messages.Found):
            self.gpu = answer.gpu
            self._send_request(self._connection)
        elif isinstance(answer, messages.Granted):
            self.is_granted = True
            self.description = answer.gpu or self.description
            self.grants += 1
            self._pause_s = _FIRST_PAUSE_S
            self._leave_starting()
            for left in answer.left_locked:
                said = f"it cannot be reset ({left.error})" if left.error else "it is reset"
                logger.warning(
                    "perseus: process %d died and left the clock of %s locked: %s.", left.pid, left.gpu, said
                )
        elif isinstance(answer, messages.Refused):
            self._disconnect()
            return answer
        return None

    def _send_request(self, connection: socket.socket) -> None:
        is_renewal = self.grants > 0
        describes = self._place is not None and not is_renewal
        request = messages.RequestLease(self.gpu, is_renewal, describes, self._checks_permission and describes)
        socket.send_fds(connection, [messages.encode(request)], self._files)

    def _start_if_due(self) -> None:
        """Start an agent, unless one is starting or was started just now. Raises a ``GpuError`` if that one failed."""
        if (complaint := self._reap()) is not None:
            raise GpuError(f"The agent of this node failed to start: {complaint}")
        # On a busy node, a process starts slowly, and additional processes make it slower.
        if self._starting is None and self._time.now_s() >= self._next_start_s and self._may_start():
            self._next_start_s = self._time.now_s() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._starting = _start(self._name)

    def _may_start(self) -> bool:
        """Return True if this rank starts agents. One rank of a job does on each node, until its lease is granted."""
        if self._start_lock is None:
            with contextlib.suppress(BlockingIOError):
                self._start_lock = places.lock(places.start_lock_path(self._name))
        return self._start_lock is not None

    def _leave_starting(self) -> None:
        """Let another rank start agents, if necessary."""
        if self._start_lock is not None:
            os.close(self._start_lock)
            self._start_lock = None

    def _reap(self) -> str | None:
        """Remove the process that starts an agent if it has ended, and return the error if it failed."""
        if self._starting is None or self._starting.poll() is None:
            return None
        ended, self._starting = self._starting, None
        _, complaint = ended.communicate()
        lines = complaint.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return lines[-1] if ended.returncode else None

    def _receive(self) -> messages.ToClient | None:
        """Return the next message, if any. Disconnects if the agent has closed the connection."""
        if self._connection is None:
            return None
        try:
            packet = self._connection.recv(messages.LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        if not packet:
            self._disconnect()
            return None
        try:
            return messages.decode_to_client(packet)
        except msgspec.DecodeError as error:
            self._disconnect()
            raise GpuError(f"The agent sent what this version of perseus-ds does not understand: {error}.") from error

    def _flush(self) -> None:
        """Send queued messages, for which a busy agent had no room before."""
        while self._outbox and self._connection is not None:
            try:
                packet, files = self._outbox[0]
                if files:
                    socket.send_fds(self._connection, [packet], files)
                else:  # several times faster
                    self._connection.send(packet)
            except BlockingIOError:
                return
            except OSError:  # the next _receive() handles it
                pass
            del self._outbox[0]

    def _disconnect(self) -> None:
        self.is_granted = False
        self._outbox.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def leases() -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the agent and the processes of each GPU that this user's processes lease on this node.

    Agents that do not answer within 10 s, for example stopped ones, are omitted.
    """
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    with contextlib.suppress(OSError):
        for name in places.agents():
            with contextlib.suppress(OSError, msgspec.DecodeError), places.connect(name) as connection:
                connection.settimeout(_STATUS_TIMEOUT_S)
                connection.send(messages.encode(messages.RequestStatus()))
                status = messages.decode_to_client(connection.recv(messages.LONGEST))
                agent = places.holder_of(places.agent_lock_path(name)) or 0
                for gpu, pid in status.leases if isinstance(status, messages.Status) else ():
                    _, pids = found.get(gpu, (agent, ()))
                    found[gpu] = agent, (*pids, pid)
    return found


class SharedMemory:
    """Anonymous memory of a fixed size that another process can map by its file descriptor.

    It stays mapped until the process ends, because GPUs write into it and captured graphs hold its address.
    """

    def __init__(self, length: int, name: str = "perseus-ds") -> None:
        self.length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.file = memory_files.create(name)
            # Otherwise, a later write to a full tmpfs would end the process with SIGBUS.
            os.posix_fallocate(self.file, 0, self.length)
            # Neither the agent nor this process may truncate it.
            memory_files.seal_length(self.file)
            self._map = mmap.mmap(self.file, self.length)
        except OSError as error:
            raise GpuError(
                f"Perseus could not allocate {self.length / 2**10:.0f} KiB of shared memory: {error.strerror}. "
                "Free memory or raise the memory limit of the job."
            ) from error
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def _start(name: str) -> subprocess.Popen[bytes]:
    """Start an agent, which ends immediately if another one serves.

    The returned process ends when the agent is about to serve. Raises an ``OSError``.
    """
    environment = {
        variable: value
        for variable, value in os.environ.items()
        if variable not in _NOT_INHERITED and not variable.startswith(_NOT_INHERITED_PREFIXES)
    }
    return subprocess.Popen(
        [sys.executable, "-c", _CODE, name],
        cwd="/",  # Not a folder with the user's modules, and not in a file system that may be unmounted.
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
