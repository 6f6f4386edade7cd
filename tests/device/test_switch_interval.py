"""A thread that computes in Python does not keep the clocks' thread waiting for long."""

import sys

import pytest

from perseus_ds.device.switch_interval import ShortSwitchInterval


@pytest.fixture(autouse=True)
def _restored():
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def test_the_interval_is_short_until_it_is_closed():
    sys.setswitchinterval(0.005)
    interval = ShortSwitchInterval()
    assert sys.getswitchinterval() == 0.0005
    interval.close()
    interval.close()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_shorter_interval_of_the_users_stays():
    sys.setswitchinterval(0.0002)
    interval = ShortSwitchInterval()
    assert sys.getswitchinterval() == pytest.approx(0.0002, abs=2e-6)
    interval.close()
    assert sys.getswitchinterval() == pytest.approx(0.0002, abs=2e-6)


def test_an_interval_that_is_set_meanwhile_stays():
    sys.setswitchinterval(0.005)
    interval = ShortSwitchInterval()
    sys.setswitchinterval(0.01)
    interval.close()
    assert sys.getswitchinterval() == pytest.approx(0.01)
