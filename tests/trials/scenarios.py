"""The scenarios: how jobs are ended."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from stub_nvml.controller import StubNvml
from trials.light_job import ENDS
from trials.trial import Scenario, Trial, kill, send

_TO_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGKILL)


def _all_ranks(trial: Trial, number: int) -> float:
    return send(trial.ranks, number)


def _one_rank(trial: Trial, number: int) -> float:
    return send([trial.draw.choice(trial.ranks)], number)


def _launcher(trial: Trial, number: int) -> float:
    """Tell the process that has started the ranks."""
    parent = trial.ranks[0].parent()
    assert parent is not None
    return send([parent], number)


def _group(trial: Trial, number: int) -> float:
    now_s = time.monotonic()
    os.killpg(trial.launcher.pid, number)
    return now_s


def _tree(trial: Trial) -> float:
    return kill(trial.tree)


def _with_guardian(trial: Trial) -> float:
    return kill([*trial.guardians, *trial.tree])


def _guardian_then_ranks(trial: Trial) -> float:
    """Kill the guardian; the ranks follow once another one has taken its place."""
    killed = trial.guardians
    kill(killed)
    trial.wait_until(lambda: trial.has_guardian(besides=killed), "a guardian again")
    trial.look()
    time.sleep(trial.draw.uniform(0.0, 0.5))
    return kill(trial.ranks)


def _guardian_then_ranks_soon(trial: Trial) -> float:
    """Kill the guardian and, within half a second, the job."""
    kill(trial.guardians)
    time.sleep(trial.draw.uniform(0.0, 0.5))
    trial.look()
    return kill(trial.tree)


def _term_then_kill(trial: Trial) -> float:
    now_s = send(trial.ranks, signal.SIGTERM)
    time.sleep(0.02)
    kill(trial.tree)
    return now_s


def _term_that_is_ignored(trial: Trial) -> float:
    now_s = send(trial.ranks, signal.SIGTERM)
    time.sleep(0.5)
    kill(trial.tree)
    return now_s


def _term_while_one_is_stopped(trial: Trial) -> float:
    """One rank is stopped, the other waits for it in a collective; both get SIGTERM, and SIGKILL a second later."""
    send(trial.ranks[:1], signal.SIGSTOP)
    time.sleep(0.1)
    send(trial.ranks, signal.SIGTERM)
    time.sleep(1.0)
    return kill(trial.tree)


def _twice(trial: Trial) -> float:
    now_s = send(trial.ranks, signal.SIGINT)
    time.sleep(0.005)
    send(trial.ranks, signal.SIGINT)
    return now_s


def _cgroup(trial: Trial) -> float:
    assert trial.cgroup is not None
    now_s = time.monotonic()
    (trial.cgroup / "cgroup.kill").write_text("1")
    return now_s


def _by_itself(trial: Trial) -> float:
    """Wait until the last rank has ended itself, as the job's settings say."""
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


def _slow_driver(node: StubNvml) -> None:
    for gpu in node.gpus:
        gpu.lock_latency_s = 0.02


LIGHT = [
    *(Scenario(f"{number.name} to one rank", partial(_one_rank, number=number)) for number in _TO_RANKS),
    *(Scenario(f"{number.name} to all ranks", partial(_all_ranks, number=number)) for number in _TO_RANKS),
    *(
        Scenario(f"{number.name} to the launcher", partial(_launcher, number=number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ),
    *(
        Scenario(f"{number.name} to the process group", partial(_group, number=number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    ),
    Scenario("SIGKILL to launcher and ranks", _tree),
    Scenario("SIGTERM, 20 ms later SIGKILL", _term_then_kill),
    Scenario("SIGTERM, on which the script goes on; SIGKILL", _term_that_is_ignored, settings={"ignores_term": True}),
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
        Scenario(f"{name}, with loader workers", end, settings={"workers": 2})
        for name, end in (
            ("SIGKILL to one rank", partial(_one_rank, number=signal.SIGKILL)),
            ("SIGKILL to all ranks", partial(_all_ranks, number=signal.SIGKILL)),
            ("SIGTERM to all ranks", partial(_all_ranks, number=signal.SIGTERM)),
        )
    ),
    *(
        Scenario(f"{name}, {when}", end, when=phase, settings=settings)
        for when, phase, settings in (
            ("starting", "starting", {}),
            ("profiling", "profile", {}),
            ("at its end", "closing", {"steps": 20}),
        )
        for name, end in (
            ("SIGTERM to the process group", partial(_group, number=signal.SIGTERM)),
            ("SIGKILL to launcher and ranks", _tree),
        )
    ),
    Scenario("SIGKILL to all, calls of the driver take 20 ms", _tree, prepare=_slow_driver),
    Scenario("SIGKILL to all, the driver is busy for 0.7 s", _while_the_driver_is_busy),
    Scenario("the guardian; when replaced, all ranks", _guardian_then_ranks),
    Scenario("the job's cgroup, the guardian in a scope", _cgroup, settings={"cgroup": True}, has_systemd=True),
    Scenario("the guardian; within 0.5 s all ranks", _guardian_then_ranks_soon, ends_guardian=True),
    Scenario("the guardian and all at once", _with_guardian, ends_guardian=True),
    Scenario(
        "the guardian and all at once, records of locked clocks too",
        _with_guardian,
        ends_guardian=True,
        loses_records=True,
    ),
    Scenario("the job's cgroup, the guardian in it", _cgroup, settings={"cgroup": True}, ends_guardian=True),
]

DEEPSPEED = [
    Scenario("torchrun: SIGTERM to it", partial(_launcher, number=signal.SIGTERM), launcher="torchrun"),
    Scenario("torchrun: SIGINT to it", partial(_launcher, number=signal.SIGINT), launcher="torchrun"),
    Scenario("torchrun: SIGKILL to one rank", partial(_one_rank, number=signal.SIGKILL), launcher="torchrun"),
    Scenario("torchrun: SIGKILL to it and its ranks", _tree, launcher="torchrun"),
    Scenario("torchrun: SIGKILL to all, profiling", _tree, when="profile", launcher="torchrun"),
    # A `deepspeed` of one node does not hand on a SIGTERM: it ends alone, and training goes on.
    Scenario(
        "deepspeed: SIGTERM to the process it starts ranks with",
        partial(_launcher, number=signal.SIGTERM),
        launcher="deepspeed",
    ),
    Scenario("deepspeed: SIGKILL to it and its ranks", _tree, launcher="deepspeed"),
]
