"""The optimiser in a separate process."""

import os
import subprocess
import sys

import psutil
from pipelines import dual_pipe_v, one_f_one_b, synthetic_profile
from run_log import wait_until

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.alternatives import alternatives
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.worker import NICENESS, OptimizeRequest, OptimizeWorker
from perseus_ds.planning import PlanningSettings


def request(tmp_path, schedule=None, **changes):
    schedule = schedule or one_f_one_b(2, 4)
    synthetic_profile(schedule.num_stages, simulated=True, blocking_power_w=80.0).save(tmp_path / "p" / "profile.csv")
    profile = changes.pop("profile", tmp_path / "p" / "profile.csv")
    settings = PlanningSettings(**{"plans": 8, **changes})
    return OptimizeRequest(profile=profile, out=tmp_path / "f", schedule=schedule, settings=settings)


def error_of(worker):
    wait_until(worker.has_ended, "its end")
    return worker.error


def test_it_writes_the_frontier_that_optimize_returns(tmp_path):
    schedule = dual_pipe_v(2, 4)
    worker = OptimizeWorker(request(tmp_path, schedule), tmp_path / "optimize.log")
    assert not error_of(worker)
    worker.stop()
    assert not worker.error
    frontier = Frontier.load(tmp_path / "f")
    expected = optimize(schedule, synthetic_profile(4), blocking_power_w=80.0, plans=8)
    assert frontier.plans == expected.plans
    assert frontier.alternatives == alternatives(problem_for(schedule, synthetic_profile(4), blocking_power_w=80.0))
    assert frontier.provenance.schedule == schedule.name
    assert frontier.provenance.profile == str(tmp_path / "p" / "profile.csv")
    assert frontier.provenance.simulated


def test_it_runs_lowtime(tmp_path):
    worker = OptimizeWorker(request(tmp_path, solver="lowtime"), tmp_path / "optimize.log")
    assert not error_of(worker), (tmp_path / "optimize.log").read_text()
    assert Frontier.load(tmp_path / "f").provenance.solver == "lowtime"


def test_it_says_how_long_it_will_take_and_uses_one_thread_at_low_priority(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = psutil.Process().children()
    # So long that it has not ended before it is stopped.
    worker = OptimizeWorker(request(tmp_path, one_f_one_b(8, 128), plans=120), tmp_path / "optimize.log")
    (process,) = set(psutil.Process().children()) - set(before)
    assert wait_until(worker.remaining_s, "an estimate") > 0
    assert process.num_threads() == 1
    assert process.nice() == min(os.nice(0) + NICENESS, 19)
    worker.stop()
    assert not process.is_running(), "it does not stay in the table of processes"
    assert worker.remaining_s() == 0
    assert worker.error.endswith(f"ended by signal 9 without a result, see {tmp_path / 'optimize.log'}")


def test_a_failure_is_a_result_with_its_reason(tmp_path):
    order = request(tmp_path, profile=tmp_path / "nowhere.csv")
    assert "nowhere.csv: no such profile" in error_of(OptimizeWorker(order, tmp_path / "optimize.log"))


def test_modules_in_the_current_folder_that_minus_m_would_import_are_not_imported(tmp_path, monkeypatch):
    for name in ("perseus_ds", "numpy", "pydantic", "json"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text(f"raise SystemExit('imported {name}')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    worker = OptimizeWorker(request(tmp_path), tmp_path / "optimize.log")
    assert not error_of(worker), (tmp_path / "optimize.log").read_text()


def test_it_imports_neither_torch_nor_deepspeed():
    code = "import sys, perseus_ds.optimizer.worker; print({'torch', 'deepspeed'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
