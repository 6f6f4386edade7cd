"""Jobs without permission to set clocks, and keys of jobs and profiles."""

import pytest
from pipelines import one_f_one_b
from virtual.job import VirtualJob

from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import parse_block
from perseus_ds.errors import GpuPermissionError
from perseus_ds.protocol.description import JobDescription, RankFacts
from perseus_ds.server.job import Job


def test_auto_mode_observes_where_it_may_not_set_clocks(tmp_path, caplog):
    job = VirtualJob(tmp_path, mode="auto", gpu={"may_lock": False})
    assert set(job.train(5)) == {"observe"}
    assert len(job.close()) == 5
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "this process may not set clocks" in warning
    assert 'With "required": true this is an error' in warning


@pytest.mark.parametrize("block", [{"mode": "auto", "required": True}, {"mode": "profile"}])
def test_a_job_that_cannot_do_without_clocks_ends_before_training(tmp_path, block):
    with pytest.raises(GpuPermissionError, match="may not set clocks"):
        VirtualJob(tmp_path, gpu={"may_lock": False}, **block)
    assert not (tmp_path / "run.jsonl").exists()


def keys(*limits_w):
    """Return the keys of a job's profile and of the job, given the power limits of its GPUs."""
    own = ScheduleStreams.of(one_f_one_b(ranks=1, micro_batches=1)).model_dump_json().encode()
    ranks = tuple(
        RankFacts(
            pipeline=(rank,),
            copies=tuple(range(len(limits_w))),
            schedule=own,
            gpu="A100",
            settings=GpuSettings(power_limit_w=limit_w).model_dump_json().encode(),
        )
        for rank, limit_w in enumerate(limits_w)
    )
    job = Job.of(JobDescription.of(parse_block({}).model_dump_json().encode(), ranks))
    return job.profile_key(), job.started().job


def test_plans_are_kept_for_the_settings_of_all_gpus_and_jobs_are_told_apart_without_them():
    assert keys(400, 400) == keys(400, 400)
    profile_key, job_key = keys(400, 300)
    assert profile_key != keys(400, 400)[0]
    assert job_key == keys(400, 400)[1], "jobs under different limits can be compared"
