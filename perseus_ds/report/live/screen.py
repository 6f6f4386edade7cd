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


def jobs_table(jobs: Sequence[JobFacts], *, height: int | None = None) -> Table:
    """Return a table with a line for each job.

    Args:
        jobs: Their facts.
        height: The number of lines there is room for, of which the last jobs are shown; None for all.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("job", no_wrap=True, overflow="ellipsis", ratio=2)
    for name in ("step", "iteration", "power", "time", "energy", "saved", "end in"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True, overflow="ellipsis")
    shown = jobs if height is None else jobs[-max(1, height - 1) :]
    for facts in shown:
        plan = facts.plan
        phase = "ended" if facts.ended else "silent" if facts.is_silent else facts.phase or "starting"
        if phase == "run" and plan is not None:
            phase = f"plan {plan.plan}"
        cells = (
            facts.name,
            "-" if facts.step is None else str(facts.step),
            "-" if facts.iteration_s is None else duration(facts.iteration_s),
            "-" if facts.power_w is None else watts(facts.power_w),
            percent(plan.slowdown) if plan else "-",
            percent(-plan.saving) if plan and plan.saving is not None else "-",
            joules(facts.saved_j) if facts.planned else "-",
            "-" if facts.remaining_s is None else phrases.about(facts.remaining_s),
            f"{phase}{' SIMULATED' if facts.simulated else ''}",
        )
        table.add_row(*map(phrases.plain, cells), style="red" if facts.is_silent else "")
    return table
