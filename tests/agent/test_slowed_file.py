"""Files that tell health checks of a node which GPUs are slowed on purpose."""

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perseus_ds.agent.gpu_records import GpuRecord, note_reset
from perseus_ds.agent.slowed_file import SlowedFile
from perseus_ds.protocol import places

GPU = "nvml:GPU-1b6c"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A function that returns the files for node_exporter."""
    monkeypatch.setenv(places.RUNTIME_VARIABLE, str(tmp_path))
    return lambda: [path.name for path in tmp_path.glob("perseus-ds-*/*.prom")]


def test_a_gpu_is_slowed_from_its_first_lock_until_some_time_after_the_last_one(files):
    slowed = SlowedFile(GPU)
    slowed.update(1.0, is_locked=False)
    assert files() == []
    for now_s in range(2, 40, 2):  # default clocks between iterations
        slowed.update(now_s, is_locked=True)
        slowed.update(now_s + 1, is_locked=False)
        assert files() == ["slowed.GPU-1b6c.prom"]
    slowed.update(47.0, is_locked=False)
    assert files() != []
    slowed.update(49.0, is_locked=False)
    assert files() == []


def test_the_file_is_a_metric_with_the_uuid_that_dcgm_uses(files):
    slowed = SlowedFile(GPU)
    slowed.update(1.0, is_locked=True)
    (family,) = text_string_to_metric_families(slowed.path.read_text())
    (sample,) = family.samples
    assert (family.name, sample.value) == ("perseus_gpu_slowed_on_purpose", 1.0)
    assert sample.labels == {"UUID": "GPU-1b6c", "agent": str(os.getpid())}


def test_no_file_is_left_by_an_agent_that_ends_or_dies_or_by_a_reset_from_outside(files):
    record = GpuRecord(GPU, "job")
    record.slowed.update(1.0, is_locked=True)
    assert files() != []
    record.close()
    assert files() == []
    SlowedFile(GPU).update(1.0, is_locked=True)  # of an agent that dies now
    GpuRecord(GPU, "job").close()
    assert files() == []
    SlowedFile(GPU).update(1.0, is_locked=True)
    note_reset(GPU)
    assert files() == []
