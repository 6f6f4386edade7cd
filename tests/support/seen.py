"""Iterations of a job as its server has them, made of the figures of its ranks."""

import numpy as np

from perseus_ds.pipeline.span import encode
from perseus_ds.policy.reports import JobReport, RankReport, RankReports
from perseus_ds.protocol import job_messages as msg
from perseus_ds.server.iterations import Run, Seen


def reports_of(*fields, pipelines=None):
    """The reports of as many ranks as there are fields."""
    numbers = [RankReport(**{"time_s": 1.0, "energy_j": 100.0, **field}).as_numbers() for field in fields]
    return RankReports(np.array(numbers), None if pipelines is None else np.array(pipelines))


def job_report(*fields):
    """What such reports say of the whole job."""
    return JobReport.of(reports_of(*fields))


def seen(*fields, number=1, run=Run("observe"), pipelines=None, spans=None, begun_s=0.0, memory_bytes=0):  # noqa: B008
    """An iteration that ranks have reported.

    Args:
        fields: Of the report of each rank.
        number: Of the iteration; it has seen 8 samples for each one so far.
        run: What it ran; it is frozen.
        pipelines: The pipeline of each rank.
        spans: Operations by rank, which are their whole order.
        begun_s: When it began on the first rank [s]; on each other one 10 ms later than on the one before.
    """
    ranks = range(len(fields))
    streams = [tuple(span.operation for span in own) for own in spans or ()]
    places = [{operation: place for place, operation in enumerate(stream)} for stream in streams]
    return Seen(
        number=number,
        iteration=number,
        run=run,
        ranks=reports_of(*fields, pipelines=pipelines),
        messages=[
            msg.RankReport(
                msg.Report(number, 0, 1, 0, 1.0, samples=8 * number, memory_bytes=memory_bytes),
                begun_s=begun_s + 0.01 * rank,
            )
            for rank in ranks
        ],
        contents={rank: encode(own, place) for rank, (own, place) in enumerate(zip(spans or (), places, strict=True))},
        streams=streams,
        pipeline_ranks=[*ranks],
        ended=1000.0 + number,
    )
