"""A call to the driver that hangs is waited for only so long; in virtual time."""

import pytest
from virtual_time import VirtualTime

from perseus_ds.device.gpu.driver_call import DriverCall
from perseus_ds.errors import GpuError


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


def test_a_hung_call_is_given_up_and_none_is_made_after(driver, now):
    begin_s = now.now_s()
    with pytest.raises(GpuError, match="has not answered for 3 s"):
        driver.call(lambda: now.sleep(1000.0) or 1.0)
    with pytest.raises(GpuError, match="does not answer"):
        driver.call(lambda: 1.0)
    assert now.now_s() - begin_s == pytest.approx(3.0)
