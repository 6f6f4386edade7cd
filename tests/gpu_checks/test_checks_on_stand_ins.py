"""The checks of `make test-gpu` work on stand-ins for the GPU, as far as possible without one."""

import json
import os
import pkgutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires

import pynvml
import pytest
from gpu_checks import energy_checks, run
from gpu_checks.machine import clocks_by_an_agent
from gpu_checks.recording import (
    CHANGES,
    Change,
    GuardError,
    RecordingNvmlGpu,
    RecordsChanges,
    guard_agents,
    guard_nvml,
)
from gpu_checks.results import performed
from gpu_checks.run import CHECKS, collected, made_in_a_process
from gpu_checks.stand_ins import StubCudaMachine, VirtualMachine
from gpu_checks.wheels import NAMES, pins_for
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from run_log import GIVE_UP_S, JOB_GIVE_UP_S, wait_until

from perseus_ds.artifacts.evidence import CheckResult, Machine
from perseus_ds.client import lease
from perseus_ds.client.marks import HostMarks
from perseus_ds.errors import GpuError
from perseus_ds.protocol.job_messages import Program
from perseus_ds.simulation import open_gpu
from perseus_ds.timebase import REAL_TIME

HOST = "gpu_checks.stand_ins:HostMachine"
MACHINE = Machine(simulated=True, gpu="simulated A100", driver=None, versions={"torch": "2"})


def made(name, machine=VirtualMachine):
    return performed(name, CHECKS[name].title, pkgutil.resolve_name(CHECKS[name].function), machine)


def value(result, name):
    return next(figure.value for figure in result.figures if figure.name == name)


@pytest.fixture
def gpu(stub_nvml_here, stub_time, monkeypatch):
    """A GPU of the stub, in a process and with agents that only read GPUs."""
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", pynvml._nvmlGetFunctionPointer)
    monkeypatch.setattr(lease, "_CODE", lease._CODE)
    monkeypatch.setenv("LD_LIBRARY_PATH", stub_nvml_here.environment["LD_LIBRARY_PATH"])
    guard_nvml()
    guard_agents()
    gpu = RecordingNvmlGpu(0)
    yield gpu
    assert stub_nvml_here.gpus[0].calls("set_locked") == stub_nvml_here.gpus[0].calls("reset_locked") == 0
    gpu.close()


def test_every_function_that_changes_a_gpu_raises_and_reading_goes_on(gpu):
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for change in (
        lambda: pynvml.nvmlDeviceSetGpuLockedClocks(handle, 1410, 1410),
        lambda: pynvml.nvmlDeviceResetGpuLockedClocks(handle),
        lambda: pynvml.nvmlDeviceClearEccErrorCounts(handle, 0),
    ):
        with pytest.raises(GuardError):
            change()
    assert (gpu.clock_mhz(), gpu.power_w()) == (1410, 250)
    names = [name for name in dir(pynvml) if name.startswith("nvml") and callable(getattr(pynvml, name))]
    setters = [name for name in names if name.startswith(("nvmlDeviceSet", "nvmlDeviceReset"))]
    assert len(setters) > 20
    assert all(CHANGES.match(name) for name in setters)
    assert not [name for name in [*names, "nvmlInit_v2"] if ("Get" in name or "Init" in name) and CHANGES.match(name)]


def test_a_recording_gpu_records_what_it_was_asked_for_and_no_agent_of_a_job_opens_it(gpu, stub_time):
    gpu.timebase = stub_time
    gpu.check_lock_permission()
    gpu.lock_clock(1200)
    stub_time.sleep(1.0)
    gpu.reset_clock()
    with pytest.raises(GpuError, match="1201 MHz"):
        gpu.lock_clock(1201)
    assert gpu.changes == [Change(100.0, 1200), Change(101.0, None)]
    assert gpu.clock_mhz() == 1410, "no clock was locked"
    with pytest.raises(GpuError, match="Unknown GPU address"):
        open_gpu(gpu.address)


def test_an_agent_of_the_checks_follows_marks_and_changes_no_clock(gpu):
    with clocks_by_an_agent(gpu, lambda lease: HostMarks(lease.memory)) as recorded:
        clocks = recorded.clocks
        recorded.follow(Program(0, None, (1200, 1305)))
        iteration = clocks.begin_iteration(0, 2)
        wait_until(lambda: len(recorded.changes()) == 1, "the first clock")
        began_s = REAL_TIME.now_s()
        clocks.mark(1)
        wait_until(lambda: len(recorded.changes()) == 2, "the second one")
        agent, changes = clocks._link.agent_pid, recorded.changes()  # the end requests the first clock again
        clocks.end_iteration(iteration)
    assert agent != os.getpid()
    assert [change.clock_mhz for change in changes] == [1200, 1305]
    assert changes[0].at_s < began_s < changes[1].at_s < REAL_TIME.now_s()


def test_nvml_is_checked_through_the_real_binding_and_a_part_that_fails_does_not_end_it(
    gpu, stub_nvml_here, stub_time, monkeypatch
):
    monkeypatch.setattr(energy_checks, "_PROCESSES", 2)
    monkeypatch.setattr(energy_checks, "_READER", energy_checks._READER.replace("float(sys.argv[2])", "0.01"))
    stub_nvml_here.gpus[0].application_clock_mhz = 1200
    result = made("nvml", lambda: VirtualMachine(gpu, stub_time))
    assert result.outcome == "passed", (result.reason, result.notes)
    assert value(result, "refresh period of the energy counter") == pytest.approx(100, abs=2)
    assert value(result, "processes that read at once") == 2
    assert any("application clock is 1200 MHz" in note for note in result.notes)
    stub_nvml_here.gpus[0].fail("power", "not_supported")
    result = made("nvml", lambda: VirtualMachine(gpu, stub_time))
    assert result.outcome == "failed"
    assert "what it reports: could be made: 0" in result.reason
    assert value(result, "highest") == 1410, "it was measured before that part failed"
    assert any(note.startswith("what it reports: GpuError: Reading the power") for note in result.notes)
    assert value(result, "refresh period of the energy counter") == pytest.approx(100, abs=2)


@pytest.mark.parametrize("name", ["counter", "duty", "spans", "requests", "step", "memory"])
def test_a_check_passes_where_counter_and_events_are_right(name):
    result = made(name)
    assert result.outcome == "passed", (result.reason, result.notes)


def test_waves_are_not_judged_where_the_steady_load_reaches_the_power_limit(monkeypatch):
    for reasons, outcome in (([], "failed"), (["sw_power_cap"], "passed")):
        monkeypatch.setattr(energy_checks, "steady_load", lambda machine, log, reasons=reasons: (100.0, reasons))
        assert made("counter").outcome == outcome


def test_a_request_that_comes_late_is_found(monkeypatch):
    lock_clock = RecordsChanges.lock_clock

    def late(gpu, clock_mhz):
        gpu.timebase.sleep(0.004)
        lock_clock(gpu, clock_mhz)

    monkeypatch.setattr(RecordsChanges, "lock_clock", late)
    result = made("requests")
    assert result.outcome == "failed"
    assert "from event to request, main thread launching, 99th percentile" in result.reason


def test_the_agent_receives_sigterm_while_the_main_thread_hangs(tmp_path):
    result = made_in_a_process("sigterm", tmp_path, HOST)
    names = ["from SIGTERM until the agent receives it", "the agent receives the signal's number"]
    assert [figure.name for figure in result.figures] == names, (result.reason, result.notes)


def beyond(machine, results):
    results.add("lateness", 3.5, "ms", at_most=2)
    results.add("share", 0.5, at_least=0.25)


def broken(machine, results):
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (beyond, "lateness: 3.5 ms (at most 2 ms)"),
        (broken, "ValueError: broken"),
        (lambda machine, results: None, "it measured nothing"),
    ],
)
def test_a_check_beyond_its_limits_or_that_raises_or_measures_nothing_has_failed(check, reason):
    result = performed("spans", "Spans", check, VirtualMachine)
    assert (result.outcome, result.reason) == ("failed", reason)


_DIES = """
import os, sys
from pathlib import Path
from gpu_checks.results import Results
results = Results("spans", "Spans", Path(sys.argv[2]))
results.attempt("first", lambda: results.add("first", 1))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("program", "limit_s", "reason", "parts"),
    [
        (_DIES, GIVE_UP_S, "its process ended with -9", ["first"]),
        ("import time; time.sleep(9999)", 0.4, "it did not end within 0 s", []),
    ],
    ids=["dies", "hangs"],
)
def test_a_check_that_dies_or_hangs_keeps_the_parts_that_were_made(
    tmp_path, monkeypatch, program, limit_s, reason, parts
):
    monkeypatch.setattr(run, "_CHILD", program)
    monkeypatch.setattr(run, "CHECKS", {"spans": run.Check("Spans", "", limit_s)})
    result = made_in_a_process("spans", tmp_path, HOST)
    assert (result.outcome, [figure.name for figure in result.figures]) == ("failed", parts)
    assert result.reason.startswith(reason)
    assert collected(tmp_path) is None, "no machine is known"


def write(folder, name, machine, outcome="passed", at_s=0):
    result = CheckResult(name=name, title=CHECKS[name].title, outcome=outcome, took_s=1.0)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine and machine.model_dump(), "result": result.model_dump()}))
    os.utime(path, (at_s, at_s))


def test_evidence_consists_of_checks_of_one_machine(tmp_path):
    other = MACHINE.model_copy(update={"driver": "550.1"})
    write(tmp_path, "nvml", MACHINE, at_s=10)
    write(tmp_path, "spans", other, at_s=20)
    write(tmp_path, "counter", other, at_s=30)
    write(tmp_path, "graph", None, outcome="failed", at_s=25)
    evidence = collected(tmp_path)
    assert evidence.machine == other
    assert [check.name for check in evidence.checks] == ["spans", "graph", "counter"]
    assert evidence.made == "1970-01-01 00:00 UTC"
    assert CHECKS["nvml"].title in evidence.not_made


def test_without_a_gpu_one_line_gives_the_reason_and_an_unknown_check_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("gpu_checks.machine.why_no_gpu", lambda: "torch finds no CUDA GPU")
    assert run.main([]) == 0
    assert run.main(["span"]) == 2
    skipped, refused = capsys.readouterr().out.splitlines()
    assert skipped == "make test-gpu: skipped, torch finds no CUDA GPU."
    assert "there is no check 'span'; there are" in refused


_IMPORTED = """
import json, pkgutil, sys
from pathlib import Path
from importlib.metadata import packages_distributions
sys.modules["dill"] = None  # which torch uses where it is installed
from gpu_checks.run import CHECKS, write_evidence
for check in CHECKS.values():
    pkgutil.resolve_name(check.function)
write_evidence(Path(sys.argv[1]))
import perseus_ds.agent.process, perseus_ds.client.runtime, perseus_ds.server.process
found = packages_distributions()
modules = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
print(json.dumps(sorted({found[name][0] for name in modules if name in found})))
"""


@pytest.mark.extended
def test_wheels_are_those_of_what_the_checks_import_beside_torch(tmp_path):
    def closure(name):
        if name not in of_torch:
            of_torch.add(name)
            with suppress(PackageNotFoundError):
                for line in requires(name) or []:
                    needed = Requirement(line)
                    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                        closure(canonicalize_name(needed.name))

    of_torch = set()
    closure("torch")
    (tmp_path / "checks").mkdir()
    write(tmp_path / "checks", "spans", MACHINE)
    environment = {**os.environ, "PYTHONPATH": ":".join(run.PATH)}
    command = [sys.executable, "-c", _IMPORTED, str(tmp_path)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    imported = {canonicalize_name(name) for name in json.loads(done.stdout.splitlines()[-1])}
    assert (tmp_path / "evidence.html").exists()
    assert imported - of_torch - {"perseus-ds", "setuptools"} == {canonicalize_name(name) for name in NAMES}


@pytest.mark.parametrize(("python", "numpy"), [("3.10", "2.2"), ("3.13", "2.4")])
def test_wheels_are_those_of_the_python_that_they_are_for(python, numpy):
    pins = {pin.name: str(pin.specifier) for pin in map(Requirement, pins_for(python))}
    assert set(pins) == set(NAMES)
    assert pins["numpy"].startswith(f"=={numpy}.")


@pytest.mark.extended
@pytest.mark.parametrize("name", ["training", "stages", "closure", "kernels", "overhead", "alarms"])
def test_the_checks_of_training_are_made_with_the_real_engine(tmp_path, monkeypatch, name):
    """Times are not evaluated, since there is no GPU."""
    monkeypatch.setitem(CHECKS, name, CHECKS[name]._replace(limit_s=JOB_GIVE_UP_S))
    result = made_in_a_process(name, tmp_path, HOST)
    facts = [figure for figure in result.figures if figure.name.endswith("the same bits")]
    assert all(figure.value == 1 for figure in facts), result.notes
    assert result.outcome == "passed" or name not in ("training", "stages"), (result.reason, result.notes)
    not_made = {figure.name for figure in result.figures if figure.name.endswith("could be made")}
    assert not not_made, result.notes
    assert len(result.figures) >= 2, result.reason
    assert result.outcome == "passed" or not result.reason.startswith(("it", "its")), result.reason


def test_marks_are_checked_on_the_stub_of_the_driver(stub_cuda):
    result = made("marks", lambda: StubCudaMachine(stub_cuda))
    # How many marks another process sees, and when, depends on the load of this machine.
    assert not [figure.name for figure in result.figures if "could be made" in figure.name], result.notes
    assert value(result, "copies that were not there when their mark was") == 0
    assert {"beside a busy Python thread: the call, median", "full queue: a mark, median"} <= {
        figure.name for figure in result.figures
    }


def test_a_graph_with_marks_is_checked_on_the_stub_of_the_driver(stub_cuda):
    result = made("graph", lambda: StubCudaMachine(stub_cuda))
    # When the agent requests a clock, and whether a pass has ended by then, depends on the load of this machine.
    by_load = {"clock changes in a replay, median", "a clock was asked for during the capture"}
    beyond = {figure.name for figure in result.figures if not figure.is_within_limits}
    assert beyond <= by_load, (result.reason, result.notes)
    assert value(result, "time of a pass in a replay to its length, median") >= 1
    assert value(result, "errors of the agent") == 0
