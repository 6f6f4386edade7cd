"""What is written, told and said of iterations; and that nothing of it can end training."""

import json
import math

import pytest
import torch.distributed as dist

from perseus_ds.device.rank_clocks import Forecast
from perseus_ds.distributed import Communicator, PipelineTopology
from perseus_ds.runtime.recorder import Iteration, Recorder


class Told:
    """A monitor that keeps what it is told."""

    def __init__(self):
        self.events = []

    def write_events(self, event_list):
        self.events += event_list


class Full:
    """A monitor whose disk is full."""

    calls = 0

    def write_events(self, event_list):
        self.calls += 1
        raise OSError("No space left on device")


@pytest.fixture
def ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Communicator(PipelineTopology(0, (0,)))
    dist.destroy_process_group()


def recorded(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]


def under_plan(number, energy_j=80.0):
    forecast = Forecast(time_s=1.0, energy_j=75.0, default_energy_j=100.0)
    return Iteration(number, number * 8, "run", 1.1, energy_j, 6, 2, plan=4, forecast=forecast)


def test_an_iteration_reaches_the_file_the_monitor_and_the_terminal(tmp_path, ranks, capsys):
    monitor = Told()
    recorder = Recorder(ranks, tmp_path, simulated=True, monitor=monitor, steps_per_print=2)
    recorder.add(Iteration(1, 8, "observe", 1.0, 100.0, 0))
    recorder.drift = 0.02
    recorder.add(under_plan(2))
    recorder.summarise()
    reported = {tag: value for tag, value, samples in monitor.events if samples == 16}
    assert reported == {
        "Perseus/simulated/iteration_time_s": 1.1,
        "Perseus/simulated/iteration_energy_j": 80.0,
        "Perseus/simulated/average_power_w": pytest.approx(80 / 1.1, rel=1e-4),
        "Perseus/simulated/plan": 4.0,
        "Perseus/simulated/saved": 0.2,
        "Perseus/simulated/late": pytest.approx(0.1),
        "Perseus/simulated/drift": 0.02,
        "Perseus/simulated/clock_changes": 6.0,
        "Perseus/simulated/clock_skips": 2.0,
    }
    first, second, end = recorded(tmp_path)
    assert (first["saved"], first["late"], first["drift"]) == (None, None, None)
    assert (second["saved"], second["late"], second["drift"], second["clock_skips"]) == (0.2, 0.1, 0.02, 2)
    assert (end["iterations"], end["energy_j"], end["saved"]) == (2, 180.0, 0.2)
    step, summary = capsys.readouterr().out.splitlines()
    assert step == "perseus: step 2: run, 1.100 s, 80 J (plan 4: 1.000 s, 75 J), simulated GPUs"
    assert summary.startswith(
        "perseus: 2 iterations, 2 s, 5e-05 kWh, 6 clock changes, 2 skipped; 1 under plans, on 20.0%"
    )


def test_energy_that_cannot_be_read_is_left_out_and_said_to_be(tmp_path, ranks, capsys):
    monitor = Told()
    recorder = Recorder(ranks, tmp_path, simulated=False, monitor=monitor)
    recorder.add(under_plan(1, energy_j=math.nan))
    recorder.add(under_plan(2))
    recorder.summarise()
    first, _, end = recorded(tmp_path)
    assert (first["energy_j"], first["power_w"], first["saved"]) == (None, None, None)
    assert "NaN" not in (tmp_path / "run.jsonl").read_text()
    assert all(math.isfinite(value) for _, value, _ in monitor.events)
    assert (end["energy_j"], end["saved"]) == (80.0, 0.2)
    assert "not counting 1 iterations" in capsys.readouterr().out


def test_plans_that_use_more_than_the_profile_says_are_not_called_a_saving(tmp_path, ranks, capsys):
    recorder = Recorder(ranks, tmp_path, simulated=True)
    recorder.add(under_plan(1, energy_j=110.0))
    recorder.summarise()
    assert "10.0% more energy than default clocks" in capsys.readouterr().out
    assert recorded(tmp_path)[-1]["saved"] == -0.1


def test_a_monitor_that_fails_is_told_no_more(tmp_path, ranks, caplog):
    monitor = Full()
    recorder = Recorder(ranks, tmp_path, simulated=True, monitor=monitor)
    for number in (1, 2):
        recorder.add(under_plan(number))
    assert monitor.calls == 1
    assert caplog.text.count("monitor failed (No space left on device)") == 1
    assert len(recorded(tmp_path)) == 2
