"""Plans that were late are computed again with larger margins."""

from types import SimpleNamespace

import pytest
from pipelines import one_f_one_b, synthetic_profile

from perseus_ds.server.frontiers import Planner
from perseus_ds.server.phases import ModeContext
from perseus_ds.server.state import MOST_ROBUST, PlanState


def planner_of(folder, robustness, **info):
    """Return a planner of a job with a profile, and the requests to the optimizer that it makes."""
    synthetic_profile(2, **info).save(folder / "profile.csv")
    job = SimpleNamespace(
        profile_path=folder / "profile.csv",
        output_dir=folder,
        schedule=one_f_one_b(2, 4),
        fix_slow_ranks=lambda say: None,
    )
    order = SimpleNamespace(job=job, frontier=None, is_given_up=False)
    orders = SimpleNamespace(first=order, latest=order, known=[order])
    requests = []

    def worker(request, log_path):
        requests.append(request)
        return SimpleNamespace(has_ended=lambda: False)

    state = PlanState(robustness=robustness)
    context = ModeContext(
        job, orders, state, SimpleNamespace(say=print), control=None, send=None, timebase=None, worker=worker
    )
    planner = Planner(context)
    planner.begin()
    return planner, requests


@pytest.mark.parametrize("robustness", range(MOST_ROBUST + 1))
def test_clocks_are_held_longer_each_time_and_the_reserve_grows_by_the_variation_of_passes(tmp_path, robustness):
    planner, requests = planner_of(tmp_path, robustness, least_dwell_s={1410: 0.02, 1200: 0.03}, pass_variation=0.03)
    planner.advance()
    (request,) = requests
    if robustness == 0:
        assert (request.settings.least_dwell_s, request.settings.reserve) == (None, 0.0), "the profile's"
    else:
        factor = 4**robustness
        assert request.settings.least_dwell_s == pytest.approx({1410: factor * 0.02, 1200: factor * 0.03})
        assert request.settings.reserve == pytest.approx(robustness * 0.03)
    assert planner.can_use_larger_margins == (robustness < MOST_ROBUST)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, False),
        ({"pass_variation": 0.0005}, False),
        ({"pass_variation": 0.02}, True),
        ({"least_dwell_s": {1410: 0.02}}, True),
    ],
)
def test_plans_are_not_computed_again_if_no_margin_would_change_them(tmp_path, info, expected):
    planner, _ = planner_of(tmp_path, 0, **info)
    assert planner.can_use_larger_margins is expected
