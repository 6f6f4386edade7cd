"""Files of measured profiles, and the cache of complete ones."""

import pwd
from types import SimpleNamespace

import pytest
from virtual.job import SLOWER, in_order

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile
from perseus_ds.artifacts.run_records import ProfileWritten
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.server.frontiers import cached
from perseus_ds.server.profiling import save_profile

KINDS = (Kind.FORWARD, Kind.BACKWARD)
WAITING_W = 80.0


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a profile of one stage, given the power at each clock [W]."""

    def saved(power_w):
        rows = [
            Measurement(0, kind, clock, 0.1, 0.1 * w)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for clock, w in power_w.items()
        ]
        quality = [RowQuality(stage=0, kind=row.kind, clock_mhz=row.clock_mhz, samples=9) for row in rows]
        info = ProfileInfo(rows=quality, blocking_power_w=WAITING_W)
        profile = StageProfile(rows, info)
        save_profile(
            SimpleNamespace(profile_path=tmp_path / "profile.csv"),
            SimpleNamespace(info=info, tail_profile=None, time_s=1.0),
            profile,
            profile,
        )
        return StageProfile.load(tmp_path / "profile.csv"), StageProfile.load(tmp_path / "measured.csv")

    return saved


def test_rows_that_noise_has_put_below_waiting_are_left_out_and_said(saved, caplog):
    profile, measured = saved({1410: 300.0, 1200: 200.0, 930: 36.0})
    assert list(profile.options(0, Kind.BACKWARD).clock_mhz) == [1200, 1410]
    assert {row.clock_mhz for row in profile.info.rows} == {1200, 1410}
    assert len(measured.measurements) == 6
    assert "2 rows at 930 MHz are left out" in caplog.text


def test_rows_below_waiting_stay_where_fewer_than_two_would_be_left(saved, caplog):
    profile, _ = saved({1410: 9.0, 1200: 8.0, 930: 7.0})
    assert len(profile.measurements) == 6
    assert not caplog.text


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(OSError, match="Set XDG_CACHE_HOME"):
        cached("key")


@pytest.mark.parametrize("killed_in", ["optimizing", "run"])
def test_a_job_that_was_killed_before_its_verdict_does_not_measure_its_profile_again(start, killed_in):
    job = start(mode="auto", **SLOWER)
    job.train_until(killed_in)
    job.train(1)
    before = (job.folder / "profile.csv").read_bytes()
    again = start(mode="auto", **SLOWER)  # in the same folder
    phases = again.train_until("run")
    assert in_order(phases) == ["optimizing", "default"]
    assert (again.folder / "profile.csv").read_bytes() == before
    (verdict,) = again.train_until_compared()
    assert verdict.kept


def test_a_search_that_was_interrupted_goes_on_and_another_job_measures_its_own_profile(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("profile")
    job.train(5)
    again = start(mode="auto", **SLOWER)
    assert "profile" in again.train_until("optimizing")
    assert again.events(ProfileWritten)[-1].resumed_clocks > 0
    other = start(mode="auto", profile={"max_clock_mhz": 1200}, **SLOWER)
    assert "profile" in other.train_until("optimizing")
    assert other.events(ProfileWritten)[-1].resumed_clocks == 0


def test_a_profile_that_no_longer_held_is_measured_again_by_the_next_start(start):
    job = start(mode="auto", max_drift=10.0, **SLOWER)
    job.train_until_compared()
    job.work_s[0][Kind.BACKWARD] *= 1.5
    job.late_under_plans()
    job.train_until("observe", most=900)
    again = start(mode="auto", **SLOWER)
    assert "profile" in again.train_until("run")
