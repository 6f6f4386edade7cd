"""The screen of ``perseus-ds watch``: rows of one job, or a line for each of several."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from perseus_ds.report.live import phrases
from perseus_ds.report.live.facts import JobFacts, is_below
from perseus_ds.report.units import duration, joules, percent, watts

_BLOCKS = "\N{LOWER ONE EIGHTH BLOCK}▂▃▄▅▆▇\N{FULL BLOCK}"
_ASCII_BLOCKS = "_.-~=+*#"
_FLAT = 0.02
"""Values that differ by less than this fraction are drawn at one height."""
_LABEL = 10
_LEAST_EVENTS = 1
_LEAST_NAME = 8
_COLUMNS = ("job", "step", "iter.", "power", "time", "energy", "saved", "end in", "phase")
_SIMULATED = "* GPUs are SIMULATED"


class JobScreen:
    """All facts of a job, a row each.

    Args:
        facts: The facts.
        height: The number of rows there is room for; None for as many as it takes, with long rows folded.
        footer: The last row, such as the keys.
    """

    def __init__(self, facts: JobFacts, *, height: int | None = None, footer: str = "") -> None:
        self._facts = facts
        self._height = height
        self._footer = footer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        draws = Drawing(options.encoding, max(8, options.max_width - _LABEL - 2))
        rows = list(_rows(self._facts, draws))
        events = _events(self._facts)
        height: int | None = None
        if self._height is not None:
            height = self._height - math.ceil(len(self._footer) / options.max_width)
            events = events[-max(_LEAST_EVENTS, height - len(rows)) :]
        rows += [("" if number else "events", text) for number, text in enumerate(events)]
        table = Table.grid(padding=(0, 1), expand=False)
        is_cut = self._height is not None
        table.add_column(style="bold", no_wrap=True, min_width=_LABEL)
        table.add_column(no_wrap=is_cut, overflow="fold")
        for label, text in rows[:height]:
            if is_cut:
                text.truncate(options.max_width - _LABEL - 1, overflow="ellipsis")
            table.add_row(label, text)
        yield table
        if self._footer:
            yield Text(self._footer, style="dim", overflow="fold")


class Drawing:
    """Draws figures as characters.

    Args:
        encoding: What the terminal understands.
        width: How many characters there is room for.
    """

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
    rows = [
        ("job", Text(phrases.title(facts), style="bold")),
        ("state", Text(phrases.state(facts), style="red" if facts.is_silent else "")),
        ("phase", Text(phrases.phase(facts), style="cyan")),
        ("policy", Text(phrases.policy(facts))),
        ("end", Text(phrases.end(facts))),
    ]
    if facts.plan is not None:
        rows.append((f"plan {facts.plan.plan}", Text(f"against {phrases.compared_with(facts)}")))
        rows.append(("  promised", Text(phrases.promised(facts))))
        rows.append(("  real", Text(phrases.real(facts), style=_good_or_bad(facts.plan.saving))))
    rows.append(("energy", Text(phrases.energy(facts))))
    style = _good_or_bad(facts.saved_j if facts.planned else None)
    rows.append(("saved", Text(phrases.saved(facts), style=style)))
    if text := phrases.profiling(facts):
        rows.append(("profiling", Text(f"{text} than at default clocks")))
    if texts := phrases.pipelines(facts):
        rows.append(("pipelines", Text("; ".join(texts))))
    rows += _clocks(facts, draws)
    if facts.iteration_s is not None:
        rows.append(("time", _spark(draws, facts.recent_times_s, phrases.plain(duration(facts.iteration_s)))))
    if facts.power_w is not None:
        rows.append(("power", _spark(draws, facts.recent_powers_w, phrases.plain(watts(facts.power_w)))))
    rows.append(("straggler", Text(phrases.straggler(facts), style="yellow" if facts.straggler is not None else "")))
    if text := phrases.problems(facts):
        rows.append(("problem", Text(text, style="red")))
    return rows


def _clocks(facts: JobFacts, draws: Drawing) -> list[tuple[str, Text]]:
    asked, reached = facts.clocks_asked_mhz, facts.clocks_reached_mhz
    if not any(asked):
        return [("clocks", Text("default"))]
    below = [is_below(*pair) for pair in zip(asked, reached, strict=False)]
    strip = Text(draws.strip(reached, asked))
    for rank in [rank for rank, is_late in enumerate(below) if is_late and len(strip) == len(reached)]:
        strip.stylize("red", rank, rank + 1)
    text = Text.assemble(strip, "  ", (phrases.reached(facts), "red" if any(below) else ""))
    return [("asked", Text(f"{draws.strip(asked, reached)}  {phrases.asked_for(facts)}, by rank")), ("reached", text)]


def _spark(draws: Drawing, values: Sequence[float | None], typical: str) -> Text:
    return Text.assemble((draws.strip(draws.last(values, len(typical) + 2)), "blue"), "  ", typical)


def _events(facts: JobFacts) -> list[Text]:
    found = []
    for event in facts.events:
        when = time.strftime("%H:%M:%S  ", time.localtime(event.time)) if event.time else ""
        found.append(Text(f"{when}{phrases.plain(event.text)}"))
    return found


def _good_or_bad(saving: float | None) -> str:
    return "" if saving is None else "green" if saving >= 0 else "red"


class JobsTable:
    """A line for each job.

    Args:
        jobs: Their facts.
        height: The number of lines there is room for, of which the last jobs are shown; None for all.
    """

    def __init__(self, jobs: Sequence[JobFacts], *, height: int | None = None) -> None:
        self._jobs = jobs
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        notes = [_SIMULATED] if any(facts.simulated for facts in self._jobs) else []
        room = None if self._height is None else self._height - 1 - len(notes)
        shown = self._jobs if room is None else self._jobs[-max(1, room) :]
        rows = [_COLUMNS, *(tuple(map(phrases.plain, _cells(facts))) for facts in shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[0] = max(_LEAST_NAME, min(widths[0], options.max_width - sum(widths[1:]) - len(widths) + 1))
        for number, row in enumerate(rows):
            name = Text(row[0])
            name.truncate(widths[0], overflow="ellipsis", pad=True)
            others = (f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
            style = "bold" if number == 0 else "red" if shown[number - 1].is_silent else ""
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
        joules(facts.saved_j) if facts.planned else "-",
        "-" if facts.remaining_s is None else phrases.about(facts.remaining_s),
        f"{phase}*" if facts.simulated else phase,
    )
