"""The temperature of the hottest GPU, from simulated GPUs to the record, the status and the report, in virtual time."""

import pytest
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import GpuState
from perseus_ds.report.facts import Factors, facts
from perseus_ds.report.inputs import read
from perseus_ds.simulation.gpu import SimulatedGpu

FACTORS = Factors(carbon_g_per_kwh=400, price_per_kwh=0.25, currency="EUR")


class GpuWithSensor(SimulatedGpu):
    """A GPU with a temperature that a test sets. None: it reports none.

    Attributes:
        has_failed: Whether reading the state fails.
    """

    sensor_c = None
    has_failed = False

    @property
    def state(self):
        if self.has_failed:
            raise GpuError("Reading the temperature failed: unknown error (code 999)")
        return GpuState(self.sensor_c, "P0")


@pytest.fixture
def job(start):
    """A job of three stages that observes, with iterations of more than a second."""
    return start(mode="observe", stages_s=(0.1, 0.1, 0.1), gpu_class=GpuWithSensor)


def heat(job, *temperatures_c):
    """Set the temperatures of all GPUs, and return the one that is recorded two iterations later."""
    for gpu, temperature_c in zip(job.gpus, temperatures_c, strict=True):
        gpu.sensor_c = temperature_c
    job.train(3)
    return job.events(IterationRecord)[-1].highest_temperature_c


def test_the_record_has_the_temperature_of_the_hottest_gpu(job):
    assert heat(job, 61.0, 74.0, 68.0) == 74.0
    assert heat(job, 61.0, 59.0, 68.0) == 68.0, "it falls too"


def test_gpus_that_report_no_temperature_are_left_out(job):
    assert heat(job, None, 57.0, None) == 57.0
    assert heat(job, None, None, None) is None


def test_a_temperature_that_cannot_be_read_is_unknown_and_changes_nothing_else(job):
    assert heat(job, 61.0, 74.0, 68.0) == 74.0
    job.gpus[1].has_failed = True
    assert heat(job, 61.0, 74.0, 68.0) == 68.0
    assert not job.has_fallen_back(1)


def test_every_iteration_has_it_under_plans_as_well_as_while_the_profile_is_measured(tmp_path):
    class AlwaysWarm(GpuWithSensor):
        sensor_c = 66.0

    job = VirtualJob(tmp_path, mode="auto", goal={"max_slowdown": 0.2}, gpu_class=AlwaysWarm)
    job.train_until("run")
    job.train(4)
    records = job.close()
    assert {"profile", "run"} <= {record.phase for record in records}
    assert {record.highest_temperature_c for record in records} == {66.0}


def test_the_status_and_the_report_show_it(job):
    heat(job, 61.0, 74.0, 68.0)
    heat(job, 61.0, 63.0, 68.0)
    assert job.control(command="status")["status"]["highest_temperature_c"] == 68.0
    job.close()
    tile = next(tile for tile in facts(read(job.folder), FACTORS).tiles if tile.title == "Hottest GPU")
    assert tile.value == "74 °C"
    assert tile.note.startswith("highest temperature in the last ")
