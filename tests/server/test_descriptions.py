"""Descriptions of jobs: equal schedules are read once, and keys distinguish jobs and profiles."""

from job_descriptions import described
from pipelines import one_f_one_b

from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.protocol.description import decode_description, encode
from perseus_ds.server.job import Job

SCHEDULE = one_f_one_b(ranks=2, micro_batches=4)


def test_equal_schedules_are_sent_once_and_read_once(monkeypatch):
    content = encode(described(SCHEDULE, pipelines=100))
    assert content.count(b'"ranks"') == 2
    read, to_schedule = [], ScheduleStreams.to_schedule
    monkeypatch.setattr(ScheduleStreams, "to_schedule", lambda streams: read.append(1) or to_schedule(streams))
    job = Job.of(decode_description(content))
    assert len(read) == 2
    assert job.schedule.ranks == SCHEDULE.ranks
    assert job.world_size == 200


def keys(*limits_w):
    """Return the keys of a job's profile and of the job, given the power limits of its GPUs."""
    settings = [{"settings": GpuSettings(power_limit_w=limit_w).model_dump_json().encode()} for limit_w in limits_w]
    schedule = one_f_one_b(ranks=1, micro_batches=1)
    job = Job.of(described(schedule, pipelines=len(limits_w), of_ranks=settings))
    return job.profile_key(), job.started().job


def test_plans_are_kept_for_the_settings_of_all_gpus_and_jobs_are_told_apart_without_them():
    assert keys(400, 400) == keys(400, 400)
    profile_key, job_key = keys(400, 300)
    assert profile_key != keys(400, 400)[0]
    assert job_key == keys(400, 400)[1], "jobs under different limits can be compared"
