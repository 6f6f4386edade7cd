"""On a stub driver, clocks follow the plan, and none stays locked when a job ends."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from frontiers import save_random_plan
from job import run, run_while, start
from run_log import records, wait_until

from perseus_ds.client.lease import leases

pytestmark = pytest.mark.integration


def block_of(folder):
    return {"mode": "run", "frontier": str(folder / "frontier"), "device": "nvml"}


def end_of(folder):
    """Return the record of the end of a job, or None."""
    return next((record for record in records(folder / "perseus") if record.get("event") == "end"), None)


def assert_was_locked_and_is_restored(stub, output=""):
    wait_until(lambda: not any(stub.locked_clocks_mhz()), "default clocks on all GPUs")
    for gpu in stub.gpus:
        assert any(gpu.changes_mhz()), f"no clock was ever locked, so nothing was tested: {output[-4000:]}"


def test_agents_alone_request_the_clocks_of_the_plan_and_restore_them_at_the_end(tmp_path, make_stub_nvml):
    stub = make_stub_nvml(2)
    plan = save_random_plan(tmp_path / "frontier", simulated=False)
    loads_driver = {}

    def during(_):
        wait_until(lambda: len(leases()) == 2, "the leases of two ranks")
        wait_until(lambda: all(len(gpu.changes_mhz()) > 20 for gpu in stub.gpus), "changes of clocks")
        for agent, ranks in leases().values():
            loads_driver.update(
                (pid, "libnvidia-ml" in Path(f"/proc/{pid}/maps").read_text()) for pid in (agent, *ranks)
            )

    job = {"environment": stub.environment, "perseus": block_of(tmp_path)}
    finished = run_while(during, tmp_path / "job", 2, **job)
    assert finished.returncode == 0
    assert not end_of(tmp_path / "job")["killed"]
    assert sorted(loads_driver.values()) == [False, False, True], "only the agent calls the driver"
    assert_was_locked_and_is_restored(stub)
    for gpu, clocks_mhz in zip(stub.gpus, plan.clocks_mhz, strict=True):
        # 0 is the default clock. After a pause between iterations, the first clock is requested again.
        asked = [clock for clock, _ in itertools.groupby(clock for clock in gpu.changes_mhz() if clock)]
        # A request overtaken by a later one is skipped. The last instruction requests the first one's clock.
        planned = itertools.chain.from_iterable([clocks_mhz] * (len(finished.ranks[0]["losses"]) + 1))
        assert all(clock in planned for clock in asked), "clocks are requested in the planned order"


@pytest.mark.parametrize("how", ["kill", pytest.param("exception", marks=pytest.mark.extended)])
def test_no_clock_stays_locked_however_a_rank_ends(tmp_path, make_stub_nvml, how):
    stub = make_stub_nvml(2)
    save_random_plan(tmp_path / "frontier", simulated=False)
    folder, steps = tmp_path / "job", {"steps": 1_000_000, "end_by": how}
    with ThreadPoolExecutor() as pool:
        job = pool.submit(run, folder, 2, stub.environment, perseus=block_of(tmp_path), **steps)
        wait_until(lambda: job.done() or all(gpu.changes_mhz() for gpu in stub.gpus), "a clock of each GPU")
        (folder / "end").touch()
    finished = job.result()
    assert finished.returncode != 0, finished.output[-2000:]
    assert_was_locked_and_is_restored(stub, finished.output)
    if how == "kill":
        wait_until(lambda: end_of(folder) is not None, "the record of the end")
        assert end_of(folder)["killed"]


@pytest.mark.extended
def test_no_clock_stays_locked_when_the_launcher_is_killed_with_its_ranks(tmp_path, make_stub_nvml):
    stub = make_stub_nvml(2)
    save_random_plan(tmp_path / "frontier", simulated=False)
    process = start(
        tmp_path / "job", 2, stub.environment, launcher="deepspeed", perseus=block_of(tmp_path), steps=1_000_000
    )
    wait_until(lambda: all(stub.locked_clocks_mhz()) or process.poll() is not None, "locked clocks on all GPUs")
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(tree) >= 3, "a launcher and two ranks"
    for killed in tree:
        killed.kill()
    assert_was_locked_and_is_restored(stub)
    process.communicate()
