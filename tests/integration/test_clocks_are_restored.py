"""Real ranks on the real pynvml and a stub driver: however a job ends, no clock stays locked."""

import time

import psutil
import pytest
from job import run, start
from test_training_is_untouched import save_frontier

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("how", ["end", "exit", "exception", "term", "int", "kill"])
def test_no_clock_stays_locked(tmp_path, make_stub_nvml, how):
    stub = make_stub_nvml(2)
    frontier = save_frontier(tmp_path / "frontier", "1f1b", simulated=False)
    block = {"mode": "run", "frontier": frontier, "device": "nvml"}
    ending = {} if how == "end" else {"end_after": 3, "end_by": how}
    job = {"ranks": 2, "environment": stub.environment, "perseus": block, **ending}
    finished = run(tmp_path / "job", **job)
    assert (finished.returncode == 0) == (how in ("end", "exit")), finished.output[-2000:]
    assert are_restored(stub)
    for gpu in stub.gpus:
        assert any(gpu.changes_mhz()), "no clock was ever locked, so nothing was tested"


def are_restored(stub, within_s=3.0):
    deadline = time.monotonic() + within_s
    while any(stub.locked_clocks_mhz()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(stub.locked_clocks_mhz())


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_no_clock_stays_locked_when_the_launcher_is_killed_with_its_ranks(tmp_path, make_stub_nvml, launcher):
    stub = make_stub_nvml(2)
    frontier = save_frontier(tmp_path / "frontier", "1f1b", simulated=False)
    block = {"mode": "run", "frontier": frontier, "device": "nvml"}
    process = start(tmp_path / "job", 2, stub.environment, launcher=launcher, perseus=block, steps=100_000)
    deadline = time.monotonic() + 90
    while not all(stub.locked_clocks_mhz()) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(tree) >= 3, "a launcher and two ranks"
    for killed in tree:
        killed.kill()
    assert are_restored(stub), stub.locked_clocks_mhz()
    for gpu in stub.gpus:
        assert any(gpu.changes_mhz()), "no clock was ever locked, so nothing was tested"
    process.communicate()
