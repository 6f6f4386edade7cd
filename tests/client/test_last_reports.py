"""A rank that ends reports the iterations that its GPU has not finished yet."""

from virtual.job import VirtualJob


def test_the_last_iterations_are_reported_after_the_gpu_has_finished_them(tmp_path):
    job = VirtualJob(tmp_path, mode="observe", cuda=True)
    job.train(2)  # which the host only launches
    job.runtime.close()
    assert [record.iteration for record in job.close()] == [1, 2]
