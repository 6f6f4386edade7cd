"""A call that hangs is waited for only so long."""

import threading
import time

import pytest

from perseus_ds.device.gpu.driver_call import Patience
from perseus_ds.errors import GpuError


def test_values_and_errors_come_through():
    def refuse():
        raise GpuError("the GPU is lost")

    patience = Patience(5.0)
    assert patience.call(lambda: 2.5) == 2.5
    with pytest.raises(GpuError, match="the GPU is lost"):
        patience.call(refuse)
    assert patience.call(lambda: 3.5) == 3.5
    patience.close()


def test_a_hung_call_is_given_up_and_none_is_made_after():
    returns = threading.Event()
    patience = Patience(0.1)
    begin_s = time.monotonic()
    with pytest.raises(GpuError, match="has not answered"):
        patience.call(lambda: float(returns.wait(30)))
    with pytest.raises(GpuError, match="does not answer"):
        patience.call(lambda: 1.0)
    assert time.monotonic() - begin_s < 5.0
    returns.set()
    patience.close()
