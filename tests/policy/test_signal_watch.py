"""Files of signals that change while a job runs: whatever they hold, the next good one is taken up."""

import os

import pytest
from virtual_time import VirtualTime

from perseus_ds.errors import SignalError
from perseus_ds.policy import signal_watch
from perseus_ds.policy.policies import PowerCapPolicy
from perseus_ds.policy.signal_watch import SignalWatch

GOOD = "time,value\n2026-11-22T00:00:00Z,{0}\n2026-11-23T00:00:00Z,{0}\n"
OF_YEAR_1 = "time,value\n0001-01-01T00:00:00+14:00,1\n0001-01-01T01:00:00+14:00,2\n"


@pytest.fixture
def job(tmp_path):
    """A time, a watch of a file in it, and what it tells."""
    time, told = VirtualTime(), []
    watch = SignalWatch(time, told.append)
    path = tmp_path / "cap.csv"
    write(path, GOOD.format(1000))
    watch.follow(PowerCapPolicy(name="power_cap", signal=str(path)))
    yield time, watch, path, told
    watch.close()


def write(path, text):
    later_ns = path.stat().st_mtime_ns + 10**9 if path.exists() else 10**18
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    os.utime(path, ns=(later_ns, later_ns))


def assert_is_told_and_the_next_one_read(job, text, message):
    time, watch, path, told = job
    write(path, text)
    time.sleep(5)
    assert len(told) == 1
    assert message in told[0]
    write(path, GOOD.format(500))
    time.sleep(5)
    assert watch.signals[str(path)].held_at(time.date().timestamp()) == 500


def test_a_file_of_a_year_that_computers_cannot_tell_is_told_and_the_next_good_one_is_read(job):
    assert_is_told_and_the_next_one_read(
        job, OF_YEAR_1, "row 2: expected a year from 1970 to 2200, got '0001-01-01T00:00:00+14:00'"
    )


def test_a_defect_in_reading_is_told_and_the_next_good_file_is_read(job, monkeypatch):
    read = signal_watch.read_signal
    monkeypatch.setattr(
        signal_watch, "read_signal", lambda path, now: 1 / 0 if "700" in path.read_text() else read(path, now)
    )
    assert_is_told_and_the_next_one_read(job, GOOD.format(700), "the signal cannot be read (ZeroDivisionError")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "/dev/zero"])
def test_a_name_that_no_file_has_is_an_error_at_once(job, name):
    time, watch, _, _ = job
    began_s = time.seconds
    with pytest.raises(SignalError, match=r"cannot be read \(|no regular file"):
        watch.follow(PowerCapPolicy(name="power_cap", signal=name))
    assert time.seconds == began_s
