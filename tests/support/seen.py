"""Iterations of a job as seen by its server, made of the ranks' figures."""

import math

import numpy as np

from perseus_ds.pipeline.schedule import encode_spans
from perseus_ds.policy.reports import JobDrift, JobReport, RankReports
from perseus_ds.protocol import job_messages as msg
from perseus_ds.server.iterations import Run, Seen
from perseus_ds.server.job import Order

USUAL = {
    "time_s": 1.0,
    "energy_j": 100.0,
    **dict.fromkeys(("clock_changes", "clock_skips", "failed", "computed_s", "tail_s", "tokens"), 0.0),
    **dict.fromkeys(("asked_mhz", "reached_mhz"), math.nan),
    **dict.fromkeys(("limit_w", "limit_mhz"), math.inf),
}


def reports_of(*fields, pipelines=None):
    """Return the reports of ranks, one for each dict of fields."""
    figures = {name: np.array([field.get(name, usual) for field in fields], float) for name, usual in USUAL.items()}
    return RankReports(pipeline=np.array(pipelines or [0] * len(fields)), **figures)


def job_report(*fields):
    """Return the job's report computed from such reports."""
    return JobReport.of(reports_of(*fields))


def seen(
    *fields,
    number=1,
    run=Run("observe"),  # noqa: B008
    pipelines=None,
    spans=None,
    begun_s=0.0,
    memory_bytes=0,
    drift=None,
    order=None,
):
    """Return an iteration that ranks have reported.

    Args:
        fields: Fields of the report of each rank.
        number: Number of the iteration; the job has processed 8 samples per iteration so far.
        run: Phase and plan of the iteration; it is frozen.
        pipelines: Pipeline of each rank.
        spans: Operations by rank, in the order of execution.
        begun_s: Start on the first rank [s]; each further rank starts 10 ms after the previous one.
        drift: Deviation of all instructions from the profile; None if it was not measured.
        order: Order of the iteration, by default the first one.
    """
    ranks = range(len(fields))
    order = Order(0, job=None) if order is None else order
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
        contents={
            rank: encode_spans(own, place) for rank, (own, place) in enumerate(zip(spans or (), places, strict=True))
        },
        streams=streams,
        ended=1000.0 + number,
        order=order,
        drift=None if drift is None else JobDrift(drift, drift),
    )
