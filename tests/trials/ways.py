"""The ways in which jobs are ended."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import psutil
from stub_nvml.controller import StubNvml
from trials.light_job import ENDS
from trials.trial import Trial, Way, kill, tell

_TO_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGKILL)
_GUARDIANS = {"the first guardian": slice(0, 1), "the second guardian": slice(1, 2), "both guardians": slice(0, 2)}


def _all_ranks(trial: Trial, number: int) -> float:
    return tell(trial.ranks, number)


def _one_rank(trial: Trial, number: int) -> float:
    return tell([trial.draw.choice(trial.ranks)], number)


def _launcher(trial: Trial, number: int) -> float:
    """Tell the process that has started the ranks."""
    parent = trial.ranks[0].parent()
    assert parent is not None
    return tell([parent], number)


def _group(trial: Trial, number: int) -> float:
    now_s = time.monotonic()
    os.killpg(trial.launcher.pid, number)
    return now_s


def _tree(trial: Trial) -> float:
    return kill(trial.tree)


def _with_guardians(trial: Trial, which: slice) -> float:
    return kill([*trial.guardians[which], *trial.tree])


def _guardians_then_ranks(trial: Trial, which: slice) -> float:
    """Kill guardians; the ranks follow once others have taken their place."""
    _replace(trial, trial.guardians[which])
    time.sleep(trial.draw.uniform(0.0, 0.5))
    return kill(trial.ranks)


def _replace(trial: Trial, guardians: list[psutil.Process]) -> None:
    """Kill guardians and wait until others have taken their place."""
    kill(guardians)
    trial.wait_until(lambda: trial.has_two_guardians(besides=guardians), "two guardians again")
    trial.look()


def _guardian_then_ranks_soon(trial: Trial, which: slice) -> float:
    """Kill a guardian and, within half a second, the job."""
    kill(trial.guardians[which])
    time.sleep(trial.draw.uniform(0.0, 0.5))
    trial.look()
    return kill(trial.tree)


def _guardian_ranks_successor(trial: Trial) -> float:
    """Kill a guardian, within half a second the job, and then the one that has taken the guardian's place, if any."""
    before = trial.guardians
    now_s = _guardian_then_ranks_soon(trial, slice(0, 1))
    kill(set(trial.guardians) - set(before))
    return now_s


def _guardians_in_turn(trial: Trial) -> float:
    """Stop the ranks; kill each guardian after the other one has started a new one; then kill the ranks."""
    tell(trial.ranks, signal.SIGSTOP)
    for guardian in trial.guardians:
        _replace(trial, [guardian])
    return kill(trial.tree)


def _one_after_the_other(trial: Trial) -> float:
    """Kill the guardians and the ranks one after the other, within a second."""
    for guardian in trial.guardians:
        kill([guardian])
        time.sleep(trial.draw.uniform(0.0, 0.5))
    return kill(trial.tree)


def _term_then_kill(trial: Trial) -> float:
    now_s = tell(trial.ranks, signal.SIGTERM)
    time.sleep(0.02)
    kill(trial.tree)
    return now_s


def _term_that_is_ignored(trial: Trial) -> float:
    now_s = tell(trial.ranks, signal.SIGTERM)
    time.sleep(0.5)
    kill(trial.tree)
    return now_s


def _term_while_one_is_stopped(trial: Trial) -> float:
    """One rank is stopped, the other waits for it in a collective; both get SIGTERM, and SIGKILL a second later."""
    tell(trial.ranks[:1], signal.SIGSTOP)
    time.sleep(0.1)
    tell(trial.ranks, signal.SIGTERM)
    time.sleep(1.0)
    return kill(trial.tree)


def _twice(trial: Trial) -> float:
    now_s = tell(trial.ranks, signal.SIGINT)
    time.sleep(0.005)
    tell(trial.ranks, signal.SIGINT)
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
    *(Way(f"{number.name} to one rank", partial(_one_rank, number=number)) for number in _TO_RANKS),
    *(Way(f"{number.name} to all ranks", partial(_all_ranks, number=number)) for number in _TO_RANKS),
    *(
        Way(f"{number.name} to the launcher", partial(_launcher, number=number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ),
    *(
        Way(f"{number.name} to the process group", partial(_group, number=number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    ),
    Way("SIGKILL to launcher and ranks", _tree),
    Way("SIGTERM, 20 ms later SIGKILL", _term_then_kill),
    Way("SIGTERM, on which the script goes on; SIGKILL", _term_that_is_ignored, settings={"ignores_term": True}),
    Way("SIGTERM while one rank is stopped; SIGKILL", _term_while_one_is_stopped),
    Way("SIGINT twice", _twice),
    *(
        Way(
            f"a rank ends: {name}",
            _by_itself,
            settings={"end_by": name, "small_cgroup": name == "out-of-memory killer"},
        )
        for name in ENDS
    ),
    *(
        Way(f"{name}, with loader workers", end, settings={"workers": 2})
        for name, end in (
            ("SIGKILL to one rank", partial(_one_rank, number=signal.SIGKILL)),
            ("SIGKILL to all ranks", partial(_all_ranks, number=signal.SIGKILL)),
            ("SIGTERM to all ranks", partial(_all_ranks, number=signal.SIGTERM)),
        )
    ),
    *(
        Way(f"{name}, {when}", end, when=phase, settings=settings)
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
    Way("SIGKILL to all, calls of the driver take 20 ms", _tree, prepare=_slow_driver),
    Way("SIGKILL to all, the driver is busy for 0.7 s", _while_the_driver_is_busy),
    Way("the first guardian and all at once", partial(_with_guardians, which=_GUARDIANS["the first guardian"])),
    Way("the second guardian and all at once", partial(_with_guardians, which=_GUARDIANS["the second guardian"])),
    *(
        Way(f"{name}; when replaced, all ranks", partial(_guardians_then_ranks, which=which))
        for name, which in _GUARDIANS.items()
    ),
    *(
        Way(f"{name}; within 0.5 s all ranks", partial(_guardian_then_ranks_soon, which=_GUARDIANS[name]))
        for name in ("the first guardian", "the second guardian")
    ),
    Way("the first guardian; within 0.5 s all ranks; its successor", _guardian_ranks_successor),
    Way("all ranks are stopped; each guardian, when the other is replaced; all ranks", _guardians_in_turn),
    Way("the job's cgroup, guardians in scopes", _cgroup, settings={"cgroup": True}, has_systemd=True),
    Way(
        "one guardian, the other one, all ranks, within 1 s",
        _one_after_the_other,
        ends_guardians=True,
    ),
    Way(
        "both guardians and all at once",
        partial(_with_guardians, which=_GUARDIANS["both guardians"]),
        ends_guardians=True,
    ),
    Way(
        "both guardians and all at once, records of locked clocks too",
        partial(_with_guardians, which=_GUARDIANS["both guardians"]),
        ends_guardians=True,
        loses_records=True,
    ),
    Way("the job's cgroup, guardians in it", _cgroup, settings={"cgroup": True}, ends_guardians=True),
]

DEEPSPEED = [
    Way("torchrun: SIGTERM to it", partial(_launcher, number=signal.SIGTERM), launcher="torchrun"),
    Way("torchrun: SIGINT to it", partial(_launcher, number=signal.SIGINT), launcher="torchrun"),
    Way("torchrun: SIGKILL to one rank", partial(_one_rank, number=signal.SIGKILL), launcher="torchrun"),
    Way("torchrun: SIGKILL to it and its ranks", _tree, launcher="torchrun"),
    Way("torchrun: SIGKILL to all, profiling", _tree, when="profile", launcher="torchrun"),
    # A `deepspeed` of one node does not hand on a SIGTERM: it ends alone, and training goes on.
    Way(
        "deepspeed: SIGTERM to the process it starts ranks with",
        partial(_launcher, number=signal.SIGTERM),
        launcher="deepspeed",
    ),
    Way("deepspeed: SIGKILL to it and its ranks", _tree, launcher="deepspeed"),
]
