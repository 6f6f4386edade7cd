"""The files of examples/cluster start real ranks, on two "nodes" that are this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_log
import yaml
from forked import free_port
from job import ENVIRONMENT

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
BIN = Path(sys.executable).parent
PORT = "29500"
TINY = ["model=tiny", "steps=3", "micro_batches=4", "perseus.mode=observe", "perseus.device=simulated"]
SRUN = """#!/bin/bash
# Runs a step on two nodes, as `srun` of an allocation of two nodes does with one task on each.
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & done
for job in $(jobs -p); do wait "$job" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[0-1]" ]] && printf 'localhost\\nelsewhere\\n'
"""

pytestmark = [pytest.mark.integration, pytest.mark.extended]


@pytest.fixture
def commands(tmp_path):
    """Put stand-ins for a cluster's commands on PATH, and this Python as ``python``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{BIN}:{os.environ['PATH']}"
    return {**os.environ, **ENVIRONMENT, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def iterations(folder):
    """Return the number of recorded iterations."""
    return len(run_log.iterations(run_log.records(folder)))


def finished(process):
    output = process.communicate(timeout=run_log.JOB_GIVE_UP_S)[0]
    assert process.returncode == 0, output[-4000:]
    return output


def start(command, environment):
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def with_a_port_of_its_own(text):
    """Return a file's text with a port that no other test on this machine uses."""
    assert PORT in text
    return text.replace(PORT, str(free_port()))


def test_the_slurm_script(commands, tmp_path):
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    script = with_a_port_of_its_own((CLUSTER / "slurm.sbatch").read_text())
    arguments = ["slurm.sbatch", *TINY, f"perseus.output_dir={tmp_path}/run"]
    output = finished(start(["bash", "-c", script, *arguments], {**commands, **slurm}))
    assert "stage=1 layers" in output
    assert iterations(tmp_path / "run") == 3


def test_the_kubernetes_containers(commands, tmp_path):
    text = with_a_port_of_its_own((CLUSTER / "kubernetes.yaml").read_text())
    (job,) = [d for d in yaml.safe_load_all(text) if d["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    local = {"MASTER_ADDR": "127.0.0.1", "GPUS_PER_NODE": "1"}
    environment = {**commands, **{entry["name"]: entry["value"] for entry in container["env"]}, **local}
    arguments = [*container["args"], *TINY, f"perseus.output_dir={tmp_path}/run"]
    pods = [
        start([*container["command"], *arguments], {**environment, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(job["spec"]["completions"])
    ]
    outputs = [finished(pod) for pod in pods]
    assert any("stage=1 layers" in output for output in outputs)
    assert iterations(tmp_path / "run") == 3
