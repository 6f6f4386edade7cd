"""What the files of examples/cluster say, without starting anything."""

import subprocess
from pathlib import Path

import pytest
import yaml
from deepspeed.launcher.runner import fetch_hostfile

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def documents(name):
    return {document["kind"]: document for document in yaml.safe_load_all((CLUSTER / name).read_text())}


def job(name):
    """Return the pod of a Job and its container."""
    found = documents(name)
    spec = found["Job"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    assert found["Service"]["spec"]["selector"] == {"job-name": found["Job"]["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    return pod, container


def test_deepspeed_reads_the_hostfile():
    assert fetch_hostfile(str(CLUSTER / "hostfile")) == {"node-0": 8, "node-1": 8}


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm-epilog.sh"])
def test_bash_reads_the_scripts(script):
    assert subprocess.run(["bash", "-n", str(CLUSTER / script)], capture_output=True, check=True).stderr == b""


def test_the_kubernetes_job_has_the_capability_that_locking_clocks_needs():
    _, container = job("kubernetes.yaml")
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environment["GPUS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_job_with_zeusd_has_no_privilege_but_its_socket():
    pod, container = job("kubernetes-zeusd.yaml")
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["runAsNonRoot"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    (daemon,) = documents("kubernetes-zeusd.yaml")["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert daemon["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]
    assert environment["ZEUSD_SOCK_PATH"] in daemon["command"]
    assert "perseus.device=zeus" in container["args"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "zeusd"]
    assert Path(environment["ZEUSD_SOCK_PATH"]).parent == Path(mount["mountPath"])
    assert volumes["zeusd"]["hostPath"]["path"] == mount["mountPath"]


def test_the_epilog_resets_the_gpus_of_the_job_and_never_drains_the_node(tmp_path):
    script = (CLUSTER / "slurm-epilog.sh").read_text()
    stub = tmp_path / "nvidia-smi"
    stub.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/called\nexit 7\n')
    stub.chmod(0o755)
    assert "/usr/bin/nvidia-smi" in script
    for gpus in ("2,3", None):
        done = subprocess.run(
            ["bash", "-c", script.replace("/usr/bin/nvidia-smi", str(stub))],
            env={} if gpus is None else {"SLURM_JOB_GPUS": gpus},
            check=False,
        )
        assert done.returncode == 0
    assert (tmp_path / "called").read_text() == "--id=2,3 --reset-gpu-clocks\n"
