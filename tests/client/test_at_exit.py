"""Functions that are called when a process ends."""

import subprocess
import sys

import pytest
from run_log import JOB_GIVE_UP_S

ENDS = """
import multiprocessing, os, sys
from perseus_ds.client.at_exit import AtExit

def main():
    AtExit(lambda: print("first", flush=True))
    AtExit(lambda: print("cancelled", flush=True)).cancel()
    AtExit(lambda: print("last", flush=True))
    if os.fork() == 0:
        return
    os.wait()
    print("end", flush=True)

if sys.argv[1] == "script":
    main()
else:
    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("process", ["script", "forked"])
def test_functions_are_called_once_in_reverse_order_at_the_end_of_their_process_only(process):
    command = [sys.executable, "-c", ENDS, process]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=JOB_GIVE_UP_S)
    assert ended.stdout.split() == ["end", "last", "first"]
