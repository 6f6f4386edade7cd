"""Signals to a rank and to the processes that it forks."""

import subprocess
import sys

FIRST_PROCESS = """
import os, signal, socket
from perseus_ds.client.lease import SignalForwarder
os.getpid = lambda: 1
agent, connection = socket.socketpair()
connection.setblocking(False)
forwarder = SignalForwarder()
forwarder.start(connection)
print(callable(signal.getsignal(signal.SIGTERM)), flush=True)
child = os.fork()
if child == 0:
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(callable(signal.getsignal(signal.SIGTERM)))
forwarder.stop()
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


def test_sigterm_ends_what_the_first_process_of_a_container_forks():
    """Otherwise a multiprocessing.Pool would wait for its workers permanently. It needs no handler without an agent."""
    done = subprocess.run([sys.executable, "-c", FIRST_PROCESS], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True"] * 4, done.stderr
