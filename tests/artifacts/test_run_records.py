"""run.jsonl survives what disks do."""

import json

import pytest

from perseus_ds.artifacts.run_records import measured_points
from perseus_ds.errors import ConfigError


def line(phase="observe", time_s=1.0, energy_j=10.0):
    return json.dumps({"iteration": 1, "phase": phase, "time_s": time_s, "energy_j": energy_j})


def test_medians_by_phase_of_the_last_start(tmp_path):
    text = [line(time_s=9.0), json.dumps({"event": "start"}), line(), line(time_s=3.0, energy_j=30.0), line(time_s=1.5)]
    (tmp_path / "run.jsonl").write_text("\n".join(text) + "\n" + '{"iteration": 5, "ti')
    (point,) = measured_points(tmp_path)
    assert (point.time_s, point.energy_j, point.iterations) == (1.5, 10.0, 3)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "run.jsonl").write_text(line() + "\n[]\n" + line() + "\n")
    with pytest.raises(ConfigError, match=r"run\.jsonl, line 2"):
        measured_points(tmp_path)
