"""Shows the jobs of a folder in a terminal, again and again, and carries out what keys ask for."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from perseus_ds.cli.output import terminal
from perseus_ds.errors import ConfigError
from perseus_ds.policy.control_socket import ADDRESS_FILE, parse_order, send_order
from perseus_ds.report.live import JobFollower, Jobs, JobScreen, JobsTable
from perseus_ds.runtime.progress import JobFacts

_PERIOD_S = 1.0
_KEYS = "[p] pause  [r] resume  [o] policy  [q] leave"
_ENTER, _ERASE, _ESCAPE, _LEAVE = "\r\n", "\x7f\b", "\x1b", "q"


def print_json(jobs: Jobs, *, once: bool) -> None:
    """Print the facts of each job in a line, and again when there are new records, until all jobs have ended."""
    printed: dict[Path, str] = {}
    while True:
        is_over = True
        for follower in jobs.followers():
            facts = follower.facts(time.time())
            is_over &= facts.ended
            # What only time changes is no news.
            unchanging = facts.model_copy(update={"silent_s": None, "next_in_s": None, "remaining_s": None})
            if printed.get(follower.folder) != (line := unchanging.model_dump_json()):
                printed[follower.folder] = line
                print(facts.model_dump_json(), flush=True)
        if once or is_over:
            return
        time.sleep(_PERIOD_S)


def print_once(jobs: Jobs) -> None:
    """Print how the jobs go now."""
    console = Console(file=terminal())
    followers = jobs.followers()
    facts = [follower.facts(time.time()) for follower in followers]
    console.print(JobScreen(facts[0]) if len(facts) == 1 else JobsTable(facts))
    for text in _troubles(followers):
        console.print(text, markup=False)


def watch(jobs: Jobs) -> None:
    """Show how the jobs go until all have ended, or somebody leaves; then print it once more.

    Where there is no job yet, wait for one.
    """
    keys = Keys()
    with _single_characters(), Live(console=Console(file=terminal()), screen=True, auto_refresh=False) as live:
        while True:
            try:
                followers = jobs.followers()
            except ConfigError as error:
                live.update(Text(f"{error}\nWaiting for a job to start there.  [q] leave"), refresh=True)
                if _goes_on(keys):
                    continue
                return
            facts = [follower.facts(time.time()) for follower in followers]
            keys.folder = _reachable(followers, facts)
            live.update(_view(live.console.size.height, followers, facts, keys), refresh=True)
            if all(each.ended for each in facts) or not _goes_on(keys):
                break
    print_once(jobs)


def _goes_on(keys: Keys) -> bool:
    """Wait for keys, and carry them out; return whether nobody has left."""
    with contextlib.suppress(KeyboardInterrupt):
        return all(keys.press(key) for key in _pressed(_PERIOD_S))
    return False


class Keys:
    """What was typed, and what came of it.

    Attributes:
        folder: Of the job that takes orders; None where there is none.
        message: The answer to the last order.
        policy: The policy as typed so far; None unless one is being typed.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.message = ""
        self.policy: str | None = None

    @property
    def footer(self) -> str:
        """What can be typed, or what is."""
        if self.policy is not None:
            return f"policy, such as slowdown max_slowdown=0.05: {self.policy}_"
        return f"{self.message or _KEYS}" if self.folder is not None else "[q] leave"

    def press(self, key: str) -> bool:
        """Carry out a key; return whether to go on."""
        if self.policy is not None:
            self._type(key)
        elif key == _LEAVE:
            return False
        elif self.folder is not None:
            self.message = ""
            if key == "o":
                self.policy = ""
            elif key in "pr":
                self._order({"command": "pause" if key == "p" else "resume"})
        return True

    def _type(self, key: str) -> None:
        assert self.policy is not None
        if key == _ESCAPE:
            self.policy = None
        elif key in _ENTER:
            words, self.policy = self.policy, None
            if words:
                self._order({"command": "policy", "policy": policy_of(words)})
        elif key in _ERASE:
            self.policy = self.policy[:-1]
        elif key.isprintable():
            self.policy += key

    def _order(self, order: dict[str, object]) -> None:
        assert self.folder is not None
        try:
            parse_order(order)
            self.message = str(send_order(self.folder, order).get("done"))
        except ConfigError as error:
            self.message = " ".join(str(error).split())


def policy_of(words: str) -> dict[str, object]:
    """Return the policy that was typed: its name, then ``key=value``, numbers as such."""
    name, *settings = words.split()
    policy: dict[str, object] = {"name": name.removeprefix("name=")}
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            policy[key] = float(text)
        except ValueError:
            policy[key] = text
    return policy


def _view(height: int, followers: list[JobFollower], facts: list[JobFacts], keys: Keys) -> RenderableType:
    if len(facts) > 1:
        return JobsTable(facts, height=height)
    footer = "; ".join([*_troubles(followers), keys.footer])
    return JobScreen(facts[0], height=height, footer=footer)


def _troubles(followers: list[JobFollower]) -> Iterator[str]:
    for follower in followers:
        if follower.problem:
            yield f"{follower.folder}: its records cannot be read now ({follower.problem})"
        if follower.unreadable:
            yield f"{follower.folder}: {follower.unreadable} lines of its records cannot be read and are left out"


def _reachable(followers: list[JobFollower], facts: list[JobFacts]) -> Path | None:
    if len(followers) > 1 or facts[0].ended or not (followers[0].folder / ADDRESS_FILE).is_file():
        return None
    return followers[0].folder


@contextlib.contextmanager
def _single_characters() -> Iterator[None]:
    """Have the terminal give each key at once, and not show it."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(timeout_s: float) -> str:
    """Wait for keys and return them; without a keyboard, only wait."""
    if not sys.stdin.isatty():
        time.sleep(timeout_s)
        return ""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return ""
    # Not by sys.stdin, which would keep further keys where select cannot see them.
    return os.read(sys.stdin.fileno(), 1024).decode(errors="replace") or _LEAVE
