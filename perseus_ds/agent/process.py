"""The agent: a process on each node that sets the clocks of ranks' GPUs and resets them.

A locked clock outlives the process that locked it, even after ``kill -9``, so another process must detect its end. A
rank requests a lease of its GPU and passes memory that it keeps locked. The kernel releases this lock when the process
ends for any reason. The agent polls these locks, and resets the GPU of each rank with an ended lease. On SIGTERM to
itself or to a rank, it resets immediately, so that a job writes its last checkpoint at default clocks.

The agent is not a descendant of the rank and has its own process group, so a signal to the job's process tree or group
does not reach it. It ends with the last rank. If everything is killed, for example a container or control group, clocks
stay locked until the next job of this user, or ``perseus-ds reset``, resets them.

It imports neither torch nor DeepSpeed, so that it starts quickly and needs little memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import selectors
import signal
import socket
import struct
import sys
import syslog
import threading
from collections.abc import Callable, Sequence
from functools import partial

from perseus_ds.agent.actor import GpuActor
from perseus_ds.agent.gpu_records import GpuHeldError, GpuRecord, UnrecordedGpu, left_locked
from perseus_ds.agent.job_server import JobServerChild, Uplink
from perseus_ds.agent.rank import Rank, RankEvent, State
from perseus_ds.agent.rank_clocks import RankClocks
from perseus_ds.errors import GpuError
from perseus_ds.gpu import find_gpu
from perseus_ds.gpu.base import Gpu
from perseus_ds.gpu.energy_counter import with_energy
from perseus_ds.protocol import layout, memory_files, messages, places
from perseus_ds.protocol.job_messages import Left, Say
from perseus_ds.protocol.layout import RankMemory
from perseus_ds.simulation import open_gpu
from perseus_ds.timebase import REAL_TIME, Timebase

_FIRST_RANK_TIMEOUT_S = 10.0
_MOST_FILES = 4
"""A rank's memory, its signals, and the two logs of a simulated GPU."""
_FD_SETSIZE = 1024
"""``select`` takes smaller file numbers only."""
_POLL_S = 0.1
_ENDING_POLL_S = 0.005
"""Polling interval of the lock of a rank with a closed socket. The kernel closes files one after the other."""
_TOGETHER_S = 0.00025
"""Marks that are due within this time are checked together."""
_RESTORED_EVERY_S = 1.0
"""Interval at which the records of locked GPUs are written again if they were removed."""
_LAST_REPORTS_WITHIN_S = 0.5
"""Time for which a rank that has ended its lease waits for the energy of its last iteration."""
_LEFT_TIMEOUT_S = 10.0
"""Time for which the first lease waits for GPUs that earlier jobs left locked."""
_MOST_SIGNALS = 4096
_TERMINATION = (signal.SIGTERM, signal.SIGINT)


def _mapped(file: int, least: int) -> memoryview:
    """Map memory that a client has passed. Raises a ``GpuError`` if it is too short, or could be truncated."""
    try:
        length = os.fstat(file).st_size
        if memory_files.can_be_truncated(file) or length < least:
            raise GpuError(f"The memory of a rank can be truncated, or has only {length} bytes.")
        return memoryview(mmap.mmap(file, length))
    except (OSError, ValueError) as error:
        raise GpuError(f"The memory of a rank cannot be used: {error}.") from error


class Agent:
    """Serves the ranks of a job on this node."""

    def __init__(
        self,
        name: str,
        open_gpu: Callable[..., Gpu] = open_gpu,
        find_gpu: Callable[[messages.FindGpu], Gpu] = find_gpu,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Reset GPUs that earlier processes of this user left locked, and wait for ranks. Raises an ``OSError``."""
        self._name = name
        self._listener = places.listen(name)
        self._open_gpu = open_gpu
        self._find_gpu = find_gpu
        self._time = timebase
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        # Threads of drivers wake the loop.
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, partial(self._wake_reader.recv, 4096))
        self._ranks: list[Rank] = []
        self._actors: dict[str, GpuActor] = {}
        # GPUs that processes of other jobs left locked, and these processes.
        self._left_locked: dict[str, tuple[int, GpuActor]] = {}
        self._began_s = self._update_at_s = self._next_s = self._restore_at_s = timebase.now_s()
        self._has_served = self.terminates = self.is_over = False
        self._uplinks: list[Uplink] = []
        self._server: JobServerChild | None = None
        # Ranks that wait until the server has started.
        self._server_waits: list[Rank] = []
        self._server_error = ""
        self._exchange_at_s = 0.0
        with contextlib.suppress(OSError):
            for record in left_locked(name):
                actor = self._open(record)
                if not record.is_of_same_job:
                    self._left_locked[record.gpu] = record.left_by or 0, actor

    def serve(self) -> None:
        """Serve until the last rank has ended, or return if no rank connects within 10 s."""
        while not self.is_over:
            self.step()
        if self._server is not None and not self._server.is_followed:
            self._server.end()  # rank 0 ended before it connected to the server, which would wait for it
        if given_up := [gpu for gpu, actor in self._actors.items() if not actor.is_reset]:
            gpus = ", ".join(given_up)
            syslog.syslog(syslog.LOG_ERR, f"perseus-ds: clocks of {gpus} may stay locked: run `perseus-ds reset`")

    def step(self) -> None:
        """Wait for at most 0.1 s, and do what is due."""
        try:
            left_s, may_be_ready = max(0.0, self._next_s - self._time.now_s()), True
            # Waiting in epoll itself would round the time up to milliseconds, which would delay clocks.
            if self._selector.fileno() < _FD_SETSIZE:
                may_be_ready = bool(select.select([self._selector], (), (), left_s)[0])
                left_s = 0.0
            if may_be_ready:
                for key, _ in self._selector.select(left_s):
                    key.data()
            now_s = self._time.now_s()
            if self._exchange_at_s <= now_s:
                self._exchange_at_s = now_s + _POLL_S
                self._exchange_messages()
            if self._update_at_s <= now_s or self.terminates:
                try:
                    self._update_leases()
                    self._check_server()
                finally:
                    self.is_over = not self._is_needed()
            self._next_s = min(self._update_at_s, self._exchange_at_s, self._follow_marks(now_s))
        except (OSError, RuntimeError):  # too many files or threads: try again
            self._time.sleep(_POLL_S)
        except Exception as error:  # a mistake, which must leave no clock locked
            syslog.syslog(syslog.LOG_ERR, f"perseus-ds: the agent continues after an error: {error!r}")
            self._time.sleep(_POLL_S)

    def _follow_marks(self, now_s: float) -> float:
        """Look at the marks of ranks that are due, and return when to look at the next ones [s]."""
        next_s = math.inf
        for rank in self._ranks:
            if rank.clocks is None:
                continue
            if rank.look_at_s <= now_s + _TOGETHER_S:  # waking up takes longer than a look
                rank.look_at_s = now_s + rank.clocks.timeline.advance()
            if rank.is_update_due:
                rank.is_update_due = False
                rank.clocks.update()
            next_s = min(next_s, rank.look_at_s)
        return next_s

    def _is_needed(self) -> bool:
        now_s = self._time.now_s()
        if any(rank.is_finding or rank.memory_file is not None for rank in self._ranks):
            return True
        if any(not actor.is_reset and not actor.has_given_up for actor in self._actors.values()):
            return True
        return not self._has_served and now_s < self._began_s + _FIRST_RANK_TIMEOUT_S

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._ranks.append(Rank(connection, pid))
        self._selector.register(connection, selectors.EVENT_READ, partial(self._receive, self._ranks[-1]))

    def _receive(self, rank: Rank) -> None:
        if rank not in self._ranks:  # just removed
            return
        files: list[int] = []
        try:
            packet, files, _, _ = socket.recv_fds(rank.connection, messages.LONGEST, _MOST_FILES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        try:
            if packet == messages.WAKE:
                rank.look_at_s = self._time.now_s()
                return
            if packet:
                self._handle(rank, messages.decode_to_agent(packet), files)
                return
            self._update_at_s = 0.0
            rank.is_connected, rank.disconnected_s = False, self._time.now_s()
            self._selector.unregister(rank.connection)
        except Exception as error:  # other ranks need this agent
            rank.send(messages.Refused("memory", f"The agent cannot decode a message: {error}."))
        finally:
            for file in files:
                os.close(file)

    def _receive_signals(self, rank: Rank, file: int) -> None:
        """Read the numbers of the signals that a rank has received."""
        if rank not in self._ranks:  # just removed
            return
        numbers = os.read(file, _MOST_SIGNALS)
        self._update_at_s = 0.0
        if not numbers:  # the process has ended, or has closed its end of the pipe
            self._selector.unregister(file)
        elif any(number in _TERMINATION for number in numbers):
            self._terminate(rank)

    def _handle(self, rank: Rank, message: messages.ToAgent, files: list[int]) -> None:
        if isinstance(message, messages.ToClocks):
            if rank.clocks is not None:
                rank.clocks.receive_from_client(message)
            return
        self._update_at_s = 0.0  # the message may affect all ranks
        if isinstance(message, messages.Release):
            rank.is_released = True
        elif isinstance(message, messages.RequestStatus):
            leases = [(each.actor, each.pid) for each in self._ranks if each.clocks is not None]
            rank.send(messages.Status(tuple((actor.record.gpu, pid) for actor, pid in leases if actor is not None)))
        elif isinstance(message, messages.FindGpu):
            rank.is_finding = True
            # A driver may hang, and other ranks need this thread.
            threading.Thread(target=self._find, args=(rank, message), name="perseus-find", daemon=True).start()
        elif isinstance(message, messages.Connect):
            self._follow_server(rank, message)
        elif isinstance(message, messages.StartServer):
            self._start_server(rank, message, files)
        elif isinstance(message, messages.RequestLease) and rank.actor is None and len(files) > 1:
            self._register(rank, message, files)

    def _register(self, rank: Rank, message: messages.RequestLease, files: list[int]) -> None:
        """Accept a request for a lease, which is granted after the GPU was opened."""
        try:
            if not message.gpu.isprintable() or "/" in message.gpu:
                raise GpuError(f"{message.gpu!r} is not the address of a GPU.")
            rank.memory_file, rank.signals = files.pop(0), files.pop(0)
            rank.memory = RankMemory(_mapped(rank.memory_file, layout.LENGTH))
            rank.is_finding = False
            self._forget_former(rank)
            if message.gpu not in self._actors:
                is_simulated = message.gpu.startswith("simulated:")
                record = UnrecordedGpu(message.gpu) if is_simulated else GpuRecord(message.gpu, self._name)
                self._open(record, [_mapped(file, 0) for file in files])
        except GpuHeldError as error:
            self._refuse(rank, "held", str(error))
        except GpuError as error:
            self._refuse(rank, "memory", str(error))
        except (OSError, RuntimeError) as error:
            self._refuse(rank, "unusable", f"Locked clocks cannot be recorded: {error}.")
        else:
            rank.request, rank.actor = message, self._actors[message.gpu]
            if message.is_renewal:  # its clock may be locked
                rank.actor.reset()
            self._has_served = True

    def _follow_server(self, rank: Rank, server: messages.Connect) -> None:
        rank.uplink = next((uplink for uplink in self._uplinks if uplink.is_to(server)), None)
        if rank.uplink is None:
            rank.uplink = Uplink(server, self._time)
            self._uplinks.append(rank.uplink)
            self._selector.register(rank.uplink.file, selectors.EVENT_READ, self._exchange_soon)
        if self._server is not None:
            self._server.is_followed = True
        rank.number = server.rank
        memory = rank.memory
        assert memory is not None
        rank.uplink.join(rank.number, lambda: memory.iteration)

    def _start_server(self, rank: Rank, request: messages.StartServer, files: list[int]) -> None:
        """Start the server of the job, or watch the one that an earlier agent of this node has started."""
        if self._server is not None:
            if request.running is not None:
                return  # this agent has started it
            if self._server.file is not None:
                self._selector.unregister(self._server.file)
            self._server.end()
        try:
            description = bytes(_mapped(files[0], request.length)[: request.length])
            self._server = JobServerChild(request, description, self._time)
        except (OSError, GpuError) as error:
            self._server = None
            rank.send(messages.ServerStarted(kind="PerseusError", error=f"the job's server cannot be started: {error}"))
            return
        if self._server.file is not None:
            self._server_waits.append(rank)
            self._selector.register(self._server.file, selectors.EVENT_READ, self._update_leases_soon)

    def _exchange_soon(self) -> None:
        self._exchange_at_s = 0.0

    def _exchange_messages(self) -> None:
        """Process messages from servers, and return to default clocks if there are none."""
        for uplink in self._uplinks:
            ranks = {rank.number: rank for rank in self._ranks if rank.uplink is uplink}
            for number, message in uplink.exchange():
                if number in ranks and (clocks := ranks[number].clocks) is not None:
                    clocks.receive_from_server(message)
            if uplink.has_become_silent():
                for rank in ranks.values():
                    if rank.clocks is not None:
                        rank.clocks.forget_server()

    def _check_server(self) -> None:
        """Forward the server's answer, and replace a silent server."""
        if (server := self._server) is None:
            return
        file = server.file
        if file is not None and (answer := server.answer()) is not None:
            self._selector.unregister(file)
            for rank in self._server_waits:
                rank.send(answer)
            if answer.kind and not self._server_waits and answer.error != self._server_error:
                self._server_error = answer.error
                said = Say(f"perseus: {answer.error}. Training continues at default clocks.", warns=True)
                for rank in self._ranks:
                    if rank.uplink is not None and rank.number == 0:
                        rank.send(said)
            self._server_waits.clear()
        now_s = self._time.now_s()
        is_heard = any(uplink.heard_s > now_s - 1.0 for uplink in self._uplinks)
        if server.is_silent(is_heard=is_heard) and self._is_needed():
            server.restart()
        if server.start_again():
            assert server.file is not None
            self._selector.register(server.file, selectors.EVENT_READ, self._update_leases_soon)

    def _find(self, rank: Rank, place: messages.FindGpu) -> None:
        try:
            # The number may belong to another GPU here, and the clocks of that one would be changed.
            if place.uuid is None and place.pci_address is None and place.cgroups != places.cgroups():
                raise GpuError(f"GPU {place.ordinal} of a process of other control groups cannot be identified.")
            gpu = self._find_gpu(place)
            address = gpu.address
            gpu.close()
            assert address is not None
            rank.send(messages.Found(address))
        except Exception as error:  # the client waits for an answer
            rank.send(messages.Refused("unusable", str(error)))
            self._has_served, rank.is_finding = True, False

    def _forget_former(self, rank: Rank) -> None:
        """Remove the earlier connection of a process that has connected again after this agent was stopped."""
        for other in [*self._ranks]:
            ours, theirs = rank.memory_file, other.memory_file
            if other is not rank and ours is not None and theirs is not None and os.path.sameopenfile(ours, theirs):
                self._forget(other, has_left=False)

    def _open(self, record: GpuRecord | UnrecordedGpu, logs: Sequence[memoryview] = ()) -> GpuActor:
        def open_gpu() -> Gpu:
            return with_energy(self._open_gpu(record.gpu, logs) if logs else self._open_gpu(record.gpu), self._time)

        actor = GpuActor(record, open_gpu, self._update_leases_soon, self._time)
        self._actors[record.gpu] = actor
        return actor

    def _refuse(self, rank: Rank, reason: messages.Reason, error: str) -> None:
        rank.send(messages.Refused(reason, error))
        rank.on(RankEvent.REFUSED)
        self._forget(rank)

    def _forget(self, rank: Rank, *, has_left: bool = True) -> None:
        if rank.uplink is not None:
            if has_left:
                rank.send_to_server(Left(killed=rank.has_ended and not rank.is_released))
            rank.uplink.leave(rank.number)
            rank.uplink.flush()
            if not any(other.uplink is rank.uplink for other in self._ranks if other is not rank):
                self._selector.unregister(rank.uplink.file)
                self._uplinks.remove(rank.uplink)
                rank.uplink.close()
        self._ranks.remove(rank)
        if rank.is_connected:
            self._selector.unregister(rank.connection)
        if rank.signals is not None and rank.signals in self._selector.get_map():
            self._selector.unregister(rank.signals)
        rank.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_writer.send(b"x")

    def _update_leases_soon(self) -> None:
        self._update_at_s = 0.0
        self._wake()

    def _update_soon(self, rank: Rank) -> None:
        rank.is_update_due = True
        self._wake()

    def _terminate(self, rank: Rank) -> None:
        """Reset a GPU before its rank ends."""
        if rank.on(RankEvent.TERMINATED):
            assert rank.clocks is not None
            assert rank.actor is not None
            rank.clocks.revoke()
            rank.actor.reset()

    def _update_leases(self) -> None:
        """Grant leases of opened GPUs, and reset GPUs with ended leases."""
        if self.terminates:
            self.terminates = False
            for rank in self._ranks:
                self._terminate(rank)
        now_s = self._time.now_s()
        is_ending = any(rank.is_ending(now_s) for rank in self._ranks)
        self._update_at_s = now_s + (_ENDING_POLL_S if is_ending else _POLL_S)
        for rank in [*self._ranks]:
            if rank.memory is not None:
                rank.memory.heartbeat_s = now_s
                rank.is_update_due = True
                rank.flush()
                self._watch_clock(rank, rank.memory, now_s)
            if rank.has_ended:
                self._end(rank, now_s)
            elif rank.request is not None and rank.state is State.JOINED:
                self._grant(rank, rank.request, now_s)
        if now_s >= self._restore_at_s:
            self._restore_at_s = now_s + _RESTORED_EVERY_S
            for actor in self._actors.values():
                with contextlib.suppress(OSError):  # no memory for its file, or no folder: try again
                    actor.record.restore()
        for gpu, actor in [*self._actors.items()]:
            self._let_go(gpu, actor)

    def _watch_clock(self, rank: Rank, memory: RankMemory, now_s: float) -> None:
        """Show whether the GPU of a rank is slowed on purpose, and reset it if the rank does not train."""
        if (actor := rank.actor) is None:
            return
        may_be_locked = actor.may_be_locked
        if (slowed := actor.record.slowed) is not None:
            slowed.update(now_s, is_locked=may_be_locked)
        is_still = rank.progress.is_standing_still(memory, now_s, may_be_locked=may_be_locked)
        if rank.state is State.STANDING_STILL:
            if memory.progress != rank.stalled_at or (may_be_locked and actor.is_reset):
                rank.on(RankEvent.CONTINUED)
        elif is_still and not self._others(rank) and rank.on(RankEvent.STALLED):
            rank.stalled_at = memory.progress
            actor.reset()

    def _grant(self, rank: Rank, request: messages.RequestLease, now_s: float) -> None:
        """Grant a lease if the GPU is open, described and reset."""
        actor, memory = rank.actor, rank.memory
        assert actor is not None
        assert memory is not None
        if actor.gpu is None and actor.error is not None:
            self._refuse(rank, "unusable", str(actor.error))
            return
        if request.describes and not actor.is_described(request.checks_permission):
            actor.describe(request.checks_permission)
            return
        if request.describes and actor.description is None:
            self._refuse(rank, "unusable", str(actor.description_error))
            return
        are_reset = all(left.is_reset for _, left in self._left_locked.values())
        is_clear = are_reset or now_s > self._began_s + _LEFT_TIMEOUT_S
        if actor.gpu is None or not actor.is_reset or not is_clear:
            return
        actor.record.set_locked(True)
        rank.on(RankEvent.GRANTED)
        assert rank.signals is not None
        receive_signals = partial(self._receive_signals, rank, rank.signals)
        self._selector.register(rank.signals, selectors.EVENT_READ, receive_signals)
        on_record = partial(self._update_soon, rank)
        rank.clocks = RankClocks(actor, memory, rank.send, rank.send_to_server, self._time, on_record=on_record)
        left = [messages.LeftLocked(gpu, pid, each.left_problem) for gpu, (pid, each) in self._left_locked.items()]
        self._left_locked = {}
        actor.record.left_by = None
        rank.send(messages.Granted(tuple(left), actor.description if request.describes else None))

    def _others(self, rank: Rank) -> list[Rank]:
        """Return the other ranks that use the same GPU."""
        return [each for each in self._ranks if each is not rank and each.actor is rank.actor]

    def _end(self, rank: Rank, now_s: float) -> None:
        """End a lease, and reset the GPU unless another rank uses it."""
        if rank.ended_s is None:
            rank.ended_s = now_s
        actor, clocks = rank.actor, rank.clocks
        is_shared = any(other.sets_clocks for other in self._others(rank))
        if actor is not None and clocks is not None:
            if rank.is_released and clocks.has_reports and now_s < rank.ended_s + _LAST_REPORTS_WITHIN_S:
                return
            rank.clocks = None
            clocks.leave()  # before a reset, so that it does not request a clock again
            if actor.may_be_locked or not is_shared:
                actor.reset()  # the other ranks request their clocks again
        rank.on(RankEvent.ENDED)
        is_waiting = rank.is_released and rank.is_connected
        if actor is None or actor.is_reset or is_shared or not is_waiting:
            rank.on(RankEvent.RESET)
            rank.send(messages.Released())
            self._forget(rank)

    def _let_go(self, gpu: str, actor: GpuActor) -> None:
        """Release a GPU that no rank uses after its reset."""
        is_used = any(rank.actor is actor for rank in self._ranks)
        if not is_used and actor.is_reset and (actor.gpu is not None or actor.error is not None):
            if not actor.left_error:
                actor.record.set_locked(False)
            actor.close()
            actor.record.close()
            del self._actors[gpu]


def main() -> None:
    """Become the agent of a job, unless another process is the agent already."""
    (name,) = sys.argv[1:]
    # Not a new session: Linux schedules each session as one process (autogroups, sched(7)), and on a busy node an agent
    # in its own session waited for seconds.
    os.setpgid(0, 0)
    if os.fork():
        return  # The agent is the orphaned child, outside the job's process tree.
    # A launcher may have pinned the rank to some cores, or lowered its priority.
    for function, *arguments in (
        (os.sched_setaffinity, 0, range(os.cpu_count() or 1)),
        (os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)),
        (os.setpriority, os.PRIO_PROCESS, 0, 0),
    ):
        with contextlib.suppress(OSError):  # for example, no permission to raise the priority
            function(*arguments)
    # A program may block or ignore signals for itself; its descendants inherit both.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    with contextlib.suppress(OSError):  # another rank has already started it
        places.lock(places.agent_lock_path(name))
        places.forget_dead(name)
        agent = Agent(name)
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(agent, "terminates", True))
        agent.serve()
        places.forget(name)
