"""How long threads that serve clients pause, so that they keep to their share of a processor."""

import pytest
from virtual_time import VirtualTime

from perseus_ds.device.processor_share import LONGEST_PAUSE_S, ProcessorShare


@pytest.mark.parametrize("works_s", [[0.001] * 50, [0.002, 0.0, 0.05] * 10, [0.1] * 5])
def test_work_without_end_takes_its_share_in_parts_that_are_not_long(works_s):
    time, used_s = VirtualTime(), 0.0
    share, begin_s = ProcessorShare(0.01, time.now_s), time.now_s()
    for work_s in works_s:
        time.sleep(work_s)
        share.add(work_s)
        used_s += work_s
        pauses_s = []
        while (pause_s := share.pause_s()) > 0:
            pauses_s.append(pause_s)
            time.sleep(pause_s)
        assert max(pauses_s, default=0.0) <= LONGEST_PAUSE_S
    assert used_s / (time.now_s() - begin_s) == pytest.approx(0.01, rel=0.02)


def test_a_pause_that_was_too_short_is_made_up_for_by_the_next_ones():
    time = VirtualTime()
    share = ProcessorShare(0.01, time.now_s)
    share.add(0.02)
    for _ in range(3):
        time.sleep(LONGEST_PAUSE_S)
        assert share.pause_s() == pytest.approx(LONGEST_PAUSE_S)
    time.sleep(LONGEST_PAUSE_S)
    assert share.pause_s() == pytest.approx(0.0)


def test_time_in_which_nothing_is_done_counts_as_a_pause_but_cannot_be_saved_up():
    time = VirtualTime()
    share = ProcessorShare(0.01, time.now_s)
    share.add(0.01)
    time.sleep(100)
    assert share.pause_s() == 0
    share.add(0.001)
    assert share.pause_s() == pytest.approx(0.1)
