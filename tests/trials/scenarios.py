"""Scenarios in which jobs are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from typing import Any

import psutil
from stub_nvml.controller import StubNvml
from trials.light_job import ENDS, RANKS
from trials.trial import Scenario, Trial, kill, send, start_other

_TERM, _INT, _HUP, _KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL
_TO_RANKS = (_TERM, _INT, _HUP, signal.SIGQUIT, signal.SIGXCPU, _KILL)
_SIGNALS = {
    "one rank": _TO_RANKS,
    "all ranks": _TO_RANKS,
    "the launcher": (_TERM, _INT, _HUP),
    "the process group": (_TERM, _INT, _KILL),
}


def _send(number: signal.Signals, to: str, trial: Trial) -> float:
    if to == "the process group":
        now_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # a closing job may have ended already
            os.killpg(trial.launcher.pid, number)
        return now_s
    ranks = trial.ranks
    if to == "one rank":
        ranks = [trial.draw.choice(ranks)]
    elif to == "the launcher":  # the process that has started them
        ranks = [psutil.Process(ranks[0].ppid())]
    return send(ranks, number)


def _signal(number: signal.Signals, to: str, name: str = "{}", **more: Any) -> Scenario:
    """Return the scenario of a signal to ``to``, a key of :data:`_SIGNALS`.

    ``{}`` in ``name`` stands for the signal and its target.
    """
    return Scenario(name.format(f"{number.name} to {to}"), partial(_send, number, to), **more)


def _tree(trial: Trial) -> float:
    return kill(trial.tree)


def _with_agent(trial: Trial) -> float:
    return kill([*trial.agents, *trial.tree])


def _agent_then_ranks(trial: Trial) -> float:
    killed = trial.agents
    kill(killed)
    trial.wait_until(lambda: trial.has_agent(besides=killed), "an agent again")
    trial.look()
    time.sleep(trial.draw.uniform(0.0, 0.5))
    trial.wait_until(lambda: all(trial.node.locked_clocks_mhz()), "locked clocks on all GPUs")
    return kill(trial.ranks)


def _agent_then_ranks_soon(trial: Trial) -> float:
    kill(trial.agents)
    time.sleep(trial.draw.uniform(0.0, 0.5))
    trial.look()
    return kill(trial.tree)


def _stopped_agent_then_ranks_of_its_successor(trial: Trial) -> float:
    """Stop the agent, for which no rank waits, and kill the ranks when another agent has set their clocks."""
    stopped = trial.agents
    send(stopped, signal.SIGSTOP)
    trial.wait_until(lambda: trial.has_agent(besides=stopped), "another agent")
    trial.look()
    trial.wait_until(lambda: all(trial.node.locked_clocks_mhz()), "locked clocks on all GPUs")
    return kill(trial.ranks)


def _agent_that_cannot_be_replaced_then_ranks(trial: Trial) -> float:
    kill(trial.agents)
    time.sleep(1.5)
    trial.look()
    return kill(trial.tree)


def _after_a_failed_mark(trial: Trial) -> float:
    """Kill the ranks when their clocks are set again after a mark has failed."""
    _wait_for_changes(trial, 0)
    trial.wait_until(lambda: "a mark" in trial.output(), "the message of the failed mark")
    trial.wait_until(lambda: all(trial.node.locked_clocks_mhz()), "locked clocks on all GPUs")
    return kill(trial.tree)


def _while_calls_return_late(trial: Trial) -> float:
    """Kill the ranks while calls that lock a clock hang, which take effect afterwards."""
    before = [gpu.calls("set_locked") for gpu in trial.node.gpus]
    for gpu in trial.node.gpus:
        gpu.hang("set_locked")

    def are_hanging() -> bool:
        return all(gpu.calls("set_locked") > calls for gpu, calls in zip(trial.node.gpus, before, strict=True))

    trial.wait_until(are_hanging, "calls that hang")
    now_s = kill(trial.tree)
    time.sleep(0.7)
    for gpu in trial.node.gpus:
        gpu.hang("set_locked", False)
    return now_s


def _after_a_reset_from_outside(trial: Trial) -> float:
    for gpu in trial.node.gpus:
        gpu.locked_clock_mhz = 0
    trial.wait_until(lambda: all(trial.node.locked_clocks_mhz()), "clocks that are set again")
    return kill(trial.tree)


def _stopped_agent_then_ranks(trial: Trial) -> float:
    agents = trial.agents
    send(agents, signal.SIGSTOP)
    time.sleep(trial.draw.uniform(0.0, 2.0))  # ranks may look for another one
    trial.look()
    kill(trial.tree)
    time.sleep(trial.draw.uniform(0.0, 0.5))
    return send(agents, signal.SIGCONT)


def _all_while_the_agent_is_stopped(trial: Trial) -> float:
    agents = trial.agents
    send(agents, signal.SIGSTOP)
    time.sleep(trial.draw.uniform(0.0, 2.0))
    return kill([*trial.tree, *agents])


def _stopped_rank(trial: Trial) -> float:
    """Stop a rank, for which the others wait, and kill all of them when their clocks are the default ones."""
    now_s = send([trial.draw.choice(trial.ranks)], signal.SIGSTOP)
    trial.wait_until(lambda: not any(trial.node.locked_clocks_mhz()), "default clocks")
    kill(trial.tree)
    return now_s


def _term_then_kill(after_s: float, trial: Trial) -> float:
    now_s = send(trial.ranks, signal.SIGTERM)
    time.sleep(after_s)
    kill(trial.tree)
    return now_s


def _term_then_kill_container(trial: Trial) -> float:
    ranks = trial.ranks  # they may end before the kill
    now_s = send(ranks, signal.SIGTERM)
    time.sleep(0.5)
    kill(ranks[:1])
    return now_s


def _term_while_one_is_stopped(trial: Trial) -> float:
    """Stop a rank, for which the other waits, and send both SIGTERM, and SIGKILL a second later."""
    send(trial.ranks[:1], signal.SIGSTOP)
    time.sleep(0.1)
    send(trial.ranks, signal.SIGTERM)
    time.sleep(1.0)
    return kill(trial.tree)


def _twice(trial: Trial) -> float:
    ranks = trial.ranks
    now_s = send(ranks, signal.SIGINT)
    time.sleep(0.005)
    send(ranks, signal.SIGINT)
    return now_s


def _cgroup(trial: Trial) -> float:
    assert trial.cgroup is not None
    now_s = time.monotonic()
    (trial.cgroup / "cgroup.kill").write_text("1")
    return now_s


def _by_itself(trial: Trial) -> float:
    """Wait until the last rank has ended itself."""
    path = trial.folder / "ended_s"
    trial.wait_until(lambda: path.exists() and path.read_text(), "a rank that ends itself")
    return float(path.read_text())


def _while_the_driver_is_busy(trial: Trial) -> float:
    """Kill all ranks while the driver refuses to reset clocks, as it does for 0.7 s."""
    for gpu in trial.node.gpus:
        gpu.fail("reset_locked", "timeout")
    now_s = kill(trial.tree)
    time.sleep(0.7)
    for gpu in trial.node.gpus:
        gpu.fail("reset_locked", "none")
    return now_s


def _one_after_the_other(trial: Trial) -> float:
    """Kill a job and, after its clocks are restored, another job, which continued to change its clocks."""
    other = trial.other
    assert other is not None
    kill(trial.tree)
    trial.wait_until(lambda: not any(trial.node.locked_clocks_mhz()[:RANKS]), "default clocks on the GPUs of one job")
    _wait_for_changes(trial, RANKS)
    return kill(other.tree)


def _with_agent_then_the_other(trial: Trial) -> float:
    """Kill a job with its agent, and later another job, which still changes clocks, without its agent."""
    other = trial.other
    assert other is not None
    kill([*trial.agents, *trial.tree])
    _wait_for_changes(trial, RANKS)
    return kill(other.tree)


def _after_another_was_refused(trial: Trial) -> float:
    """Start another job on the same GPUs, which is refused, and kill the first job while it changes clocks."""
    other = start_other(trial)
    trial.wait_until(lambda: not other.tree, "the end of the other job")
    trial.wait_until(lambda: "is used by another job of this user" in other.output(), "the reason")
    _wait_for_changes(trial, 0)
    trial.wait_until(lambda: all(trial.node.locked_clocks_mhz()), "locked clocks on all GPUs")
    return kill(trial.tree)


def _wait_for_changes(trial: Trial, first: int) -> None:
    """Wait until more clocks are locked on the GPUs from ``first`` on."""
    gpus = trial.node.gpus[first:]
    before = [gpu.change_count for gpu in gpus]

    def have_changed() -> bool:
        changes = [gpu.changes_since_mhz(count) for gpu, count in zip(gpus, before, strict=True)]
        return all(sum(clock_mhz > 0 for clock_mhz in own) > 4 for own in changes)  # 0: between iterations

    trial.wait_until(have_changed, "changes of clocks")


def _slow_driver(node: StubNvml) -> None:
    for gpu in node.gpus:
        gpu.lock_latency_s = 0.02


LIGHT = [
    *(_signal(number, to) for to, numbers in _SIGNALS.items() for number in numbers),
    Scenario("SIGKILL to launcher and ranks", _tree),
    Scenario("SIGTERM, 20 ms later SIGKILL", partial(_term_then_kill, 0.02)),
    Scenario(
        "SIGTERM, on which the script goes on; SIGKILL",
        partial(_term_then_kill, 0.5),
        settings={"ignores_term": True},
    ),
    Scenario("SIGTERM while one rank is stopped; SIGKILL", _term_while_one_is_stopped),
    Scenario("SIGINT twice", _twice),
    *(
        Scenario(
            f"a rank ends: {name}",
            _by_itself,
            settings={"end_by": name, "small_cgroup": name == "out-of-memory killer"},
        )
        for name in ENDS
    ),
    *(
        _signal(number, to, "{}, with loader workers", settings={"workers": 2})
        for number, to in ((_KILL, "one rank"), (_KILL, "all ranks"), (_TERM, "all ranks"))
    ),
    *(
        scenario
        for name, when, settings in (
            ("{}, starting", "starting", {}),
            ("{}, profiling", "profile", {}),
            ("{}, at its end", "closing", {"steps": 20}),
        )
        for scenario in (
            _signal(_TERM, "the process group", name, when=when, settings=settings),
            Scenario(name.format("SIGKILL to launcher and ranks"), _tree, when=when, settings=settings),
        )
    ),
    Scenario("SIGKILL to all, calls of the driver take 20 ms", _tree, prepare=_slow_driver),
    Scenario("SIGKILL to all, the driver is busy for 0.7 s", _while_the_driver_is_busy),
    Scenario("the agent; when replaced, all ranks", _agent_then_ranks),
    Scenario(
        "a container: SIGTERM to its ranks, 0.5 s later SIGKILL to its first process",
        _term_then_kill_container,
        settings={"is_container": True},
    ),
    Scenario(
        "a container: SIGKILL to its first process, so to all of it",
        lambda trial: kill(trial.ranks[:1]),
        settings={"is_container": True},
        ends_agent=True,
    ),
    Scenario("the agent; within 0.5 s all ranks", _agent_then_ranks_soon, ends_agent=True),
    Scenario("SIGSTOP to one rank, for which the other waits", _stopped_rank),
    Scenario("the agent is stopped; all ranks; it continues", _stopped_agent_then_ranks),
    Scenario("the agent, stopped before, and all at once", _all_while_the_agent_is_stopped, ends_agent=True),
    Scenario("the agent and all at once", _with_agent, ends_agent=True),
    Scenario(
        "the agent and all at once, records of locked clocks too",
        _with_agent,
        ends_agent=True,
        loses_records=True,
    ),
    Scenario(
        "two jobs on different GPUs: one and, when its clocks are restored, the other", _one_after_the_other, gpus=4
    ),
    Scenario(
        "two jobs on different GPUs: one with its agent, then the other",
        _with_agent_then_the_other,
        ends_agent=True,
        gpus=4,
    ),
    Scenario("the agent is stopped; when replaced, all ranks", _stopped_agent_then_ranks_of_its_successor),
    Scenario(
        "the agent, which cannot be replaced; 1.5 s later all ranks",
        _agent_that_cannot_be_replaced_then_ranks,
        settings={"trouble": "agents cannot start"},
        ends_agent=True,
    ),
    Scenario("SIGKILL to all after a failed mark", _after_a_failed_mark, settings={"trouble": "a mark fails"}),
    Scenario("SIGKILL to all while calls hang, which take effect later", _while_calls_return_late),
    Scenario(
        "a container with a pool of processes: SIGTERM to its ranks, 0.5 s later SIGKILL to its first process",
        _term_then_kill_container,
        settings={"is_container": True, "trouble": "a pool"},
    ),
    Scenario("SIGKILL to all after a reset from outside, one clock", _after_a_reset_from_outside, clocks_mhz=(1200,)),
    Scenario("SIGKILL to all, other variables on each rank", _tree, settings={"differing_variables": True}),
    Scenario("another job on the same GPUs is refused; then all ranks", _after_another_was_refused),
    Scenario("the job's cgroup, the agent in it", _cgroup, settings={"cgroup": True}, ends_agent=True),
]

DEEPSPEED = [
    _signal(_TERM, "the launcher", "torchrun: SIGTERM to it", launcher="torchrun"),
    _signal(_INT, "the launcher", "torchrun: SIGINT to it", launcher="torchrun"),
    _signal(_KILL, "one rank", "torchrun: {}", launcher="torchrun"),
    Scenario("torchrun: SIGKILL to it and its ranks", _tree, launcher="torchrun"),
    Scenario("torchrun: SIGKILL to all, profiling", _tree, when="profile", launcher="torchrun"),
    # A `deepspeed` of one node does not forward SIGTERM, so it ends alone and training continues.
    _signal(_TERM, "the launcher", "deepspeed: SIGTERM to the process it starts ranks with", launcher="deepspeed"),
    Scenario("deepspeed: SIGKILL to it and its ranks", _tree, launcher="deepspeed"),
]
