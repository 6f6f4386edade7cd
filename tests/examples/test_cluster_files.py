"""The contents of the files of examples/cluster, without running them."""

import inspect
import json
import os
import re
import subprocess
from pathlib import Path

import yaml
from live_records import auto_job, facts_at

from perseus_ds.agent.slowed_file import SlowedFile
from perseus_ds.server import metrics

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def documents(name):
    return {document["kind"]: document for document in yaml.safe_load_all((CLUSTER / name).read_text())}


def test_the_epilog_resets_the_gpus_of_the_job_and_never_drains_the_node(tmp_path):
    script = (CLUSTER / "slurm-epilog.sh").read_text()
    stub = tmp_path / "nvidia-smi"
    stub.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/called\nexit 7\n')
    stub.chmod(0o755)
    minors = {"0000:17:00.0": 1, "0000:3d:00.0": 0, "0000:9b:00.0": 12, "0000:bd:00.0": 2}
    for address, minor in minors.items():  # in the order of PCI addresses, which minor numbers need not follow
        (tmp_path / "gpus" / address).mkdir(parents=True)
        text = f"Model: \t\t NVIDIA A100\nBus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        (tmp_path / "gpus" / address / "information").write_text(text)
    replaced = {"/usr/bin/nvidia-smi": str(stub), "/proc/driver/nvidia/gpus": f"{tmp_path}/gpus"}
    for known, instead in replaced.items():
        assert known in script
        script = script.replace(known, instead)
    for gpus in ("1,2", None, ""):
        environment = {"PATH": os.environ["PATH"]} | ({} if gpus is None else {"SLURM_JOB_GPUS": gpus})
        done = subprocess.run(["bash", "-c", script], env=environment, check=False)
        assert done.returncode == 0
    assert (tmp_path / "called").read_text() == "--id=0000:17:00.0,0000:bd:00.0 --reset-gpu-clocks\n"


def test_unused_gpus_are_reset_and_no_others(tmp_path):
    """One has a process, one an unlisted process with memory, and one does not report its memory."""
    stub = tmp_path / "nvidia-smi"
    stub.write_text(
        "#!/bin/bash\n"
        'case "$1" in\n'
        '    --query-compute-apps=*) echo "GPU-b" ;;\n'
        '    --query-gpu=*) printf "GPU-a, 4\\nGPU-b, 5\\nGPU-c, 30000\\nGPU-d, [N/A]\\nGPU-e, 0\\n" ;;\n'
        f'    *) echo "$@" >> {tmp_path}/called; [[ "$1" != --id=GPU-a ]] ;;\n'
        "esac\n"
    )
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = CLUSTER / "reset-idle-gpus.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "called").read_text() == "--id=GPU-a --reset-gpu-clocks\n--id=GPU-e --reset-gpu-clocks\n"
    assert done.stderr == "GPU-a: its clock was not reset\n"


def test_the_daemon_set_runs_the_script_and_sees_the_processes_of_jobs():
    found = documents("kubernetes-reset.yaml")
    assert found["ConfigMap"]["data"] == {"reset-idle-gpus.sh": (CLUSTER / "reset-idle-gpus.sh").read_text()}
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["hostPID"]
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]


def test_the_dashboard_shows_metrics_that_exist():
    panels = json.loads((CLUSTER / "grafana" / "perseus.json").read_text())["panels"]
    expressions = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    shown = {name.removesuffix("_total") for name in re.findall(r"perseus_\w+", expressions)}
    assert len(shown) > 10
    families = metrics.registry_of(lambda: facts_at(auto_job(), 0.0)).collect()
    assert shown <= {family.name for family in families}


def test_alerts_on_slow_gpus_leave_out_those_slowed_on_purpose():
    (group,) = yaml.safe_load((CLUSTER / "prometheus-alerts.yaml").read_text())["groups"]
    low, below = (rule["expr"] for rule in group["rules"])
    written = SlowedFile("nvml:GPU-1").text
    name, label = re.search(r"unless on \((\w+)\) (\w+) == 1$", low).groups()[::-1]
    assert f'{name}{{{label}="GPU-1"' in written
    assert f'"{below.split()[0]}"' in inspect.getsource(metrics)
