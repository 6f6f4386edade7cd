"""Which iterations count as measured, for reports, pictures and examples alike."""

import pytest
from run_folders import record, write_log

from perseus_ds.report.history import read_history
from perseus_ds.report.jobs import MeasuredPoint, measured_points


def start(mode, job="ours"):
    return {"event": "start", "mode": mode, "job": job}


def test_points_are_typical_iterations_per_pipeline_at_default_clocks_and_of_each_plan(tmp_path):
    observed = [record(n, "observe", t, 100 * t) for n, t in enumerate((99.0, 1.0, 2.0, 9.0), start=1)]
    ran = [
        record(n, "run", t, 100 * t, plan=plan)
        for n, (t, plan) in enumerate([(50.0, 0), (3.0, 0), (50.0, 7), (4.0, 7)])
    ]
    write_log(tmp_path, [start("observe"), *observed, start("run"), record(1, "calibrate", 50.0, 50.0), *ran])
    assert measured_points([read_history(tmp_path)], pipelines=2) == [
        MeasuredPoint("default clocks", None, 2.0, 100.0, 3),
        MeasuredPoint("plan 0", 0, 3.0, 150.0, 1),
        MeasuredPoint("plan 7", 7, 4.0, 200.0, 1),
    ]


def test_iterations_shorter_than_the_counters_refresh_are_not_taken_for_free(tmp_path):
    read = [0.0, 0.0, 300.0, 0.0, 0.0, 300.0, 0.0, 0.0, 300.0]
    write_log(tmp_path, [start("observe"), *(record(n, "observe", 0.04, e) for n, e in enumerate([300.0, *read]))])
    (point,) = measured_points([read_history(tmp_path)])
    assert (point.time_s, point.energy_j, point.iterations) == (0.04, pytest.approx(100.0), 9)


def test_of_several_runs_each_point_says_which_it_is_from(tmp_path):
    write_log(tmp_path / "a", [start("observe"), *(record(n, "observe", 1.0, 10.0) for n in (1, 2))])
    write_log(tmp_path / "b", [start("run"), *(record(n, "run", 1.0, 9.0, plan=0) for n in (1, 2))])
    points = measured_points([read_history(tmp_path / name) for name in "ab"])
    assert [point.label for point in points] == ["default clocks, run 'a'", "plan 0, run 'b'"]


@pytest.mark.parametrize(
    "records",
    [
        [start("observe")],
        [start("observe"), record(1, "observe", 1.0, 10.0)],
        [start("observe"), *(record(n, "observe", 1.0, None) for n in (1, 2))],
        [start("profile"), *(record(n, "warm-up", 1.0, 10.0) for n in (1, 2))],
    ],
    ids=["no iterations", "only the first", "no energy", "only the warm-up of profiling"],
)
def test_where_no_iterations_count_there_is_no_point(tmp_path, records):
    write_log(tmp_path, records)
    assert measured_points([read_history(tmp_path)]) == []
