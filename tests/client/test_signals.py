"""Signals to a rank, to the processes that it forks, and to other parts of its process that receive them."""

import subprocess
import sys

FIRST_PROCESS = """
import multiprocessing, os, signal
from perseus_ds.client.signals import SignalPipe
own = os.getpid
os.getpid = lambda: 1
signals = SignalPipe()
os.getpid = own
print(callable(signal.getsignal(signal.SIGTERM)), flush=True)
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(signal.getsignal, [signal.SIGTERM]) == [signal.SIG_DFL], flush=True)
print(callable(signal.getsignal(signal.SIGTERM)))
signals.close()
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""
FIRST_PROCESS_FORKS = """
import os, signal
from perseus_ds.client.signals import SignalPipe
os.register_at_fork(after_in_child=lambda: signal.raise_signal(signal.SIGTERM))  # called before those of Perseus
own = os.getpid
os.getpid = lambda: 1
signals = SignalPipe()
os.getpid = own
child = os.fork()
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM)
print(signal.pthread_sigmask(signal.SIG_BLOCK, []) == set())
"""
FORKS = """
import os, signal, sys, threading
if sys.argv[1] == "with Perseus":
    from perseus_ds.client.signals import SignalPipe
    signals = SignalPipe()
signal.signal(signal.SIGUSR1, print)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

def fork():
    child = os.fork()
    if child == 0:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        files = [number for number in range(64) if os.path.exists(f"/proc/self/fd/{number}")]
        print(signal.set_wakeup_fd(-1), handlers, signal.pthread_sigmask(signal.SIG_BLOCK, []), files, flush=True)
        os._exit(0)
    os.waitpid(child, 0)

fork()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""
ASYNCIO = """
import asyncio, signal
from perseus_ds.client.signals import SignalPipe

async def train(begins_first):
    signals = SignalPipe() if begins_first else None
    received = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, received.set)
    signals = signals or SignalPipe()
    for ends in (False, True):
        if ends:
            signals.close()
        received.clear()
        signal.raise_signal(signal.SIGUSR1)
        await asyncio.wait_for(received.wait(), 5.0)
        print("received", flush=True)

for begins_first in (False, True):
    asyncio.run(train(begins_first))
"""


def run(code, *arguments):
    # Newer Pythons warn of a fork in a process with several threads, which is what some of these test.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.splitlines()


def test_sigterm_ends_what_the_first_process_of_a_container_forks():
    """Otherwise a multiprocessing.Pool would wait for its workers permanently. It needs no handler without an agent."""
    assert run(FIRST_PROCESS) == ["True"] * 4


def test_sigterm_ends_what_the_first_process_of_a_container_has_just_forked():
    assert run(FIRST_PROCESS_FORKS) == ["True"] * 2


def test_a_forked_process_handles_and_blocks_signals_as_without_perseus():
    plain = run(FORKS, "without Perseus")
    assert len(plain) == 2
    assert run(FORKS, "with Perseus") == plain


def test_asyncio_receives_its_signals_whether_a_lease_begins_before_or_after_and_when_it_ends():
    assert run(ASYNCIO) == ["received"] * 4
