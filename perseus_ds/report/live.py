"""Jobs while they run, in a terminal: their records, the screen of ``watch`` and ``control status``, and its keys."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from perseus_ds.artifacts.run_records import FILE_NAME, RecordFollower
from perseus_ds.errors import ConfigError
from perseus_ds.policy.control_socket import ADDRESS_FILE, parse_order, send_order
from perseus_ds.runtime.progress import JobFacts, JobLog
from perseus_ds.runtime.words import PHASES, changes, limits_in_words, policy_in_words
from perseus_ds.units import duration, joules, number, percent, plain, printable, watt_hours, watts

_PERIOD_S = 1.0
_KEYS = "[p] pause  [r] resume  [o] policy  [q] leave"
_ENTER, _ERASE, _ESCAPE, _LEAVE = "\r\n", "\x7f\b", "\x1b", "q"


class JobFollower:
    """Follows one job.

    Attributes:
        records: What it reads them by.
        problem: Why its records cannot be read now; empty where they can.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = RecordFollower(folder)
        self.problem = ""
        self._name = printable(folder.resolve().name)
        self._log = JobLog(self._name)

    def facts(self, now: float) -> JobFacts:
        """Read what is new and return the facts; those known before where it cannot be read."""
        self.problem = ""
        try:
            for is_another_file, records in self.records.read():
                if is_another_file:
                    self._log = JobLog(self._name)
                self._log.add(records)
        except OSError as error:  # a shared disk that does not answer, a file that is being replaced
            self.problem = str(error)
        return self._log.facts(now)


class Jobs:
    """Follows all jobs of a folder: its own, or those of the folders in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followers: dict[Path, JobFollower] = {}

    def followers(self) -> list[JobFollower]:
        """Return one for each job, those that have begun since the last call too.

        Raises:
            ConfigError: There is no job.
        """
        folder = self._folder
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; expected the output_dir of a training run.")
        for path in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
            if path not in self._followers and (path / FILE_NAME).is_file():
                self._followers[path] = JobFollower(path)
        if not self._followers:
            raise ConfigError(
                f"{folder}: no {FILE_NAME} in it or in a folder of it. A job writes it when it starts; expected the "
                "output_dir of a training run."
            )
        return list(self._followers.values())


_MANY = 6
_MOST_PIPELINES = 16
_UNITS = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))


def title(facts: JobFacts) -> str:
    """Return the job, its GPUs and its mode."""
    parts = [facts.gpu or "", f"{facts.mode} mode" if facts.mode else ""]
    parts.append(f"{facts.starts} starts" if facts.starts > 1 else "")
    if facts.simulated and "simulated" not in (facts.gpu or ""):
        parts.append("SIMULATED")
    return ": ".join(part for part in (facts.name, ", ".join(filter(None, parts))) if part)


def state(facts: JobFacts) -> str:
    """Return whether the job runs, and at which step it is."""
    step = "no step yet" if facts.step is None else f"step {facts.step}"
    if facts.step is not None and facts.total_steps:
        step += f" of {facts.total_steps}"
    if facts.ended:
        return f"ended at {step}"
    ago = "" if facts.silent_s is None else f", {about(facts.silent_s)} ago"
    return f"{step}{ago}{': no record since; killed, or busy outside of iterations' if facts.is_silent else ''}"


def phase(facts: JobFacts) -> str:
    """Return what the job does, and what comes next."""
    if facts.phase is None:
        return (facts.unfinished or "ended") if facts.ended else "starting"
    text = PHASES.get(facts.phase, facts.phase)
    if facts.phase == "run" and facts.plan is not None:
        text = f"running under plan {facts.plan.plan}"
    if facts.next_phase is None:
        return text
    following = PHASES.get(facts.next_phase, facts.next_phase)
    when = "" if facts.next_in_s is None else f" in about {about(facts.next_in_s)}" if facts.next_in_s >= 1 else " soon"
    return f"{text}; then{when}: {following}"


def about(time_s: float) -> str:
    """Return a time in whole units, as estimates need no more."""
    size, unit = next(((size, unit) for size, unit in _UNITS if time_s >= 2 * size), (1.0, "s"))
    return f"{time_s / size:.0f} {unit}"


def end(facts: JobFacts) -> str:
    """Return when the job is done."""
    if facts.ended:
        return "ended"
    if facts.total_steps is None:
        return "not known: the policy names no total_steps"
    return "not known yet" if facts.remaining_s is None else f"in about {about(facts.remaining_s)}"


def energy(facts: JobFacts) -> str:
    """Return time and energy so far."""
    text = f"{joules(facts.energy_j)} ({watt_hours(facts.energy_j)}) in {facts.iterations} iterations"
    unread = f"; the energy of {facts.without_energy} could not be read" if facts.without_energy else ""
    return f"{text}, {duration(facts.time_s)}{unread}"


def saved(facts: JobFacts) -> str:
    """Return what the plans saved so far, profiling not counted."""
    if facts.saved is None:
        return "nothing yet: no iteration under a plan" if not facts.planned else "not known"
    energy = f"{joules(abs(facts.saved_j))} {'saved' if facts.saved_j >= 0 else 'more used'}"
    time = f"{duration(abs(facts.gained_s))} {'gained' if facts.gained_s >= 0 else 'lost'}"
    return f"{energy} ({percent(-facts.saved)}), {time}, in {facts.planned} iterations under plans"


def profiling(facts: JobFacts) -> str:
    """Return what profiling took; empty if there was none."""
    if not facts.profiling_s and not facts.profiling_j:
        return ""
    amounts = ((facts.profiling_s, duration), (facts.profiling_j, joules))
    parts = (f"{write(abs(value))} {'less' if value < 0 else 'more'}" for value, write in amounts)
    return f"{' and '.join(parts)} than at default clocks"


def pipelines(facts: JobFacts) -> str:
    """Return energy and saving of each pipeline, if there are several."""
    if len(facts.pipelines) < 2:
        return ""
    shown = [
        f"{each.pipeline}: {joules(each.energy_j)}"
        + (f", {joules(each.saved_j)} saved" if facts.saved is not None else "")
        for each in facts.pipelines[:_MOST_PIPELINES]
    ]
    if rest := facts.pipelines[_MOST_PIPELINES:]:
        least, most = (joules(choose(each.energy_j for each in rest)) for choose in (min, max))
        shown.append(f"{rest[0].pipeline} to {rest[-1].pipeline}: {least} to {most} each")
    return "; ".join(shown)


def reached_by(facts: JobFacts) -> str:
    """Return which ranks do not reach the clock that they were asked for."""
    below = [
        f"rank {rank} at {facts.clocks_reached_mhz[rank]} of {facts.clocks_asked_mhz[rank]} MHz"
        for rank in facts.ranks_below_their_clock
    ]
    more = f" and {len(below) - _MANY} more" if len(below) > _MANY else ""
    return f"not reached: {', '.join(below[:_MANY])}{more}" if below else "reached by all ranks"


def problems(facts: JobFacts) -> str:
    """Return what does not work; empty if nothing."""
    ranks = ", ".join(map(str, facts.failed_ranks[:_MANY]))
    more = max(0, len(facts.failed_ranks) - _MANY) + facts.more_failed_ranks
    return f"fallen back to default clocks: rank {ranks}{f' and {more} more' if more else ''}" if ranks else ""


_BLOCKS = "\N{LOWER ONE EIGHTH BLOCK}▂▃▄▅▆▇\N{FULL BLOCK}"
_ASCII_BLOCKS = "_.-~=+*#"
_FLAT = 0.02
"""Values that differ by less than this fraction are drawn at one height."""
_LABEL = 10
_LEAST_EVENTS = 1
_LEAST_NAME = 8
_COLUMNS = ("job", "step", "iter.", "power", "time", "energy", "saved", "end in", "phase")
_SIMULATED = "* GPUs are SIMULATED"


@dataclass(frozen=True)
class JobScreen:
    """All facts of a job, a row each.

    Attributes:
        height: The number of rows there is room for; None for as many as it takes, with long rows folded.
        footer: The last row, such as the keys.
    """

    facts: JobFacts
    height: int | None = None
    footer: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        draws = Drawing(options.encoding, max(8, options.max_width - _LABEL - 2))
        rows = _rows(self.facts, draws)
        events = _events(self.facts)
        height, is_cut = self.height, self.height is not None
        if height is not None:
            height -= math.ceil(len(self.footer) / options.max_width)
            events = events[-max(_LEAST_EVENTS, height - len(rows)) :]
        rows += [("" if number else "events", text) for number, text in enumerate(events)]
        table = Table.grid(padding=(0, 1), expand=False)
        table.add_column(style="bold", no_wrap=True, min_width=_LABEL)
        table.add_column(no_wrap=is_cut, overflow="fold")
        for label, text in rows[:height]:
            if is_cut:
                text.truncate(options.max_width - _LABEL - 1, overflow="ellipsis")
            table.add_row(label, text)
        yield table
        if self.footer:
            yield Text(self.footer, style="dim", overflow="fold")


class Drawing:
    """Draws figures as characters."""

    def __init__(self, encoding: str, width: int) -> None:
        self._blocks = _BLOCKS if encoding.lower().startswith("utf") else _ASCII_BLOCKS
        self._width = width

    def strip(self, values: Sequence[float | None], spread: Sequence[float | None] = ()) -> str:
        """Return one character for each value, or for each group of neighbours if there are too many.

        Args:
            values: The values; None is drawn as a space.
            spread: Further values that the heights are relative to.
        """
        known = [value for value in (*values, *spread) if value is not None]
        if not known:
            return ""
        low, high = min(known), max(known)
        is_flat = high - low <= _FLAT * abs(high)
        group = math.ceil(len(values) / self._width)
        drawn = []
        for begin in range(0, len(values), group):
            part = [value for value in values[begin : begin + group] if value is not None]
            height = 0.5 if is_flat or not part else (min(part) - low) / (high - low)
            drawn.append(self._blocks[round(height * (len(self._blocks) - 1))] if part else " ")
        return "".join(drawn)

    def last(self, values: Sequence[float | None], reserved: int) -> Sequence[float | None]:
        """Return the last values, as many as there is room for beside some characters."""
        return values[-max(1, self._width - reserved) :]


def _rows(facts: JobFacts, draws: Drawing) -> list[tuple[str, Text]]:
    plan, rows = facts.plan, list[tuple[str, Text]]()

    def add(label: str, text: str, style: str = "") -> None:
        if text:
            rows.append((label, Text(plain(text), style)))

    add("job", title(facts), "bold")
    add("state", state(facts), "red" if facts.is_silent else "")
    add("phase", phase(facts), "cyan")
    add("policy", policy_in_words(facts.policy).removeprefix("policy ") if facts.policy else "none")
    add("pending", facts.pending or "", "yellow")
    add("end", end(facts))
    if plan is not None:
        add(f"plan {plan.plan}", f"against {plan.baseline}")
        add("  promised", changes(plan.promised_slowdown, plan.promised_saving))
        real = f"{changes(plan.slowdown, plan.saving)} (typical of {plan.iterations} iterations)"
        unknown = "no iteration yet that is typical of it"
        add("  real", unknown if plan.slowdown is None else real, _good_or_bad(plan.saving))
    add("energy", energy(facts))
    add("saved", saved(facts), _good_or_bad(facts.saved))
    add("profiling", profiling(facts))
    add("pipelines", pipelines(facts))
    rows += _clocks(facts, draws)
    if facts.iteration_s is not None:
        rows.append(("time", _spark(draws, facts.recent_times_s, duration(facts.iteration_s))))
    if facts.power_w is not None:
        cap = "" if facts.cap_w is None else f", cap {watts(facts.cap_w)} by {facts.cap_source}"
        text = f"{watts(facts.power_w)}, now {watts(facts.present_power_w)}{cap}"
        rows.append(("power", _spark(draws, facts.recent_powers_w, text)))
    if facts.power_window_s is not None:
        change = f"{watts(facts.power_change_w)} at most from one to the next"
        each = f" (each of {duration(facts.power_window_s)})"
        add("  a second", f"{watts(facts.lowest_power_w)} to {watts(facts.highest_power_w)}, {change}{each}")
    add("limited", limits_in_words(facts.limits, facts.more_limits), "yellow")
    if facts.straggler is None:
        add("straggler", "none")
    else:
        times = f"{number(facts.straggler_slowdown, 3)} times as long as the others"
        add("straggler", f"pipeline {facts.straggler} takes {times}", "yellow")
    add("problem", problems(facts), "red")
    return rows


def _clocks(facts: JobFacts, draws: Drawing) -> list[tuple[str, Text]]:
    asked, reached = facts.clocks_asked_mhz, facts.clocks_reached_mhz
    requested = sorted({clock for clock in asked if clock is not None})
    if not requested:
        return [("clocks", Text("default"))]
    below = facts.ranks_below_their_clock
    strip = Text(draws.strip(reached, asked))
    for rank in below if len(strip) == len(reached) else ():
        strip.stylize("red", rank, rank + 1)
    text = Text.assemble(strip, "  ", (reached_by(facts), "red" if below else ""))
    span = " to ".join(str(clock) for clock in dict.fromkeys((requested[0], requested[-1])))
    return [("asked", Text(f"{draws.strip(asked, reached)}  {span} MHz, by rank")), ("reached", text)]


def _spark(draws: Drawing, values: Sequence[float | None], typical: str) -> Text:
    text = plain(typical)
    return Text.assemble((draws.strip(draws.last(values, len(text) + 2)), "blue"), "  ", text)


def _events(facts: JobFacts) -> list[Text]:
    found = []
    for event in facts.events:
        when = time.strftime("%H:%M:%S  ", time.localtime(event.time)) if event.time else ""
        found.append(Text(f"{when}{plain(event.text)}"))
    return found


def _good_or_bad(saving: float | None) -> str:
    return "" if saving is None else "green" if saving >= 0 else "red"


@dataclass(frozen=True)
class JobsTable:
    """A line for each job.

    Attributes:
        height: The number of lines there is room for, of which the last jobs are shown; None for all.
    """

    jobs: Sequence[JobFacts]
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        notes = [_SIMULATED] if any(facts.simulated for facts in self.jobs) else []
        shown = self.jobs if self.height is None else self.jobs[-max(1, self.height - 1 - len(notes)) :]
        rows = [_COLUMNS, *(tuple(map(plain, _cells(facts))) for facts in shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[0] = max(_LEAST_NAME, min(widths[0], options.max_width - sum(widths[1:]) - len(widths) + 1))
        for place, row in enumerate(rows):
            name = Text(row[0])
            name.truncate(widths[0], overflow="ellipsis", pad=True)
            others = (f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
            style = "bold" if place == 0 else "red" if shown[place - 1].is_silent else ""
            yield Text(" ".join([name.plain, *others, row[-1]]), style=style, no_wrap=True, overflow="ellipsis")
        yield from map(Text, notes)


def _cells(facts: JobFacts) -> tuple[str, ...]:
    plan = facts.plan
    phase = "ended" if facts.ended else "silent" if facts.is_silent else facts.phase or "starting"
    if phase == "run" and plan is not None:
        phase = f"plan {plan.plan}"
    return (
        facts.name,
        "-" if facts.step is None else str(facts.step),
        "-" if facts.iteration_s is None else duration(facts.iteration_s),
        "-" if facts.power_w is None else watts(facts.power_w),
        "-" if plan is None else percent(plan.slowdown),
        "-" if plan is None or plan.saving is None else percent(-plan.saving),
        "-" if facts.saved is None else joules(facts.saved_j),
        "-" if facts.remaining_s is None else about(facts.remaining_s),
        f"{phase}*" if facts.simulated else phase,
    )


def print_json(jobs: Jobs, *, once: bool) -> None:
    """Print the facts of each job in a line, and again when there are new records, until all jobs have ended."""
    printed: dict[Path, str] = {}
    while True:
        is_over = True
        for follower in jobs.followers():
            facts = follower.facts(time.time())
            is_over &= facts.ended
            # What only time changes is no news.
            unchanging = facts.model_dump_json(exclude={"silent_s", "next_in_s", "remaining_s"})
            if printed.get(follower.folder) != unchanging:
                printed[follower.folder] = unchanging
                print(facts.model_dump_json(), flush=True)
        if once or is_over:
            return
        time.sleep(_PERIOD_S)


def print_once(jobs: Jobs, console: Console) -> None:
    """Print how the jobs go now."""
    followers = jobs.followers()
    facts = [follower.facts(time.time()) for follower in followers]
    console.print(JobScreen(facts[0]) if len(facts) == 1 else JobsTable(facts))
    for text in _troubles(followers):
        console.print(text, markup=False)


def watch(jobs: Jobs, console: Console) -> None:
    """Show how the jobs go until all have ended, or somebody leaves; then print it once more.

    Where there is no job yet, wait for one.
    """
    keys = Keys()
    with _single_characters(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                followers = jobs.followers()
            except ConfigError as error:
                live.update(Text(f"{error}\nWaiting for a job to start there.  [q] leave"), refresh=True)
                if _goes_on(keys):
                    continue
                return
            facts = [follower.facts(time.time()) for follower in followers]
            first, height = followers[0].folder, live.console.size.height
            takes_orders = len(facts) == 1 and not facts[0].ended and (first / ADDRESS_FILE).is_file()
            keys.folder = first if takes_orders else None
            footer = "; ".join([*_troubles(followers), keys.footer])
            view = JobsTable(facts, height) if len(facts) > 1 else JobScreen(facts[0], height, footer)
            live.update(view, refresh=True)
            if all(each.ended for each in facts) or not _goes_on(keys):
                break
    print_once(jobs, console)


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
        return "[q] leave" if self.folder is None else self.message or _KEYS

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


def _troubles(followers: list[JobFollower]) -> Iterator[str]:
    for follower in followers:
        if follower.problem:
            yield f"{follower.folder}: its records cannot be read now ({follower.problem})"
        if unreadable := follower.records.unreadable:
            yield f"{follower.folder}: {unreadable} lines of its records cannot be read and are left out"


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
