"""A call to the driver that hangs is waited for only so long; in virtual time."""

import pytest
from virtual_time import VirtualTime

from perseus_ds.device.gpu.driver_call import DriverCall
from perseus_ds.errors import GpuBusyError, GpuError


@pytest.fixture
def now():
    return VirtualTime()


@pytest.fixture
def driver(now):
    made = DriverCall(3.0, now)
    yield made
    made.close()


def test_values_and_errors_come_through(driver):
    def refuse():
        raise GpuError("the GPU is lost")

    assert driver.call(lambda: 2.5) == 2.5
    with pytest.raises(GpuError, match="the GPU is lost"):
        driver.call(refuse)
    assert driver.call(lambda: 3.5) == 3.5


def test_a_slow_call_is_waited_for(driver, now):
    begin_s = now.now_s()
    assert driver.call(lambda: now.sleep(2.9) or 1.0) == 1.0
    assert now.now_s() - begin_s == pytest.approx(2.9)


def test_a_hung_call_is_given_up_and_none_is_made_until_it_returns(driver, now):
    begin_s = now.now_s()
    with pytest.raises(GpuError, match="has not answered for 3 s"):
        driver.call(lambda: now.sleep(20.0) or 1.0)
    assert now.now_s() - begin_s == pytest.approx(3.0)
    made = []
    now.sleep(10.0)
    with pytest.raises(GpuError, match="has not answered for 13 s"):
        driver.call(lambda: made.append(1) or 1.0)
    assert now.now_s() - begin_s == pytest.approx(13.0), "it is not waited for again"
    now.sleep(10.0)
    assert driver.failing_s == pytest.approx(23.0)
    assert driver.call(lambda: 2.5) == 2.5
    assert driver.failing_s == 0.0
    assert made == []


def test_a_driver_that_says_it_is_busy_is_failing_until_it_answers(driver, now):
    def refuse():
        raise GpuBusyError("the driver did not answer in time")

    for _ in range(3):
        with pytest.raises(GpuBusyError):
            driver.call(refuse)
        now.sleep(10.0)
    assert driver.failing_s == pytest.approx(30.0)
    driver.call(lambda: 1.0)
    assert driver.failing_s == 0.0
