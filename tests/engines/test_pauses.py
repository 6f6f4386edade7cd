"""Code of a user that runs at default clocks."""

import subprocess
import sys
from types import SimpleNamespace

import perseus_ds
from perseus_ds.engines import engine


def test_code_between_iterations_runs_at_default_clocks(monkeypatch):
    paused = []
    clocks = SimpleNamespace(pause=lambda: paused.append("default clocks"))
    running, waiting = SimpleNamespace(runtime=SimpleNamespace(clocks=clocks)), SimpleNamespace(runtime=None)
    monkeypatch.setattr(engine, "sessions", lambda: [running, waiting])
    with perseus_ds.paused():
        assert paused == ["default clocks"]
    assert paused == ["default clocks"]


def test_a_pause_without_perseus_needs_no_torch():
    code = "import perseus_ds, sys\nwith perseus_ds.paused():\n    sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
