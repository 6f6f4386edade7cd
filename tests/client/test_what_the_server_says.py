"""Lines and figures that the server sends to a rank cannot end training."""

import pytest
import torch
from pipelines import one_f_one_b
from virtual.agent import clocks_of
from virtual.gpu import RecordingGpu
from virtual.time import VirtualTime

from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.client.timers import HostExecution
from perseus_ds.protocol.job_messages import Follow, Observed, OrderNumbers, Program, Say
from perseus_ds.protocol.layout import OTHER_ORDERS


class Monitor:
    """Stores events, and then raises its error if it has one."""

    def __init__(self, error=None):
        self.events, self._error = [], error

    def write_events(self, event_list):
        self.events += event_list
        if self._error is not None:
            raise self._error


@pytest.fixture
def start(monkeypatch):
    """A function that starts a rank. It returns one that sends a server's message and runs an iteration."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    now, made = VirtualTime(), []

    def start(monitor=None):
        clocks = clocks_of(RecordingGpu.named("a100-sxm", timebase=now), now)
        schedule = one_f_one_b(ranks=1, micro_batches=1)
        runtime = PerseusRuntime(clocks, HostExecution(now), schedule, monitor=monitor, timebase=now)
        made.append(runtime)
        clocks._link.agent.receive_from_server(OrderNumbers(((0, 0),), OTHER_ORDERS))

        def send(*messages):
            for message in messages:
                clocks._link.agent.receive_from_server(message)
            with runtime.iteration():
                now.sleep(0.1)
            return runtime

        return send

    yield start
    for runtime in made:
        runtime.close()


def test_what_is_said_holds_no_control_characters_and_a_closed_standard_output_is_no_error(start, capsys, monkeypatch):
    send = start()
    send(Say("perseus: \x1b]0;PWNED\x07"))
    assert capsys.readouterr().out == "perseus: \\x1b]0;PWNED\\x07\n"
    monkeypatch.setattr("builtins.print", lambda *_, **__: 1 / 0)
    send(Say("nobody reads this"))


def test_a_warning_is_logged(start, caplog):
    start()(Say("perseus: the disk is full", warns=True))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the disk is full" in caplog.text


def test_a_monitor_that_fails_is_told_no_more(start, caplog):
    monitor = Monitor(OSError("No space left on device"))
    send = start(monitor)
    for samples in (8, 16):
        send(Observed((("Perseus/plan", 4.0),), samples))
    assert {samples for _, _, samples in monitor.events} == {8}
    assert caplog.text.count("monitor failed (No space left on device)") == 1


def test_all_ranks_show_at_the_same_iterations_that_nothing_is_measured_whenever_messages_arrive(start):
    measures, runs, compares = (
        Follow(Program(0), serial, begin, begin + 2, phase)
        for serial, begin, phase in ((1, 1, "profile"), (2, 3, "run"), (3, 6, "default"))
    )
    early, late = start(), start()
    shown = [early(measures, runs, compares).profiled, *(early().profiled for _ in range(8))]
    assert shown == [False] * 4 + [True] * 3 + [False] * 2
    arriving = {1: measures, 4: runs, 7: compares}
    assert [late(*filter(None, [arriving.get(iteration)])).profiled for iteration in range(1, 10)] == shown


def test_a_rank_follows_nothing_before_the_iteration_that_the_server_names(start):
    send = start()
    phases = [send(Follow(Program(0), 1, 3, 3, "run")).phase, *(send().phase for _ in range(3))]
    assert phases == ["observe", "observe", "run", "run"]
