"""Prometheus scrapes a running job, and has data for every expression of the dashboard."""

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from forked import free_port
from frontiers import save_true_frontier
from job import run_while
from run_log import iterations, wait_until

DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "grafana" / "perseus.json"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.extended,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus"),
]


def expressions():
    """Return the dashboard's expressions as sent to Prometheus, for all jobs."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [expr.replace("$training_job", ".*").replace("$__rate_interval", "20s") for expr in found]


@contextlib.contextmanager
def prometheus(folder, target):
    """Run Prometheus with the job as its only target, and yield a function for queries."""
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "perseus"}]}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

        def query(expression):
            url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            try:
                with urllib.request.urlopen(url) as answer:
                    return json.load(answer)["data"]["result"]
            except urllib.error.HTTPError as error:
                if error.code != 503:  # not ready
                    raise
            except urllib.error.URLError:  # not started
                assert process.poll() is None, (folder / "prometheus.log").read_text()[-2000:]
            return []

        try:
            yield query
        finally:
            process.terminate()
            process.wait()


def test_every_expression_of_the_dashboard_has_data_of_a_running_job(tmp_path):
    save_true_frontier(tmp_path / "frontier")
    port = free_port()
    # Long enough for the job to check for drift and to know the remaining steps.
    policy = {"name": "deadline", "finish_by": "2099-01-01T00:00:00+00:00", "total_steps": 10_000_000}
    block = {"mode": "run", "frontier": str(tmp_path / "frontier"), "metrics": {"port": port}, "policy": policy}

    def during(job):
        job.wait_for(lambda records: len(iterations(records, "run")) >= 3)
        with prometheus(tmp_path, f"127.0.0.1:{port}") as query:

            def data(expression):
                return wait_until(lambda: query(expression), f"data for {expression}")

            assert all(map(data, expressions()))
            (power,) = data("sum(rate(perseus_energy_joules_total[20s]))")
            assert float(power["value"][1]) > 0
            (labels,) = (result["metric"] for result in data("perseus_iterations_total"))
            assert (labels["training_job"], labels["simulated"], labels["job"]) == ("perseus", "true", "perseus")
            checked = subprocess.run(
                ["promtool", "check", "metrics"],
                input=urllib.request.urlopen(f"http://127.0.0.1:{port}").read(),
                capture_output=True,
                check=False,
            )
            assert (checked.returncode, checked.stderr) == (0, b"")

    finished = run_while(during, tmp_path / "job", 4, stages=2, work=[3] * 4, perseus=block)
    assert len(finished.ranks) == 4
