"""A rank that ends reports the iterations that its GPU has not finished yet."""

import os

from virtual.job import VirtualJob


def test_the_last_iterations_are_reported_after_the_gpu_has_finished_them(tmp_path):
    job = VirtualJob(tmp_path, mode="observe", cuda=True)
    job.train(2)  # which the host only launches
    job.runtime.close()
    assert [record.iteration for record in job.close()] == [1, 2]


def test_a_forked_process_that_ends_does_not_end_the_rank(tmp_path, monkeypatch):
    job = VirtualJob(tmp_path, mode="observe")
    job.train(2)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 0)
        job.runtime.close()
    job.train(2)
    assert [record.iteration for record in job.close()] == [1, 2, 3, 4]
