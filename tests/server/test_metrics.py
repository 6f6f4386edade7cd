"""Prometheus metrics: values, complete files, and no effect of clients or disks on the job."""

import contextlib
import shutil
import socket
import subprocess
import urllib.request

import pytest
from forked import free_port
from live_records import BEGIN, auto_job, facts_at, planned_iteration, started
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from run_log import GIVE_UP_S, wait_until

from perseus_ds.artifacts.run_events import Ended
from perseus_ds.config import MetricsConfig
from perseus_ds.server import metrics
from perseus_ds.server.metrics import MetricsReporter

ALL = ("perseus_iterations_total", "perseus_energy_joules_total", "perseus_planned_iterations_total")


@contextlib.contextmanager
def reporter(records, **config):
    """Run a reporter of records, and yield the list of problems that it reports."""
    problems = []
    facts = facts_at(records, BEGIN + 100)
    reporter = MetricsReporter(MetricsConfig(**config), lambda: facts, problems.append)
    try:
        yield problems
    finally:
        reporter.close()


def values(text):
    return {
        (sample.name, sample.labels.get("pipeline") or sample.labels.get("phase")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def get(port, accept="text/plain", host="127.0.0.1"):
    """Return headers and text of an answer, once the server listens."""
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers={"Accept": accept})

    def answer():
        with contextlib.suppress(ConnectionError, urllib.error.URLError), urllib.request.urlopen(request) as found:
            return found.headers, found.read().decode()
        return None

    return wait_until(answer, f"an answer at port {port}")


def test_gpus_with_a_locked_clock_are_counted_as_slowed_on_purpose():
    clocks = {"clocks_asked_mhz": (1305, None, 1110), "clocks_reached_mhz": (1305, None, 1110)}
    facts = facts_at([started(), planned_iteration(1, **clocks)], BEGIN + 2)
    text = generate_latest(metrics.registry_of(lambda: facts)).decode()
    assert values(text)["perseus_slowed_gpus", None] == 2.0


def test_the_figures_are_the_facts_with_job_pipeline_and_simulated_as_labels():
    port = free_port()
    facts = facts_at(auto_job(), BEGIN + 100)
    with reporter(auto_job(), port=port):
        _, text = get(port)
        headers, openmetrics = get(port, "application/openmetrics-text; version=1.0.0")
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", port)):
        pass
    found = values(text)
    assert found["perseus_iterations_total", None] == facts.iterations
    assert found["perseus_energy_joules_total", "1"] == pytest.approx(facts.pipelines[1].energy_j)
    saved_j = [found["perseus_saved_joules", pipeline] for pipeline in "01"]
    assert saved_j == pytest.approx([pipeline.saved_j for pipeline in facts.pipelines])
    assert found["perseus_plan_slowdown_ratio", None] == pytest.approx(facts.plan.real.slowdown)
    assert found["perseus_highest_power_watts", None] == pytest.approx(facts.highest_power_w)
    assert found["perseus_power_window_seconds", None] == pytest.approx(facts.power_window_s)
    assert (found["perseus_phase", "run"], found["perseus_phase", "profile"]) == (1.0, 0.0)
    labels = {label for family in text_string_to_metric_families(text) for s in family.samples for label in s.labels}
    assert labels == {"training_job", "simulated", "energy_note", "pipeline", "phase"}
    assert 'simulated="true"' in text
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert {family.name for family in read_openmetrics(openmetrics)} > {"perseus_iterations", "perseus_power_watts"}


def test_a_port_in_use_is_one_warning():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with reporter(auto_job(), port=taken.getsockname()[1]) as problems:
            wait_until(lambda: problems, "the problem")
    (problem,) = problems
    assert "nothing is served" in problem
    assert "Address already in use" in problem


def test_counters_survive_a_resume_and_gauges_end_with_the_job(tmp_path):
    before, after = (values(text_of(tmp_path, records)) for records in (auto_job(), [*auto_job(), started()]))
    assert all(after[name, key] == before[name, key] for name, key in before if name in ALL)
    resumed = values(text_of(tmp_path, [*auto_job(), Ended(time=BEGIN + 30), started(), planned_iteration(27)]))
    assert resumed["perseus_iterations_total", None] == before["perseus_iterations_total", None] + 1
    ended = values(text_of(tmp_path, [*auto_job(), Ended(time=BEGIN + 30)]))
    assert ended["perseus_iterations_total", None] == before["perseus_iterations_total", None]
    assert not {"perseus_power_watts", "perseus_plan", "perseus_silent_seconds"} & {name for name, _ in ended}
    assert ended["perseus_phase", "run"] == 0.0


def text_of(folder, records):
    """Return the content of the file written for records."""
    with reporter(records, textfile=str(folder / "perseus.prom")):
        pass
    return (folder / "perseus.prom").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
def test_promtool_finds_nothing_to_complain_of(tmp_path):
    for records in (auto_job(), [started()], []):
        text = text_of(tmp_path, records)
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_file_that_cannot_be_written_is_one_warning_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_PERIOD_S", 0.01)
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "perseus.prom"
    with reporter(auto_job(), textfile=str(path)) as problems:
        wait_until(lambda: problems, "the problem")
        (tmp_path / "file").unlink()
        wait_until(path.exists, "the file")
    (problem,) = problems
    assert "cannot be written" in problem


def test_clients_that_send_half_a_request_keep_nobody_out_and_are_ended(monkeypatch):
    monkeypatch.setattr(metrics, "_CLIENT_TIMEOUT_S", 0.2)
    port = free_port()
    with reporter(auto_job(), port=port):
        get(port)
        with socket.create_connection(("127.0.0.1", port), GIVE_UP_S) as client:
            client.sendall(b"GET /metr")
            get(port)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""


def test_it_listens_on_localhost_unless_told_otherwise():
    port = free_port()
    with reporter(auto_job(), port=port):
        get(port)
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.2", port))
    with reporter(auto_job(), port=port, host="127.0.0.2"):
        get(port, host="127.0.0.2")
