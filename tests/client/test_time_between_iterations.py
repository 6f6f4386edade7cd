"""The time between iterations is that of the GPU, not of the host."""

import pytest
from virtual.job import VirtualJob

from perseus_ds.protocol.job_messages import RankReport


class ReportedJob(VirtualJob):
    """A job that keeps the time between iterations that its rank reports [s]."""

    def __init__(self, *arguments, **block):
        self.stopped_s = []
        super().__init__(*arguments, **block)

    def _to_server(self, rank, message):
        if isinstance(message, RankReport):
            self.stopped_s.append(message.report.stopped_s)
        super()._to_server(rank, message)


@pytest.fixture(params=[False, True], ids=["host", "cuda"])
def job(request, tmp_path):
    job = ReportedJob(tmp_path, mode="observe", cuda=request.param)
    yield job
    job.close()


def test_a_host_that_waits_for_its_gpu_does_not_stop_between_iterations(job):
    for _ in range(5):
        job.train()
        job.settle()  # as loss.item() does
    job.train(2)
    job.settle()
    assert job.stopped_s == pytest.approx([0.0] * len(job.stopped_s), abs=1e-3)


def test_a_checkpoint_is_time_between_iterations(job):
    job.train()
    job.settle()
    job.time.sleep(60.0)
    job.train(3)
    job.settle()
    job.train()
    assert job.stopped_s[:3] == pytest.approx([0.0, 60.0, 0.0], abs=0.01)
