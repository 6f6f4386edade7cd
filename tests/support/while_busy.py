"""Runs a command three times in a row while two other processes keep two cores busy; fails if one run fails.

python tests/support/while_busy.py make test
"""

import multiprocessing
import subprocess
import sys
import time

RUNS, BUSY = 3, 2


def spin() -> None:
    while True:
        pass


def main() -> int:
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(BUSY)]
    for process in processes:
        process.start()
    returncodes = []
    for number in range(1, RUNS + 1):
        began_s = time.monotonic()
        returncodes.append(subprocess.run(sys.argv[1:], check=False).returncode)
        outcome = "passed" if returncodes[-1] == 0 else f"failed with exit code {returncodes[-1]}"
        print(
            f"run {number} of {RUNS} beside {BUSY} busy processes: {outcome} after {time.monotonic() - began_s:.0f} s"
        )
    for process in processes:
        process.terminate()
    return int(any(returncodes))


if __name__ == "__main__":
    sys.exit(main())
