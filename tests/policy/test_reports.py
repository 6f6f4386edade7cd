"""Figures of ranks by name, deviations of instruction times from the profile, and limits of GPUs."""

import math
import random

import numpy as np
import pytest
from seen import messages_of, reports_of

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Span
from perseus_ds.policy.reports import JobDrift, RankReports, rank_drift


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
    drift = JobDrift.of([0], [rank_drift(drawn, clocks_mhz, {(0, kind, 1400): 0.005 for kind in kinds})])
    assert (drift.typical > 0.05) == is_drift


def test_the_job_drifts_if_half_of_its_pipelines_do_by_their_worst_rank():
    def drift_of(*drifts):
        found = JobDrift.of([rank // 2 for rank in range(len(drifts))], drifts)
        return found.typical, found.most

    assert drift_of(0.0, 0.0, 0.2, 0.2) == (0.0, 0.2)
    assert drift_of(0.1, 0.0, 0.0, 0.2) == (0.1, 0.2)


def test_every_number_of_a_report_is_an_array_over_ranks_by_its_name():
    reports = reports_of({"temperature_c": 60.0, "memory_bytes": 5}, {"tokens": 7})
    assert reports.temperature_c.tolist()[0] == 60.0
    assert math.isnan(reports.temperature_c[1]), "unknown"
    assert (reports.memory_bytes.tolist(), reports.tokens.tolist()) == ([5.0, 0.0], [0.0, 7.0])
    assert reports.tokens is reports.tokens, "it is made once"
    with pytest.raises(AttributeError, match="temprature_c"):
        reports.temprature_c  # noqa: B018


def test_the_energy_of_a_counter_that_two_ranks_share_counts_once():
    messages = messages_of({"energy_j": 50.0}, {"energy_j": 50.0})
    assert RankReports(messages, np.array([0, 0]), (True, False)).energy_j.tolist() == [50.0, 0.0]
