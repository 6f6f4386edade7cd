"""`perseus-ds reset` and `perseus-ds doctor` on the real NVML binding and the stub driver."""

import os
import re
import signal
import socket
import subprocess
import sys

import pynvml
import pytest
from run_log import wait_until

from perseus_ds.cli import machine
from perseus_ds.cli.machine import examine_gpus
from perseus_ds.client.lease import Lease
from perseus_ds.gpu.nvml import NvmlGpu


@pytest.fixture
def node(stub_of_agents):
    """A node with four GPUs, with counters that are refreshed so often that a check takes little time."""
    for gpu in stub_of_agents.gpus:
        gpu.counter_period_s = 0.01
    return stub_of_agents


def lock_all(node):
    for gpu in node.gpus:
        gpu.locked_clock_mhz = 900


@pytest.mark.parametrize(
    ("chosen", "left"),
    [([], [0, 0, 0, 0]), (["--gpus", "1", "GPU-1b6"], [900, 0, 900, 900])],
)
def test_reset_restores_the_chosen_gpus_or_all(run, node, chosen, left):
    lock_all(node)
    code, out, _ = run("reset", *chosen)
    assert code == 0
    assert node.locked_clocks_mhz() == left
    assert "clock reset to the driver's default; 1410 MHz now." in out


@pytest.mark.parametrize(
    ("options", "code", "left"),
    [
        ([], 0, [0, 0, 0, 900]),
        (["--gpus", "2", "3"], 2, [900, 900, 0, 900]),
        (["--force"], 0, [0, 0, 0, 0]),
        (["--gpus", "3", "--force"], 0, [900, 900, 900, 0]),
    ],
)
def test_reset_leaves_a_leased_gpu_alone_unless_forced(run, node, options, code, left):
    lease = Lease(NvmlGpu(3).address, "a job")
    lock_all(node)
    found, out, err = run("reset", *options)
    assert (found, node.locked_clocks_mhz()) == (code, left)
    message = f"NOT reset, because a running job leases it (process {os.getpid()})"
    assert (message in out) == (not options)
    assert (message in err) == (code == 2)
    assert lease.close(60.0)


def test_reset_continues_after_a_gpu_that_refuses(run, node):
    lock_all(node)
    node.gpus[1].fail("reset_locked", "no_permission")
    code, _, err = run("reset")
    assert (code, node.locked_clocks_mhz()) == (2, [0, 900, 0, 0])
    assert "GPU 1: NOT reset." in err
    assert "CAP_SYS_ADMIN" in err


def test_reset_of_a_gpu_that_cannot_be_found_resets_none(run, node):
    lock_all(node)
    for gpu, message in (("9", "there is no GPU 9 on this node, which has 4"), ("GPU-dead", "matches 0 of the GPUs")):
        code, _, err = run("reset", "--gpus", "0", gpu)
        assert (code, node.locked_clocks_mhz()) == (2, [900] * 4)
        assert message in err


def lines_of(page):
    """Return level and text of each line of the page, by subject."""
    found = re.findall(r"^(ok|info|warn|fail)\s+(.{13}) (.*)", page, re.MULTILINE)
    return {what.strip(): (level, text) for level, what, text in found}


def test_doctor_finds_every_gpu_in_order_and_changes_no_clock(run, node):
    _, page, _ = run("doctor")
    assert [line.split()[1:3] for line in page.splitlines() if "A100" in line] == [["GPU", str(n)] for n in range(4)]
    assert page.count("ok    clocks        81 from 210 to 1410 MHz, now 1410 MHz") == 4
    assert page.count("ok    power         250 W now, nothing limits the clock") == 4
    assert all(gpu.change_count == 0 for gpu in node.gpus)


@pytest.fixture
def gpu(node):
    """The last GPU, while the others do not respond and so take no time."""
    for other in node.gpus[:3]:
        other.fail("name", "gpu_is_lost")
    return node.gpus[3]


def findings_of(stub_time, *, lock=False):
    """Return level and text of each finding on the last GPU."""
    found = examine_gpus(lock=lock, timebase=stub_time)[-1]
    return {finding.what: (finding.level, finding.text) for finding in found}


def test_doctor_measures_how_often_the_counter_is_refreshed(gpu, stub_time):
    gpu.counter_period_s = 0.05
    assert findings_of(stub_time)["energy"] == ("ok", "counter refreshed every 50 ms")
    gpu.counter_period_s = 1e6
    assert findings_of(stub_time)["energy"] == ("warn", "the counter did not change in 1 s")


def test_doctor_finds_whether_the_counter_covers_the_module_or_the_gpu_in_it(node, stub_time):
    for gpu, leaves_module_out in zip(node.gpus[2:], (False, True), strict=True):
        gpu.module_w, gpu.counter_leaves_module_out = 150.0, leaves_module_out
    node.gpus[1].module_w = 2.0  # two readings of the same power
    found = [{one.what: one for one in findings} for findings in examine_gpus(lock=False, timebase=stub_time)]
    assert [gpu["energy"].level for gpu in found] == ["ok", "ok", "warn", "ok"]
    assert "covers the whole module" in found[2]["energy"].text
    assert found[2]["power"].text.startswith("250 W now"), "the power of the GPU only"


def test_doctor_measures_the_lock_on_request_and_resets_it(gpu, node, stub_time):
    gpu.lock_latency_s = 0.015
    gpu.settle_s = 0.04
    level, text = findings_of(stub_time, lock=True)["lock"]
    assert level == "ok"
    assert text.startswith("permitted; the call takes 15.0 ms; in effect: ")
    latencies_ms = [float(ms) for ms in re.findall(r"after (\S+) ms", text)]
    assert latencies_ms == [pytest.approx(55.0, abs=0.6)] * len(latencies_ms)
    assert {"from below", "from above"} <= set(re.findall(r"from \w+", text))
    assert float(re.search(r"--least-dwell-s ([\d.]+)", text)[1]) == pytest.approx(0.110, abs=0.0015)
    assert node.locked_clocks_mhz() == [0, 0, 0, 0]
    assert len(set(gpu.changes_mhz())) > 3


def test_doctor_that_is_interrupted_leaves_no_clock_locked(node):
    for gpu in node.gpus:
        gpu.settle_s = 1e6
    waits = (  # waits for clocks until it is interrupted
        "import signal; from perseus_ds.cli import machine; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a test run in the background ignores it
        "machine._SETTLE_TIMEOUT_S = 1e6; machine.examine_gpus(lock=True)"
    )
    with subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.DEVNULL) as doctor:
        wait_until(lambda: all(node.locked_clocks_mhz()), "locked clocks")
        doctor.send_signal(signal.SIGINT)
        wait_until(lambda: not any(node.locked_clocks_mhz()), "default clocks")
        assert doctor.wait() != 0


def test_doctor_locks_no_clock_of_a_gpu_that_a_job_uses(gpu, stub_time):
    lease = Lease(NvmlGpu(3).address, "a job")
    found = findings_of(stub_time, lock=True)
    assert found["agent"] == ("ok", f"process {lease.agent_pid}; leased by process {os.getpid()}")
    level, text = found["lock"]
    assert level == "info"
    assert f"is used by another job of this user (process {lease.agent_pid})" in text
    assert gpu.change_count == 0
    assert lease.close(60.0)


def test_doctor_finds_a_user_namespace_in_which_root_cannot_set_clocks(gpu, stub_time, monkeypatch):
    assert findings_of(stub_time)["lock"][0] == "ok"
    monkeypatch.setattr(machine, "_ALL_UIDS", ["1000", "0", "1"])  # this process then is in another namespace
    level, text = findings_of(stub_time)["lock"]
    assert level == "fail"
    assert "in a user namespace only" in text


@pytest.mark.parametrize("crashes", ["_clocks", "_agent"])
def test_an_examination_that_crashes_is_a_failure(run, node, monkeypatch, crashes):
    def crash(gpu):
        raise ZeroDivisionError("a fault of doctor")

    monkeypatch.setattr(machine, crashes, crash)
    code, page, _ = run("doctor")
    assert (code, page.count("could not be examined: ZeroDivisionError: a fault of doctor")) == (1, 4)
    assert "This machine is ready.\n" not in page


@pytest.mark.parametrize(
    ("fault", "line", "finding"),
    [
        (("set_locked", "no_permission"), "lock", ("fail", "--cap-add SYS_ADMIN")),
        (("energy", "not_supported"), "energy", ("warn", "no energy counter")),
        (("name", "gpu_is_lost"), "GPU 3", ("fail", "fell off the bus")),
    ],
)
def test_doctor_shows_the_faults_of_a_gpu(gpu, node, stub_time, fault, line, finding):
    gpu.fail(*fault)
    level, text = findings_of(stub_time, lock=True)[line]
    assert (level, finding[1] in text) == (finding[0], True), text
    assert node.locked_clocks_mhz() == [0, 0, 0, 0]


def test_doctor_warns_of_a_throttled_gpu_whose_clock_does_not_follow(gpu, stub_time):
    gpu.throttle_reasons = 0x4
    gpu.limit_clock_mhz = 300
    found = findings_of(stub_time, lock=True)
    assert found["power"] == ("warn", "250 W now, clock limited by sw_power_cap")
    assert found["lock"][0] == "warn"
    assert "did not follow" in found["lock"][1]


def test_doctor_without_a_driver_reports_that_simulated_gpus_can_be_used(run, node):
    node.fail("init", "driver_not_loaded")
    code, page, _ = run("doctor")
    assert code == 0
    assert {level for level, _ in lines_of(page).values()} == {"ok", "info"}, "nothing is wrong for simulated GPUs"
    assert "kernel driver is not loaded" in lines_of(page)["NVML"][1]
    assert page.endswith("\nThis machine is ready for simulated GPUs.\n")
    code, page, _ = run("doctor", "--device", "nvml")
    assert (code, lines_of(page)["NVML"][0]) == (1, "fail")
    assert page.endswith("\nThis machine is ready for simulated GPUs; for real ones solve: NVML.\n")
    code, page, _ = run("doctor", "--device", "simulated")
    assert code == 0
    assert "NVML" not in page
    assert page.endswith("\nThis machine is ready for simulated GPUs.\n")


def test_doctor_finds_the_programs_with_which_deepspeed_compiles(run, monkeypatch, tmp_path):
    (tmp_path / "ninja").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "clang++-99 -pipe")
    code, page, _ = run("doctor", "--device", "simulated")
    assert code == 1
    assert f"ok    compiler      {tmp_path / 'ninja'}\n" in page
    assert "fail  compiler      DeepSpeed compiles extensions with clang++-99, which is not in PATH" in page
    assert "-> Install a C++ compiler (apt-get install g++), or set CXX to its path." in page
    assert page.endswith("To solve: compiler.\n")


def test_doctor_says_that_the_first_job_compiles_silently(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    compiled = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    compiled.mkdir(parents=True)
    assert "the first job compiles some" in lines_of(run("doctor", "--device", "simulated")[1])["extensions"][1]
    (compiled / "deepspeed_shm_comm.so").touch()
    assert "extensions" not in lines_of(run("doctor", "--device", "simulated")[1])


def test_doctor_for_zeusd_needs_zeusd_but_not_the_permission_to_lock(run, node, monkeypatch, tmp_path):
    for gpu in node.gpus:
        gpu.fail("set_locked", "no_permission")
    path = tmp_path / "zeusd.sock"
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(path))
    for device, to_solve in (("zeus", "zeusd"), ("nvml", "lock")):
        code, page, _ = run("doctor", "--device", device, "--lock")
        assert code == 1
        assert page.endswith(f"for real ones solve: {to_solve}.\n")
        level = "fail" if device == "zeus" else "info"
        assert lines_of(page)["zeusd"] == (level, f"{path}: No such file or directory")
    node.fail("init", "driver_not_loaded")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert "responds" in lines_of(run("doctor")[1])["zeusd"][1]


def test_doctor_finds_settings_of_an_administrator(node, stub_time):
    smoothed, clocked, limited, unknown = node.gpus
    smoothed.power_profiles[0], smoothed.power_profiles[7] = 1 << 1 | 1 << 7, 1 << 30
    smoothed.set_field(pynvml.NVML_FI_PWR_SMOOTHING_ENABLED, 1)
    smoothed.set_field(pynvml.NVML_FI_PWR_SMOOTHING_APPLIED_TMP_FLOOR, 120)
    smoothed.set_field(pynvml.NVML_FI_PWR_SMOOTHING_ADMIN_OVERRIDE_RAMP_UP_RATE, 0xFFFFFFFF)  # not set
    smoothed.set_field(pynvml.NVML_FI_PWR_SMOOTHING_ADMIN_OVERRIDE_RAMP_DOWN_RATE, 2**63)
    smoothed.application_clock_mhz = 0  # it has none
    clocked.application_clock_mhz = 1200
    clocked.power_limit_w = 300.0
    limited.application_clock_mhz = limited.default_application_clock_mhz = 1095  # it exceeds its default
    limited.enforced_power_limit_w = 250.0  # from outside the node
    for name in ("application_clock", "power_limit", "power_profiles"):
        unknown.fail(name, "not_supported")
    found = [
        [(f.level, f"{f.text}. {f.remedy}") for f in findings if f.what == "default"]
        for findings in examine_gpus(lock=False, timebase=stub_time)
    ]
    expected = [
        [("its power profile is MAX_Q, LLM_TRAINING, number 254: ", "nvidia-smi power-profiles --help"),
         ("power smoothing is on (applied_tmp_floor 120): ", "nvidia-smi power-smoothing --help")],
        [("its application clock is 1200 MHz of 1410: ", "nvidia-smi -i 1 -rac"),
         ("its power limit is 300 W of 400 W", "nvidia-smi -i 1 -pl 400")],
        [("its power limit is 250 W of 400 W", "nvidia-smi -i 2 -pl 400")],
        [],
    ]  # fmt: skip
    assert list(map(len, found)) == list(map(len, expected))
    for gpu, wanted in zip(found, expected, strict=True):
        for (level, text), (setting, remedy) in zip(gpu, wanted, strict=True):
            assert level == "warn"
            assert text.startswith(setting)
            assert remedy in text
