"""Descriptions of jobs of many ranks, most of which run equal schedules."""

from dataclasses import replace

from pipelines import one_f_one_b

from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import parse_block
from perseus_ds.protocol.description import JobDescription, RankFacts, decode_description, encode
from perseus_ds.server.job import Job

SCHEDULE = one_f_one_b(ranks=2, micro_batches=4)
RANKS = 200


def test_equal_schedules_are_sent_once_and_read_once(monkeypatch):
    contents = [
        ScheduleStreams.of(replace(SCHEDULE, ranks=(own,))).model_dump_json().encode() for own in SCHEDULE.ranks
    ]
    facts = (
        RankFacts(
            pipeline=(rank - rank % 2, rank - rank % 2 + 1),
            copies=tuple(range(rank % 2, RANKS, 2)),
            schedule=contents[rank % 2],
        )
        for rank in range(RANKS)
    )
    content = encode(JobDescription.of(parse_block({}).model_dump_json().encode(), facts))
    assert [content.count(each) for each in contents] == [1, 1]
    read, to_schedule = [], ScheduleStreams.to_schedule
    monkeypatch.setattr(ScheduleStreams, "to_schedule", lambda streams: read.append(1) or to_schedule(streams))
    job = Job.of(decode_description(content))
    assert len(read) == 2
    assert job.schedule.ranks == SCHEDULE.ranks
    assert job.world_size == RANKS
