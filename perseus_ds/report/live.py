"""The live display of running jobs in a terminal, for ``watch`` and ``control status``."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shlex
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.table import Table
from rich.text import Text

from perseus_ds.artifacts.io import check_is_folder, has_file
from perseus_ds.artifacts.run_events import goal_in_words, limits_in_words
from perseus_ds.artifacts.run_records import FILE_NAME, RecordFollower
from perseus_ds.artifacts.run_savings import SavingSummary, against_default_clocks, changes
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.errors import ConfigError
from perseus_ds.progress.facts import JobFacts, facts_of, figures_in_words
from perseus_ds.progress.present import PHASES
from perseus_ds.progress.sums import JobsOfFile
from perseus_ds.server.control_socket import ADDRESS_FILE
from perseus_ds.units import duration, joules, number, percent, plain, printable, watt_hours, watts, watts_between

_PERIOD_S = 1.0


class Screen(Console):
    """A console that raises a BrokenPipeError if its reader has gone, instead of ending the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class JobFollower:
    """Follows the job that writes to a folder.

    Attributes:
        problem: Reason why its records cannot be read at present, or empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = RecordFollower(folder)
        self.problem = ""
        self._name = printable(folder.resolve().name)
        self._jobs = JobsOfFile()
        # Facts of the last iteration in timeline.json, and the state of that file when it was read.
        self._timed: dict[str, tuple[float, ...]] = {}
        self._timeline: tuple[int, int] | None = None

    def facts(self, now: float) -> JobFacts:
        """Read new records and return the facts, or those known before if reading fails."""
        self.problem = ""
        try:
            for is_another_file, records in self.records.read():
                if is_another_file:
                    self._jobs = JobsOfFile()
                self._jobs.add(records)
        except OSError as error:  # a shared disk that does not respond, or a file that is being replaced
            self.problem = str(error)
        path = self.folder / "timeline.json"
        with contextlib.suppress(OSError, ConfigError):
            found = path.stat()
            if self._timeline != (found.st_mtime_ns, found.st_ino):
                self._timeline = found.st_mtime_ns, found.st_ino
                for last in TimelineFile.load(path).iterations[-1:]:
                    self._timed = {"waits": tuple(last.waits), "busy_s": tuple(last.busy_s)}
        return facts_of(self._jobs.current, self._name, now).model_copy(update=self._timed)


class Jobs:
    """Follows all jobs of a folder and its subfolders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followers: dict[Path, JobFollower] = {}

    def followers(self) -> list[JobFollower]:
        """Return a follower for each job, including jobs that have started since the last call.

        Raises:
            ConfigError: If there is no job.
        """
        folder = self._folder
        check_is_folder(folder)
        for path in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
            if path not in self._followers and has_file(path, FILE_NAME):
                self._followers[path] = JobFollower(path)
        if not self._followers:
            raise ConfigError(
                f"{folder}: no {FILE_NAME} in this folder or its subfolders. A job writes it when it starts; expected "
                "the output_dir of a training run."
            )
        return list(self._followers.values())


_MANY = 6
_MOST_PIPELINES = 16
_MOST_ORDERS = 6
_UNITS = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))
_BLOCKS = "\N{LOWER ONE EIGHTH BLOCK}▂▃▄▅▆▇\N{FULL BLOCK}"
_ASCII_BLOCKS = "_.-~=+*#"
_FLAT = 0.02
"""Values that differ by less than this fraction are drawn at the same height."""
_LABEL = 10
_Row = tuple[str, str | Text, str]
"""Label, text and style of a row, which is left out if the text is empty."""


@dataclass(frozen=True)
class JobScreen:
    """All facts of a job, one per row, and its last events, the newest first. Long rows are wrapped, or cut."""

    facts: JobFacts
    is_cut: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = _BLOCKS if options.encoding.lower().startswith("utf") else _ASCII_BLOCKS
        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold", no_wrap=True, min_width=_LABEL)
        table.add_column(no_wrap=self.is_cut, overflow="ellipsis" if self.is_cut else "fold")
        of_gpus = _rows_of_gpus(self.facts, blocks, max(8, options.max_width - _LABEL - 2))
        for label, text, style in (*_rows_of_job(self.facts), *_rows_of_energy(self.facts), *of_gpus):
            if text:
                table.add_row(label, text if isinstance(text, Text) else Text(plain(text), style))
        for place, event in enumerate(reversed(self.facts.events)):
            when = time.strftime("%H:%M:%S  ", time.localtime(event.time)) if event.time else ""
            table.add_row("" if place else "events", Text(when + plain(event.text)))
        yield table


def with_footer(view: JobScreen | Table, footer: str, width: int) -> Layout:
    """Return a screen with a footer, which is wrapped if necessary."""
    screen = Layout()
    keys = Text(footer, style="dim", overflow="fold")
    screen.split_column(Layout(view), Layout(keys, size=math.ceil(len(footer) / width)))
    return screen


def strip(values: Sequence[float | None], others: Sequence[float | None], *, blocks: str, width: int) -> str:
    """Draw one of the blocks, from the lowest to the highest, for each value or group of neighbouring values.

    The scale also covers the other values. None is drawn as a space.
    """
    known = [value for value in (*values, *others) if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    is_flat = high - low <= _FLAT * abs(high)
    group = max(1, math.ceil(len(values) / width))
    drawn = []
    for begin in range(0, len(values), group):
        part = [value for value in values[begin : begin + group] if value is not None]
        height = 0.5 if is_flat or not part else (min(part) - low) / (high - low)
        drawn.append(blocks[round(height * (len(blocks) - 1))] if part else " ")
    return "".join(drawn)


def _rows_of_job(facts: JobFacts) -> Iterator[_Row]:
    parts = [facts.gpu or "", f"{facts.mode} mode" if facts.mode else ""]
    parts += [f"{facts.starts} starts"] if facts.starts > 1 else []
    parts += ["SIMULATED"] if facts.simulated and "simulated" not in (facts.gpu or "") else []
    parts += [facts.energy_note] if facts.energy_note else []
    yield "job", ": ".join(filter(None, (facts.name, ", ".join(filter(None, parts))))), "bold"
    yield "state", _state(facts), "red" if facts.is_silent else ""
    yield "phase", _phase(facts), "cyan"
    yield "goal", "" if facts.goal is None or _only_observes(facts) else goal_in_words(facts.goal), ""
    yield "pending", facts.pending or "", "yellow"
    yield "end", _end(facts), ""


def _rows_of_energy(facts: JobFacts) -> Iterator[_Row]:
    if (plan := facts.plan) is not None:
        yield f"plan {plan.plan}", f"promised {changes(plan.promised_slowdown, plan.promised_saving)}", ""
        yield "  real", _saving(plan.real), _colour_of_saving(plan.real)
    unread = f"; the energy of {facts.without_energy} could not be read" if facts.without_energy else ""
    energy = f"{joules(facts.energy_j)} ({watt_hours(facts.energy_j)}) in {facts.iterations} iterations"
    yield "energy", f"{energy}, {duration(facts.time_s)}{unread}", ""
    if not _only_observes(facts):
        yield "saved", _saving(facts.under_plans), _colour_of_saving(facts.under_plans)
    for order in facts.orders[:_MOST_ORDERS]:
        yield "  of these", order.in_words(), ""
    if facts.profiling_s or facts.profiling_j:
        yield "profiling", against_default_clocks(facts.profiling_s, facts.profiling_j), ""
    if facts.whole is not None:
        yield "in all", _saving(facts.whole), _colour_of_saving(facts.whole)
    yield "pipelines", _pipelines(facts), ""
    for figure in figures_in_words(facts):
        first, separator, rest = figure.text.partition("; ")
        yield figure.label, f"{first};" if separator else first, ""
        yield "", rest, ""  # on a separate row, so that 80 columns suffice


def _rows_of_gpus(facts: JobFacts, blocks: str, width: int) -> Iterator[_Row]:
    def drawn(values: Sequence[float | None], text: str, scale: Sequence[float] = ()) -> Text:
        room = max(1, width - len(plain(text)) - 2)
        return Text.assemble((strip(values, scale, blocks=blocks, width=room), "blue"), "  ", plain(text))

    def last_values(values: Sequence[float | None], text: str) -> Text:
        return drawn(values[-max(1, width - len(plain(text)) - 2) :], text)

    yield from _clocks(facts, blocks, width)
    if facts.iteration_s is not None:
        yield "time", last_values(facts.recent_times_s, duration(facts.iteration_s)), ""
    if facts.power_w is not None:
        cap = "" if facts.cap_w is None else f", cap {watts(facts.cap_w, like=facts.power_w)}"
        power = f"{watts(facts.power_w)}, now {watts(facts.present_power_w, like=facts.power_w)}{cap}"
        yield "power", last_values(facts.recent_powers_w, power), ""
    if facts.power_window_s is not None:
        highest_w = facts.highest_power_w
        span = watts_between(facts.lowest_power_w, highest_w)
        change = f"changes of {watts(facts.power_change_w, like=highest_w)} at most"
        yield "  a second", f"{span}, {change} (each of {duration(facts.power_window_s)})", ""
    if waits := facts.waits:
        range_ = f"ranks wait {min(waits):.0%} to {max(waits):.0%} of an iteration"
        yield "waiting", drawn(waits, _few([f"{share:.0%}" for share in waits], range_), (0.0,)), ""
        yield "slowest", _slowest(facts.busy_s), ""
    if powers_w := facts.powers_w:
        most_w = max(powers_w)
        range_ = watts_between(min(powers_w), most_w)
        each = [watts(power_w, like=most_w) for power_w in powers_w]
        yield "GPUs", drawn(powers_w, _few(each, range_), (0.0,)), ""
    yield "limited", limits_in_words(facts.limits, facts.more_limits), "yellow"
    late = f"pipeline {facts.straggler} takes {number(facts.straggler_slowdown, 3)} times as long as the others"
    yield "straggler", *((late, "yellow") if facts.straggler is not None else ("none", ""))
    more = max(0, len(facts.failed_ranks) - _MANY) + facts.more_failed_ranks
    ranks = ", ".join(map(str, facts.failed_ranks[:_MANY])) + (f" and {more} more" if more else "")
    yield "problem", f"fallen back to default clocks: rank {ranks}" if ranks else "", "red"


def _few(texts: Sequence[str], range_: str) -> str:
    return ", ".join(texts) if len(texts) <= _MANY else range_


def _slowest(busy_s: Sequence[float]) -> str:
    if len(busy_s) < 2 or not any(busy_s):
        return ""
    slowest_s = max(busy_s)
    slower = percent(slowest_s * len(busy_s) / sum(busy_s) - 1)
    return f"rank {busy_s.index(slowest_s)}: {duration(slowest_s)} without waiting, {slower} vs. the mean"


def _state(facts: JobFacts) -> str:
    step = "no step yet" if facts.step is None else f"step {facts.step}"
    if facts.step is not None and facts.total_steps:
        step += f" of {facts.total_steps}"
    if facts.ended:
        return f"{'killed' if facts.killed else 'ended'} at {step}"
    ago = "" if facts.silent_s is None else f", {_about(facts.silent_s)} ago"
    return f"{step}{ago}{': no record since; killed, or busy outside of iterations' if facts.is_silent else ''}"


def _phase(facts: JobFacts) -> str:
    if facts.phase is None:
        return (facts.unfinished or "") if facts.ended else "starting"
    text = PHASES.get(facts.phase, facts.phase)
    if facts.phase == "run" and facts.plan is not None:
        text = f"running under plan {facts.plan.plan}"
    if facts.next_phase is None:
        return text
    following, in_s = PHASES.get(facts.next_phase, facts.next_phase), facts.next_in_s
    when = "" if in_s is None else f" in about {_about(in_s)}" if in_s >= 1 else " soon"
    return f"{text}; then{when}: {following}"


def _end(facts: JobFacts) -> str:
    if facts.ended:
        return ""
    if facts.total_steps is None:
        return "unknown: the goal has no total_steps"
    return "not known yet" if facts.remaining_s is None else f"in about {_about(facts.remaining_s)}"


def _about(time_s: float) -> str:
    """Format a time in whole units, for estimates."""
    size, unit = next(((size, unit) for size, unit in _UNITS if time_s >= 2 * size), (1.0, "s"))
    return f"{time_s / size:.0f} {unit}"


def _only_observes(facts: JobFacts) -> bool:
    """Return whether no plan ever runs, so that there is no goal and nothing to save."""
    return facts.mode == "observe"


def _saving(saving: SavingSummary | None) -> str:
    """Describe a saving so that its certainty fits into 80 columns, and what is less important comes last."""
    if saving is None:
        return "nothing yet: no iteration under a plan"
    if saving.saved is None or saving.slowdown is None:
        text = f"{joules(saving.saved_j)} saved in {duration(-saving.gained_s)} more time"
    else:
        text = f"{joules(-saving.saved_j)} energy ({saving.energy}), {saving.time} time"
    text += f": {saving.certainty}; {saving.iterations} iterations"
    text += f", {saving.stalls} with stalls not compared" if saving.stalls else ""
    return text + ("; relative to the profile's prediction" if saving.by_profile else "")


def _pipelines(facts: JobFacts) -> str:
    if len(facts.pipelines) < 2:
        return ""
    shown = [
        f"{each.pipeline}: {joules(each.energy_j)}"
        + (f", {joules(each.saved_j)} saved" if facts.under_plans is not None else "")
        for each in facts.pipelines[:_MOST_PIPELINES]
    ]
    if rest := facts.pipelines[_MOST_PIPELINES:]:
        least_j, most_j = min(each.energy_j for each in rest), max(each.energy_j for each in rest)
        span = f"{joules(least_j, like=most_j)} to {joules(most_j)}"
        shown.append(f"{rest[0].pipeline} to {rest[-1].pipeline}: {span} each")
    return "; ".join(shown)


def _clocks(facts: JobFacts, blocks: str, width: int) -> Iterator[_Row]:
    asked, reached = facts.clocks_asked_mhz, facts.clocks_reached_mhz
    requested = sorted({clock for clock in asked if clock is not None})
    if not requested:
        yield "clocks", "default", ""
        return
    span = " to ".join(str(clock) for clock in dict.fromkeys((requested[0], requested[-1])))
    yield "asked", Text(f"{strip(asked, reached, blocks=blocks, width=width)}  {span} MHz, by rank"), ""
    drawn, below = Text(strip(reached, asked, blocks=blocks, width=width)), facts.ranks_below_their_clock
    for rank in below if len(drawn) == len(reached) else ():
        drawn.stylize("red", rank, rank + 1)
    named = ", ".join(f"rank {rank} at {reached[rank]} of {asked[rank]} MHz" for rank in below[:_MANY])
    more = f" and {len(below) - _MANY} more" if len(below) > _MANY else ""
    text = f"not reached: {named}{more}" if below else "reached by all ranks"
    yield "reached", Text.assemble(drawn, "  ", (text, "red" if below else "")), ""


def _colour_of_saving(saving: SavingSummary | None) -> str:
    if saving is None or saving.saved is None:
        return ""
    return "green" if saving.saved >= 0 else "red"


def jobs_table(jobs: Sequence[JobFacts]) -> Table:
    """Return a table with a row for each job."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("job", overflow="ellipsis", min_width=8)
    for column in ("step", "iter.", "power", "energy", "saved", "end in"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("phase, *SIMULATED" if any(facts.simulated for facts in jobs) else "phase", no_wrap=True)
    for facts in jobs:
        plan, saving = facts.plan, facts.under_plans
        phase = "silent" if facts.is_silent else facts.phase or "starting"
        if facts.ended:
            phase = "killed" if facts.killed else "ended"
        if phase == "run" and plan is not None:
            phase = f"plan {plan.plan}"
        phase += f", {saving.word}" if saving is not None else ""
        cells = (
            "-" if facts.step is None else str(facts.step),
            "-" if facts.iteration_s is None else duration(facts.iteration_s),
            "-" if facts.power_w is None else watts(facts.power_w),
            "-" if saving is None else saving.energy,
            "-" if saving is None else joules(saving.saved_j),
            "-" if facts.remaining_s is None else _about(facts.remaining_s),
            f"*{phase}" if facts.simulated else phase,
        )
        name = Text(plain(facts.name), no_wrap=True, overflow="ellipsis")
        table.add_row(name, *(Text(plain(cell)) for cell in cells), style="red" if facts.is_silent else "")
    return table


def print_json(jobs: Jobs, *, once: bool) -> None:
    """Print the facts of each job as JSON whenever they change, until all have ended."""
    printed: dict[Path, str] = {}
    while True:
        is_over = True
        for follower in jobs.followers():
            facts = follower.facts(time.time())
            is_over &= facts.ended
            # Values that change only with time do not cause a new line.
            unchanging = facts.model_dump_json(exclude={"silent_s", "next_in_s", "remaining_s"})
            if printed.get(follower.folder) != unchanging:
                printed[follower.folder] = unchanging
                print(facts.model_dump_json(), flush=True)
        if once or is_over:
            return
        time.sleep(_PERIOD_S)


def print_once(jobs: Jobs, console: Console) -> None:
    """Print the present state of all jobs."""
    followers = jobs.followers()
    facts = [follower.facts(time.time()) for follower in followers]
    console.print(JobScreen(facts[0]) if len(facts) == 1 else jobs_table(facts))
    for text in _problems(followers):
        console.print(text, markup=False)


def watch(jobs: Jobs, console: Console, control: Callable[[list[str]], str]) -> None:
    """Show the state of all jobs until they have ended or the user quits, then print it once more.

    If there is no job yet, wait for one. ``control`` executes a command, given as arguments of ``perseus-ds control``,
    and returns the answer.
    """
    with _single_key_input() as ask, Live(console=console, screen=True, auto_refresh=False) as live:

        def command() -> str:
            live.stop()
            with contextlib.suppress(KeyboardInterrupt, EOFError):
                return ask("perseus-ds control, such as set --max-slowdown 0.05: ")
            return ""

        keys = Keys(command, control)
        while True:
            try:
                followers = jobs.followers()
            except ConfigError as error:
                live.update(Text(f"{error}\nWaiting for a job to start there.  [q] leave"), refresh=True)
                if _handle_keys(keys):
                    continue
                return
            facts = [follower.facts(time.time()) for follower in followers]
            first, size = followers[0].folder, live.console.size
            takes_commands = len(facts) == 1 and not facts[0].ended and (first / ADDRESS_FILE).is_file()
            keys.folder = first if takes_commands else None
            footer = "; ".join([*_problems(followers), keys.footer])
            several = jobs_table(facts[-max(1, size.height - 2) :]) if len(facts) > 1 else None
            live.start()
            live.update(with_footer(several or JobScreen(facts[0], is_cut=True), footer, size.width), refresh=True)
            if all(each.ended for each in facts) or not _handle_keys(keys):
                break
    print_once(jobs, console)


def _handle_keys(keys: Keys) -> bool:
    """Wait for keys, execute them, and return False if the user quits."""
    with contextlib.suppress(KeyboardInterrupt):
        return all(keys.press(key) for key in _wait_for_keys(_PERIOD_S))
    return False


class Keys:
    """Executes keys that the user presses.

    ``ask`` prompts for a command and returns the text that the user typed. ``control`` executes it, see :func:`watch`.

    Attributes:
        folder: Folder of the job that accepts commands, if any.
    """

    def __init__(self, ask: Callable[[], str], control: Callable[[list[str]], str]) -> None:
        self.folder: Path | None = None
        self._ask, self._control = ask, control
        self._answer = ""

    @property
    def footer(self) -> str:
        """The available keys, or the answer to the last command."""
        if self.folder is None:
            return "[q] leave"
        return self._answer or "[p] pause  [r] resume  [c] command  [q] leave"

    def press(self, key: str) -> bool:
        """Execute a key, and return False if it quits."""
        if key != "q" and self.folder is not None:
            self._answer = ""
            typed = {"p": "pause", "r": "resume"}.get(key) or (self._ask() if key == "c" else "")
            try:
                if words := shlex.split(typed):
                    self._answer = self._control([words[0], str(self.folder), *words[1:]])
            except ValueError as error:  # an unmatched quotation mark
                self._answer = f"{typed}: {error}"
        return key != "q"


def _problems(followers: list[JobFollower]) -> Iterator[str]:
    for follower in followers:
        if follower.problem:
            yield f"{follower.folder}: cannot read its records at present ({follower.problem})"
        if unreadable := follower.records.unreadable:
            yield f"{follower.folder}: {unreadable} lines of its records are invalid and were skipped"


@contextlib.contextmanager
def _single_key_input() -> Iterator[Callable[[str], str]]:
    """Read single keys without echo, and yield a function that prompts for a line."""
    if not sys.stdin.isatty():
        yield lambda prompt: ""
        return
    before = termios.tcgetattr(sys.stdin)

    def ask(prompt: str) -> str:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        try:
            return input(prompt)
        finally:
            tty.setcbreak(sys.stdin)

    try:
        tty.setcbreak(sys.stdin)
        yield ask
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_for_keys(timeout_s: float) -> str:
    """Wait for keys and return them, or only wait if there is no terminal."""
    if not sys.stdin.isatty():
        time.sleep(timeout_s)
        return ""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return ""
    # sys.stdin would buffer further keys, which select does not notice. Only one key is read, because a prompt may
    # follow.
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"
