"""Real ranks on the real pynvml and a stub driver: however a job ends, no clock stays locked."""

import time

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
    deadline = time.monotonic() + 3.0
    while any(stub.locked_clocks_mhz()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stub.locked_clocks_mhz() == [0, 0]
    for gpu in stub.gpus:
        assert any(gpu.changes_mhz()), "no clock was ever locked, so nothing was tested"


def test_training_goes_on_when_the_driver_withdraws_permission(tmp_path, make_stub_nvml):
    stub = make_stub_nvml(2)
    frontier = save_frontier(tmp_path / "frontier", "1f1b", simulated=False)
    block = {"mode": "run", "frontier": frontier, "device": "nvml"}
    process = start(tmp_path / "job", 2, stub.environment, perseus=block, steps=400)
    deadline = time.monotonic() + 90
    while not any(stub.gpus[1].changes_mhz()) and time.monotonic() < deadline:
        time.sleep(0.05)
    stub.gpus[1].fail("set_locked", "no_permission")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    assert output.count("Training goes on at default clocks") == 1
    assert stub.locked_clocks_mhz() == [0, 0]
