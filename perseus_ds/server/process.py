"""The process of a job's server, which rank 0's agent starts and which ends with the job.

It reads a :class:`ServerRequest` from its standard input, and answers on its standard output once it listens.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import resource
import signal
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from perseus_ds import errors
from perseus_ds.artifacts.run_events import Failed
from perseus_ds.errors import PerseusError
from perseus_ds.policy.commands import AnyCommand
from perseus_ds.protocol import job_messages as msg
from perseus_ds.protocol.job_messages import RankReport, Say, Spans, ToRank, ToServer
from perseus_ds.protocol.messages import ServerStarted
from perseus_ds.server.connections import AgentConnections
from perseus_ds.server.control_socket import CONTROL, ControlServer, RemoteAccess
from perseus_ds.server.job import Job
from perseus_ds.server.metrics import MetricsReporter
from perseus_ds.server.output_folder import FolderLock, StateFile, own_folder
from perseus_ds.server.server import JobServer
from perseus_ds.timebase import REAL_TIME

logger = logging.getLogger("perseus_ds")
_STATE_S, _POLL_S = 1.0, 0.1
_FIRST_AGENT_S, _NO_AGENT_S, _ENDED_S = 300.0, 30.0, 2.0
"""Times without messages from agents after which the server ends: before the first message, during training, and after
the end of the job, such as without the ranks of a lost node, because the next start of the job needs the folder."""
_CATCH_UP_S = 5.0
"""Time in which all received messages must be processed. Otherwise the server discards reports and the job continues at
default clocks. A process that was stopped for longer, and then has many messages to process, is not slow."""
_SWITCH_S = 0.001
"""Time after which the thread that decides lets another thread continue, if that is waiting [s]. The thread of the
connections waits once for each message, so Python's 5 ms would add up to seconds with 10 000 ranks."""
_COLLECTED_AFTER = 1000
"""Number of smaller garbage collections before a complete one (10 by default). A complete one takes 0.3 s with 10 000
ranks, in which no thread continues, and finds little, because there are few cycles."""
_RANK = struct.Struct("=I")
_to_server = msgspec.msgpack.Decoder(ToServer)
_encode = msgspec.msgpack.Encoder().encode


class ServerRequest(msgspec.Struct, frozen=True):
    """Request to start the server of a job."""

    description: bytes  # of the job
    host: str  # name or address by which agents reach rank 0's node
    port: int  # 0 for any
    epoch: int  # number of the server in the job, starting at 0
    server_key: bytes  # public
    server_secret: bytes
    public_key: bytes  # of the agents
    output_dir: str = ""  # folder of the server that it replaces; empty for the first server of a job


class ServerProcess:
    """Transfers messages between agents and the :class:`JobServer`, and saves its state."""

    def __init__(self, request: ServerRequest) -> None:
        """Listen, and check what can be checked before training.

        Raises:
            PerseusError: The job cannot be trained as configured, or the port is not available.
        """
        self._request = request
        self._parts = ExitStack()
        self._lock = threading.RLock()  # commands through the control socket are carried out on its threads
        self._agent_of: dict[int, bytes] = {}
        self._outbox: deque[tuple[int, ToRank]] = deque()
        self._control: ControlServer | None = None
        self._connections = AgentConnections(
            request.host,
            request.port,
            key=request.server_key,
            secret_key=request.server_secret,
            agents_key=request.public_key,
            epoch=request.epoch,
        )
        self._parts.callback(self._connections.close)
        warnings = _ToRank0(self._send)
        logger.addHandler(warnings)
        self._parts.callback(logger.removeHandler, warnings)
        description = msg.decode_description(request.description)
        os.chdir(description.folder)
        job = Job.of(description)
        folder = FolderLock()
        self._parts.callback(folder.release)
        output_dir, warning = own_folder(job, folder, request.output_dir)
        self._state = StateFile(Path(output_dir))
        self._parts.callback(self._state.close)
        state, problem = self._state.read()
        self.server = JobServer(job.in_folder(output_dir), self._send, state=state, epoch=request.epoch)
        for text in filter(None, (warning, problem)):
            self.server.recorder.warn(text)
        self._state_at_s = 0.0
        self._received_s = REAL_TIME.now_s()  # time of the last message
        self._catches_up_until_s = math.inf  # finite while received messages wait
        self._has_received = self._is_behind = False

    @property
    def address(self) -> str:
        """Address at which agents reach it."""
        return self._connections.address

    def serve(self) -> None:
        """Serve until the job ends, or no agent is left."""
        self.server.start()
        self._supervise()
        while not self.server.is_over and self._is_needed():
            self._connections.wait(_POLL_S)
            with self._lock:
                self._receive()
                with self._surviving_errors():
                    self.server.tick()
                    self._save()
                self._flush()
        self._save_last()
        self.server.recorder.flush()
        self.close()

    def close(self) -> None:
        """Stop listening and release the output folder."""
        self._parts.close()

    def _kept(self) -> dict[str, Any]:
        return {"epoch": self._request.epoch, **self.server.state()}

    def _supervise(self) -> None:
        """Open the control socket and start to report metrics."""
        server = self.server
        config = server.job.config

        if config.mode in ("auto", "run"):
            try:
                keys = (self._request.server_key, *self._connections.control_keys)
                remote = RemoteAccess(self.address, *(key.decode() for key in keys))
                self._control = ControlServer(server.job.output_dir, self._carry_out, remote)
                self._parts.callback(self._control.close)
            except OSError as error:
                failed = Failed(event="control", error=str(error))
                server.recorder.fail(failed, f"`perseus-ds control` will not reach this job: {error}")
        if config.metrics is not None:

            def no_metrics(problem: str) -> None:
                failed = Failed(event="metrics", error=problem)
                server.recorder.fail(failed, f"metrics: {problem}. Training continues without them")

            self._parts.callback(MetricsReporter(config.metrics, server.recorder.facts, no_metrics).close)

    def _carry_out(self, command: AnyCommand) -> dict[str, Any]:
        with self._lock:
            return self.server.control.carry_out(command)

    def _is_needed(self) -> bool:
        silent_s = REAL_TIME.now_s() - self._received_s
        if self.server.has_ended:
            return silent_s < _ENDED_S
        return silent_s < (_NO_AGENT_S if self._has_received else _FIRST_AGENT_S)

    def _receive(self) -> None:
        """Process the received messages for a short time, so that other work is done in between."""
        end_s = REAL_TIME.now_s() + _POLL_S
        while (now_s := REAL_TIME.now_s()) < end_s:
            try:
                agent, frames = self._connections.received.popleft()
            except IndexError:
                self._catches_up_until_s, self._is_behind = math.inf, False
                return
            if len(frames) == 2 and frames[0] == CONTROL:
                if self._control is not None:
                    self._connections.put(agent, CONTROL, json.dumps(self._control.answer(frames[1])).encode())
                continue
            self._received_s, self._has_received = now_s, True
            if len(frames) != 2 or len(frames[0]) != _RANK.size:
                continue
            rank = _RANK.unpack(frames[0])[0]
            try:
                message = _to_server.decode(frames[1])
            except msgspec.DecodeError as error:
                logger.warning("perseus: a message of rank %d is none: %s", rank, error)
                continue
            if self._is_behind and isinstance(message, RankReport | Spans):
                continue
            before, self._agent_of[rank] = self._agent_of.get(rank, agent), agent
            with self._surviving_errors():
                self.server.receive(rank, message)
                if agent != before:  # messages to the rank may be lost
                    self.server.resend(rank)
        self._catches_up_until_s = min(self._catches_up_until_s, now_s + _CATCH_UP_S)
        if now_s > self._catches_up_until_s and not self._is_behind:
            self._is_behind = True
            with self._surviving_errors():
                self.server.fall_behind()

    @contextlib.contextmanager
    def _surviving_errors(self) -> Iterator[None]:
        """An error within this context ends only the job's mode, which begins again later."""
        try:
            yield
        except Exception as error:
            self.server.has_failed(error)

    def _save(self) -> None:
        now_s = REAL_TIME.now_s()
        if now_s >= self._state_at_s:
            self._state_at_s = now_s + _STATE_S
            self._state.save(self._kept())

    def _save_last(self) -> None:
        """Save the state at the end of the job. An error must not keep records from being written."""
        try:
            with self._lock:
                kept = self._kept()
            self._state.save_last(kept)
        except Exception as error:
            self.server.recorder.warn(f"the last state of this job cannot be saved ({error!r})")

    def _send(self, rank: int, message: ToRank) -> None:
        self._outbox.append((rank, message))  # called from any thread

    def _flush(self) -> None:
        for _ in range(len(self._outbox)):
            rank, message = self._outbox.popleft()
            if rank in self._agent_of:
                self._connections.put(self._agent_of[rank], _RANK.pack(rank), _encode(message))
            elif isinstance(message, Say):
                self._outbox.append((rank, message))  # kept until the rank is known


class _ToRank0(logging.Handler):
    """Sends the warnings of this process to rank 0, which logs them."""

    def __init__(self, send: Callable[[int, ToRank], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(0, Say(record.getMessage(), warns=True))
        except Exception:  # the message and its arguments do not fit
            self.handleError(record)


def main() -> None:
    """Run the server of a job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(*gc.get_threshold()[:2], _COLLECTED_AFTER)
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # each agent has a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    answer = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ServerRequest)
    try:
        process = ServerProcess(request)
        welcome = msg.encode(process.server.welcome())
        started = ServerStarted(process.address, answer=welcome, output_dir=process.server.job.config.output_dir)
    except PerseusError as error:
        kind = type(error).__name__ if hasattr(errors, type(error).__name__) else "ConfigError"
        started = ServerStarted(kind=kind, error=str(error))
    except Exception as error:
        started = ServerStarted(kind="PerseusError", error=f"the server cannot start: {error!r}")
    answer.write(_encode(started))
    answer.close()
    if started.kind:
        os._exit(1)  # threads of a server that has failed must not keep the process alive
    process.serve()
    os._exit(0 if process.server.has_ended else 1)  # a server without agents may be needed again
