"""Iterations of a job as seen by its server, made of the ranks' figures."""

import numpy as np

from perseus_ds.pipeline.schedule import encode_spans
from perseus_ds.policy.reports import JobDrift, RankReports
from perseus_ds.protocol import job_messages as msg
from perseus_ds.server.iterations import Run, Seen
from perseus_ds.server.job import Order

OF_CLIENT = set(msg.Report.__struct_fields__)
OF_CLOCK = set(msg.ClockStatus.__struct_fields__)
# Figures as records name them, and as reports do.
NAMES = {"clock_changes": "changes", "clock_skips": "skips", "failed": "has_failed"}


def reports_of(*fields):
    """Return the reports of ranks, one for each dict of fields."""
    return RankReports(messages_of(*fields), np.zeros(len(fields), int))


def messages_of(*fields, number=1, begun_s=0.0, **of_all):
    """Return a message with the fields of each rank, of whose GPUs each uses 100 J in 1 s by default."""
    messages = []
    for rank, field in enumerate(fields):
        given = {"energy_j": 100.0, **{NAMES.get(name, name): value for name, value in field.items()}}
        of_client = {name: value for name, value in given.items() if name in OF_CLIENT}
        of_clock = {name: value for name, value in given.items() if name in OF_CLOCK}
        of_agent = {name: value for name, value in given.items() if name not in OF_CLIENT | OF_CLOCK}
        report = msg.Report(number, 0, 1, 0, **{"time_s": 1.0, **of_all, **of_client})
        of_agent |= {"begun_s": begun_s + 0.01 * rank, "status": msg.ClockStatus(**of_clock)}
        messages.append(msg.RankReport(report, **of_agent))
    return messages


def seen(
    *fields,
    number=1,
    run=Run("observe"),  # noqa: B008
    pipelines=None,
    spans=None,
    begun_s=0.0,
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
    order = Order(0, job=None) if order is None else order
    streams = [tuple(span.operation for span in own) for own in spans or ()]
    places = [{operation: place for place, operation in enumerate(stream)} for stream in streams]
    messages = messages_of(*fields, number=number, begun_s=begun_s, samples=8 * number)
    return Seen(
        number=number,
        iteration=number,
        run=run,
        ranks=RankReports(messages, np.array(pipelines or [0] * len(fields))),
        messages=messages,
        contents={
            rank: encode_spans(own, place) for rank, (own, place) in enumerate(zip(spans or (), places, strict=True))
        },
        streams=streams,
        ended=1000.0 + number,
        order=order,
        drift=None if drift is None else JobDrift(drift, drift),
    )
