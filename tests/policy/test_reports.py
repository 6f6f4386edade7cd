"""Reports of drift by ranks, and rank 0's evaluation."""

import math
import random

import pytest
from seen import reports_of

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Span
from perseus_ds.policy.reports import DriftWatch, GpuLimit, JobReport, LimitConditions, reported_drift


def test_a_profile_is_out_of_date_when_half_of_the_pipelines_say_so_twice():
    forward = Instruction(0, Kind.FORWARD, 0)
    watch, expected = DriftWatch(max_drift=0.05), {(0, Kind.FORWARD, 1400): 0.1}

    def drift_of(pipelines):
        reports = reports_of(*({"drift": drift} for drift in pipelines), pipelines=range(len(pipelines)))
        return JobReport.of(reports).drift

    spans = [Span(Compute(forward), 0.0, s) for s in (0.11, 0.11, 0.11, 0.9)]
    assert reported_drift(spans, {forward: 1400}, expected)["drift"] == pytest.approx(0.1)
    assert reported_drift(spans, {}, expected) == {"drift": 0.0}
    seen = [[0.0, 0.2], [0.0, 0.2], [0.2, 0.2], [0.1, 0.1], [0.1, 0.1], [0.0, 0.0], [0.1, 0.1], [0.1, 0.1]]
    assert [watch.has_drifted(drift_of(pipelines)) for pipelines in seen] == [n in (3, 4, 7) for n in range(8)]


@pytest.mark.parametrize(("spread", "is_drift"), [(0.0, True), (0.02, True), (0.3, False)])
def test_a_deviation_that_instructions_vary_by_is_no_drift(spread, is_drift):
    """Forwards take 10 % longer than profiled, backwards (half as many) as long as profiled."""
    draw, kinds = random.Random(1), {Kind.FORWARD: (20, 1.1), Kind.BACKWARD: (10, 1.0)}
    drawn = [
        Span(Compute(Instruction(0, kind, i)), 0.0, 0.005 * pace * draw.gauss(1, spread))
        for kind, (samples, pace) in kinds.items()
        for i in range(samples)
    ]
    clocks_mhz = {span.operation.instruction: 1400 for span in drawn}
    reported = reported_drift(drawn, clocks_mhz, {(0, kind, 1400): 0.005 for kind in kinds})
    report = JobReport.of(reports_of(reported))
    assert (report.drift > 0.05) == is_drift
    assert (report.drift_beside_pace > 0.02) == is_drift
    assert report.pace == pytest.approx(1.05, abs=0.01 + spread / 2)


def test_ranks_whose_passes_vary_too_widely_say_nothing_about_the_pace():
    sure, unsure = {"drift": 0.0, "pace_low": 1.1, "pace_high": 1.1}, {"drift": 0.0, "pace_low": 3.0, "pace_high": -1.0}
    assert JobReport.of(reports_of(sure, unsure)).pace == pytest.approx(1.1)
    assert math.isnan(JobReport.of(reports_of(unsure)).pace)


def test_heat_that_comes_and_goes_is_one_condition_and_a_power_limit_is_another_each_time():
    conditions, draw = LimitConditions(), random.Random(1)

    def hot(*ranks, power_w=math.inf):
        limits = [GpuLimit(rank, power_w if rank == 0 else math.inf, draw.choice([900, 1100])) for rank in ranks]
        return conditions.add(1.0, limits)

    seen = [hot(*(rank for rank in range(1, 11) if draw.random() < 0.3)) for _ in range(3000)]
    assert len(set(seen)) <= 11, "each GPU is hot once"
    assert len(set(seen[300:])) == 1
    assert conditions.add(1.0, [GpuLimit(0, 300.0, math.inf)]) != seen[-1]
    assert conditions.add(1.0, []) == seen[-1]
    assert conditions.add(3600.0, []) == (), "an hour later no GPU is hot"
