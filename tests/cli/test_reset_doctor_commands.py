"""`perseus-ds reset` and `perseus-ds doctor` on the real NVML binding and the stub driver."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pynvml
import pytest
from stub_nvml.controller import StubNvml
from stub_nvml.fixtures import StubTime

from perseus_ds.cli.diagnostics import examine_gpus
from perseus_ds.cli.main import main

Output = pytest.CaptureFixture[str]


def lines_of(output: Output) -> dict[str, tuple[str, str]]:
    """Return level and text of each line of the page."""
    found = {}
    for line in output.readouterr().out.splitlines():
        level, _, rest = line.partition("  ")
        if level.strip() in ("ok", "info", "warn", "fail"):
            found[rest[:13].strip()] = (level.strip(), rest[13:].strip())
    return found


def test_reset_restores_every_gpu(stub_nvml_here: StubNvml, capsys: Output) -> None:
    for gpu in stub_nvml_here.gpus:
        gpu.locked_clock_mhz = 900
    assert main(["reset"]) == 0
    assert stub_nvml_here.locked_clocks_mhz() == [0, 0, 0, 0]
    assert capsys.readouterr().out.count("clock reset to the driver's default; 1410 MHz now.") == 4


@pytest.mark.parametrize("chosen", ["gpus=[1,3]", "gpus=[GPU-1b6,3]"])
def test_reset_touches_only_the_chosen_gpus(stub_nvml_here: StubNvml, chosen: str) -> None:
    for gpu in stub_nvml_here.gpus:
        gpu.locked_clock_mhz = 900
    assert main(["reset", chosen]) == 0
    assert stub_nvml_here.locked_clocks_mhz() == [900, 0, 900, 0]


def test_reset_goes_on_after_a_gpu_that_refuses(stub_nvml_here: StubNvml, capsys: Output) -> None:
    for gpu in stub_nvml_here.gpus:
        gpu.locked_clock_mhz = 900
    stub_nvml_here.gpus[1].fail("reset_locked", "no_permission")
    assert main(["reset"]) == 2
    assert stub_nvml_here.locked_clocks_mhz() == [0, 900, 0, 0]
    assert "GPU 1: NOT reset." in (complaint := capsys.readouterr().err)
    assert "CAP_SYS_ADMIN" in complaint


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("gpus=9", 2, "there is no GPU 9 on this node, which has 4"),
        ("gpus=GPU-dead", 2, "fits 0 of the GPUs"),
        ("gpus=[]", 2, "at least one GPU"),
        ("gpus=1.5", 2, "gpus"),
        ("gpu=1", 2, "no such argument"),
    ],
)
def test_reset_says_which_gpu_it_cannot_find(
    stub_nvml_here: StubNvml, capsys: Output, argument: str, code: int, message: str
) -> None:
    assert main(["reset", argument]) == code
    assert message in capsys.readouterr().err


def test_doctor_finds_every_gpu_in_order_and_changes_no_clock(stub_nvml_here: StubNvml, capsys: Output) -> None:
    main(["doctor"])
    page = capsys.readouterr().out
    assert [line.split()[1:3] for line in page.splitlines() if "A100" in line] == [["GPU", str(n)] for n in range(4)]
    assert page.count("ok    clocks        81 from 210 to 1410 MHz, now 1410 MHz") == 4
    assert page.count("ok    power         250 W now, nothing holds the clock down") == 4
    assert all(gpu.change_count == 0 for gpu in stub_nvml_here.gpus)


def findings_of(stub_time: StubTime, *, lock: bool = False) -> dict[str, tuple[str, str]]:
    """Return level and text of each finding on the last GPU."""
    found = examine_gpus(lock=lock, timebase=stub_time)[-1]
    return {finding.what: (finding.level, finding.text) for finding in found}


@pytest.mark.parametrize(
    ("period_s", "finding"),
    [(0.05, ("ok", "counter refreshed every 50 ms")), (1e6, ("warn", "the counter did not change in 1 s"))],
)
def test_doctor_measures_how_often_the_counter_is_refreshed(
    stub_nvml_here: StubNvml, stub_time: StubTime, period_s: float, finding: tuple[str, str]
) -> None:
    stub_nvml_here.gpus[3].counter_period_s = period_s
    assert findings_of(stub_time)["energy"] == finding


def test_doctor_asks_whether_the_counter_covers_the_module_or_the_gpu_in_it(
    stub_nvml_here: StubNvml, stub_time: StubTime
) -> None:
    for gpu, leaves_module_out in zip(stub_nvml_here.gpus[2:], (False, True), strict=True):
        gpu.module_w, gpu.counter_leaves_module_out = 150.0, leaves_module_out
    found = [{one.what: one for one in findings} for findings in examine_gpus(lock=False, timebase=stub_time)]
    assert [gpu["energy"].level for gpu in found] == ["ok", "ok", "warn", "ok"]
    assert "covers the whole module" in found[2]["energy"].text
    assert ["energy of the whole module" in gpu["settings"].text for gpu in found] == [False, False, True, False]
    assert found[2]["power"].text.startswith("250 W now"), "that of the GPU alone"


def test_doctor_measures_the_lock_when_asked_and_resets(stub_nvml_here: StubNvml, stub_time: StubTime) -> None:
    for gpu in stub_nvml_here.gpus[:3]:  # of which the calls would move the one time that all of them live in
        gpu.fail("name", "gpu_is_lost")
    gpu = stub_nvml_here.gpus[3]
    gpu.lock_latency_s = 0.015
    gpu.settle_s = 0.04
    level, text = findings_of(stub_time, lock=True)["lock"]
    assert level == "ok"
    assert text.startswith("permitted; the call takes 15.0 ms; in effect: ")
    latencies_ms = [float(ms) for ms in re.findall(r"after (\S+) ms", text)]
    assert latencies_ms == [pytest.approx(55.0, abs=0.6)] * len(latencies_ms)
    assert {"from below", "from above"} <= set(re.findall(r"from \w+", text))
    assert float(re.search(r"least_dwell_s=([\d.]+)", text)[1]) == pytest.approx(0.110, abs=0.0015)
    assert stub_nvml_here.locked_clocks_mhz() == [0, 0, 0, 0]
    assert len(set(gpu.changes_mhz())) > 3


@pytest.mark.parametrize(
    ("fault", "line", "message"),
    [
        (("set_locked", "no_permission"), "lock", "--cap-add SYS_ADMIN"),
        (("energy", "not_supported"), "energy", "no energy counter"),
        (("graphics_clocks", "gpu_is_lost"), "clocks", "fell off the bus"),
        (("name", "gpu_is_lost"), "GPU 3", "fell off the bus"),
    ],
)
def test_doctor_shows_what_is_wrong_with_a_gpu(
    stub_nvml_here: StubNvml, stub_time: StubTime, fault: tuple[str, str], line: str, message: str
) -> None:
    stub_nvml_here.gpus[3].fail(*fault)
    level, text = findings_of(stub_time, lock=True)[line]
    assert level == "fail"
    assert message in text
    assert stub_nvml_here.locked_clocks_mhz() == [0, 0, 0, 0]


def test_doctor_warns_of_a_throttled_gpu_whose_clock_does_not_follow(
    stub_nvml_here: StubNvml, stub_time: StubTime
) -> None:
    stub_nvml_here.gpus[3].throttle_reasons = 0x4
    stub_nvml_here.gpus[3].limit_clock_mhz = 300
    found = findings_of(stub_time, lock=True)
    assert found["power"] == ("warn", "250 W now, clock held down by sw_power_cap")
    assert found["lock"][0] == "warn"
    assert "did not follow" in found["lock"][1]


def test_doctor_reports_a_missing_driver(stub_nvml_here: StubNvml, capsys: Output) -> None:
    stub_nvml_here.fail("init", "driver_not_loaded")
    assert main(["doctor"]) == 1
    level, text = lines_of(capsys)["NVML"]
    assert level == "fail"
    assert "kernel driver is not loaded" in text


def test_doctor_without_a_gpu_says_that_simulated_ones_will_do_and_what_real_ones_need(
    stub_nvml_here: StubNvml, capsys: Output
) -> None:
    stub_nvml_here.fail("init", "driver_not_loaded")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("\nThis machine is ready for simulated GPUs; for real ones solve: NVML.\n")


def test_doctor_for_simulated_gpus_looks_at_no_real_one(stub_nvml_here: StubNvml, capsys: Output) -> None:
    stub_nvml_here.fail("init", "driver_not_loaded")
    assert main(["doctor", "device=simulated"]) == 0
    output = capsys.readouterr().out
    assert "NVML" not in output
    assert output.endswith("\nThis machine is ready for simulated GPUs.\n")


def test_doctor_for_zeusd_needs_zeusd_but_not_the_permission_to_lock(
    stub_nvml_here: StubNvml, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for gpu in stub_nvml_here.gpus:
        gpu.fail("set_locked", "no_permission")
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(tmp_path / "zeusd.sock"))
    assert main(["doctor", "device=zeus", "lock=true"]) == 1
    assert capsys.readouterr().out.endswith("for real ones solve: zeusd.\n")
    assert main(["doctor", "device=nvml", "lock=true"]) == 1
    assert capsys.readouterr().out.endswith("for real ones solve: lock.\n")


def test_doctor_finds_zeusd(
    stub_nvml_here: StubNvml, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub_nvml_here.fail("init", "driver_not_loaded")
    path = tmp_path / "zeusd.sock"
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(path))
    main(["doctor"])
    assert lines_of(capsys)["zeusd"] == ("fail", f"{path}: No such file or directory")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        main(["doctor"])
    assert "answers" in lines_of(capsys)["zeusd"][1]


def test_doctor_finds_what_an_administrator_has_set(stub_nvml_here: StubNvml, stub_time: StubTime) -> None:
    stub_nvml_here.gpus[1].application_clock_mhz = 1200
    stub_nvml_here.gpus[2].power_limit_w = 300.0
    stub_nvml_here.gpus[0].power_profiles[0] = 1 << 1 | 1 << 7
    stub_nvml_here.gpus[0].power_profiles[7] = 1 << 30
    for name in ("application_clock", "power_limit", "power_profiles"):
        stub_nvml_here.gpus[3].fail(name, "not_supported")
    found = settings_found(stub_time)
    (profiles,), (clock,), (power,), none = found
    assert profiles[0] == clock[0] == power[0] == "warn"
    assert "its power profile is MAX_Q, LLM_TRAINING, number 254: default clocks and powers are those" in profiles[1]
    assert profiles[2] is not None
    assert "nvidia-smi power-profiles --help" in profiles[2]
    assert "its application clock is 1200 MHz of 1410: default clocks stay below that" in clock[1]
    assert "nvidia-smi -i 1 -rac" in clock[2]
    assert "its power limit is 300 W of 400 W" in power[1]
    assert "nvidia-smi -i 2 -pl 400" in power[2]
    assert none == []


def test_doctor_finds_power_smoothing_and_a_limit_from_outside_the_node(
    stub_nvml_here: StubNvml, stub_time: StubTime
) -> None:
    smoothed, limited = stub_nvml_here.gpus[:2]
    smoothed.set_field(pynvml.NVML_FI_PWR_SMOOTHING_ENABLED, 1)
    smoothed.set_field(pynvml.NVML_FI_PWR_SMOOTHING_APPLIED_TMP_FLOOR, 120)
    smoothed.set_field(pynvml.NVML_FI_PWR_SMOOTHING_ADMIN_OVERRIDE_RAMP_UP_RATE, 0xFFFFFFFF)  # nobody has set it
    limited.enforced_power_limit_w = 250.0
    (smoothing,), (limit,), *others = settings_found(stub_time)
    assert "power smoothing is on (applied_tmp_floor 120): a GPU that waits draws more" in smoothing[1]
    assert "its power limit is 250 W of 400 W" in limit[1]
    assert others == [[], []]


def test_a_gpu_whose_default_application_clock_is_below_the_highest_is_as_it_should_be(
    stub_nvml_here: StubNvml, stub_time: StubTime
) -> None:
    gpu = stub_nvml_here.gpus[0]
    gpu.application_clock_mhz = gpu.default_application_clock_mhz = 1095
    assert settings_found(stub_time)[0] == []
    gpu.application_clock_mhz = 1080
    assert "its application clock is 1080 MHz of 1410" in settings_found(stub_time)[0][0][1]


def settings_found(timebase: StubTime) -> list[list[tuple[str, str, str | None]]]:
    """What was found to be set, GPU by GPU."""
    return [
        [(f.level, f.text, f.remedy) for f in findings if f.what == "default"]
        for findings in examine_gpus(lock=False, timebase=timebase)
    ]
