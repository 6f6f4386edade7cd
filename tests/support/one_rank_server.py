"""A stand-in for the server of a job, which makes the agent of one rank follow programs."""

from __future__ import annotations

import struct
import threading
from types import TracebackType

import msgspec
import zmq
from run_log import wait_until

from perseus_ds.client.clocks import AgentClocks
from perseus_ds.protocol.job_messages import Follow, Joined, Program, RankFailed, RankReport, ToServer
from perseus_ds.protocol.messages import Connect

_POLL_S = 0.01


def follow_of(program: Program, serial: int) -> Follow:
    """Return a message that makes an agent follow a program from the next iteration on."""
    return Follow(program, serial, from_iteration=0, shown_from=0, phase="run")


class OneRankServer:
    """Listens on this machine and sends heartbeats until its context ends.

    Attributes:
        failures: Failures reported by the agent.
        reports: Reports of iterations, by their numbers.
    """

    def __init__(self) -> None:
        self.failures: list[RankFailed] = []
        self.reports: dict[int, RankReport] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        server_key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.connect = Connect(0, f"tcp://127.0.0.1:{port}", server_key, *zmq.curve_keypair())
        self._sent: list[Follow] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="one-rank-server", daemon=True)

    def __enter__(self) -> OneRankServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close(0)

    def send(self, program: Program) -> None:
        """Send a program without waiting."""
        self._sent.append(follow_of(program, len(self._sent) + 1))

    def follow(self, clocks: AgentClocks, program: Program) -> Program:
        """Make the agent of a connected rank follow a program, wait for that, and return the program."""
        self.send(program)

        def has_come() -> bool:
            return any(isinstance(each, Follow) and each.serial == len(self._sent) for each in clocks.received())

        wait_until(has_come, "the agent follows the server")
        return program

    def _serve(self) -> None:
        encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ToServer).decode
        sent_to: dict[bytes, int] = {}
        while not self._ends.is_set():
            while self._socket.poll(1000 * _POLL_S):
                agent, *frames = self._socket.recv_multipart()
                sent_to.setdefault(agent, 0)
                message = decode(frames[1]) if len(frames) == 2 else None
                if isinstance(message, Joined):  # again if this server was silent
                    sent_to[agent] = 0
                elif isinstance(message, RankFailed):
                    self.failures.append(message)
                elif isinstance(message, RankReport):
                    self.reports[message.report.iteration] = message
            for agent, sent in sent_to.items():
                self._socket.send_multipart([agent, b"0"])
                for follow in self._sent[sent:]:
                    self._socket.send_multipart([agent, struct.pack("=I", 0), encode(follow)])
                    sent_to[agent] += 1
