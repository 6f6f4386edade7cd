"""The built wheel, installed without access to the checkout, runs the quick start."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import run_log

pytestmark = [pytest.mark.integration, pytest.mark.extended]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The ``bin`` folder of an environment with the wheel and the packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    # Unlike a site directory, a path in a .pth file does not process .pth files, so the editable install is invisible.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def run(installed, folder, *command, **environment):
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**kept, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", **environment}
    finished = subprocess.run(
        [installed / command[0], *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return finished.returncode, finished.stdout + finished.stderr


def test_the_quick_start_runs_from_an_empty_folder(installed, tmp_path):
    code, output = run(installed, tmp_path, "python", "-c", "import perseus_ds; print(perseus_ds.__file__)")
    assert code == 0
    assert Path(output.strip()).is_relative_to(installed.parent)
    (script,) = re.findall(
        r"^```python title=\"train.py\"\n(.*?)^```", (ROOT / "docs/quick-start.md").read_text(), re.M | re.S
    )
    # The number of steps until there is a plan depends on the machine.
    loop = "for _ in range(200):\n    engine.train_batch()\n"
    until = "for _ in range(10_000):\n    engine.train_batch()\n    if engine.perseus.phase == 'run':\n        break\n"
    assert loop in script
    (tmp_path / "train.py").write_text(script.replace(loop, until + "engine.train_batch()\n"))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py")
    code, output = run(installed, tmp_path, "python", *launch)
    assert code == 0, output
    records = run_log.records(tmp_path / "perseus")
    assert "run" in run_log.phases(records), "the job never ran under a plan"
    assert records[-1]["event"] == "end"
    assert records[-1]["under_plans"]["iterations"] > 0
    page = (ROOT / "docs/files.md").read_text()
    assert not [key for record in records if "phase" in record for key in record if f"`{key}`" not in page]
    code, output = run(
        installed, tmp_path, "perseus-ds", "optimize", "--profile", "perseus", "--out", "frontier", "--plans", "20"
    )
    assert code == 0, output
    assert (tmp_path / "frontier/frontier.json").is_file()
    code, output = run(installed, tmp_path, "perseus-ds", "report", "perseus")
    assert code == 0, output
    assert "simulated" in (tmp_path / "perseus/report.html").read_text()


def test_commands_work_from_an_empty_folder(installed, tmp_path):
    assert "Compute the frontier" in run(installed, tmp_path, "perseus-ds", "--help")[1]
    assert "--micro-batches" in run(installed, tmp_path, "perseus-ds", "optimize", "--help")[1]
    assert "PROFILE" in run(installed, tmp_path, "perseus-ds", "optimize", "--out", "x")[1]
    assert "perseus-ds    0.2.0" in run(installed, tmp_path, "perseus-ds", "doctor")[1].replace("  ok", "")
