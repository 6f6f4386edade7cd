"""Output shared by several commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from perseus_ds.errors import ConfigError
from perseus_ds.units import percent, plain, printable

if TYPE_CHECKING:
    from perseus_ds.artifacts.frontier import Frontier


class PrintableText(io.TextIOBase):
    """A stream that makes text printable and writes it to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def terminal(self) -> TextIO:
        """The underlying stream, for screen output, to which only printable text may be written."""
        return self._stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write a text, with escapes for characters that the stream's encoding lacks."""
        safe = printable(text)
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def terminal() -> TextIO:
    """Return the standard output for screen output, to which only printable text may be written."""
    return sys.stdout.terminal if isinstance(sys.stdout, PrintableText) else sys.stdout


def answer_no(command: str, reason: object) -> int:
    """Print the reason why the answer of a command is no, and return its exit code."""
    print(printable(f"perseus-ds {command}: {reason}"), file=sys.stderr)
    return 1


def check_folder(out: Path) -> Path:
    """Check that an output folder can be created and written, and return it.

    Raises:
        ConfigError: If it cannot.
        OSError: If the path is impossible.
    """
    existing = next(path for path in (out, *out.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{out}: cannot be a folder ({existing} is a file). Give another path, --out PATH.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{out}: cannot write to {existing}. Give another folder, --out PATH.")
    return out


def save_and_summarise(frontier: Frontier, profile: Path, out: Path) -> str:
    """Save a frontier with the path of its profile, and return a summary to print."""
    from perseus_ds.artifacts.certificates import FILE_NAME

    provenance = frontier.provenance.model_copy(update={"profile": str(profile)})
    path = replace(frontier, provenance=provenance).save(out)
    more = f"\nWritten: {path.with_name(FILE_NAME)}" if frontier.certificates else ""
    return f"{frontier_summary(frontier)}\nWritten: {path} and {path.with_suffix('.csv').name}{more}"


def frontier_summary(frontier: Frontier) -> str:
    """Return a summary of a frontier: plans, times, savings and alternatives."""
    from statistics import fmean

    from perseus_ds.artifacts.frontier import SLOWDOWNS

    baseline, fastest, frugal = frontier.baseline, frontier.plans[0], frontier.plans[-1]
    gaps = [plan.gap for plan in frontier.plans if plan.gap is not None]
    provenance = frontier.provenance
    slowdown = plain(percent(fastest.time_s / frontier.t_min_s - 1, 2))
    lines = [
        f"{len(frontier.plans)} plans for {provenance.stages} stages and {provenance.micro_batches} micro-batches "
        f"({provenance.schedule}, solver {provenance.solver})",
        f"  all at the highest clock  {baseline.time_s:10.4f} s  {baseline.energy_j:12.2f} J",
        f"  fastest plan              {fastest.time_s:10.4f} s  {fastest.energy_j:12.2f} J  "
        f"saves {1 - fastest.energy_j / baseline.energy_j:.1%} at {slowdown} time against T_min",
        f"  least energy (T*)         {frugal.time_s:10.4f} s  {frugal.energy_j:12.2f} J  "
        f"saves {1 - frugal.energy_j / baseline.energy_j:.1%}",
    ]
    if gaps:
        lines.append(f"  above the lower bound     mean {fmean(gaps):.3%}, worst {max(gaps):.3%} of the energy")
    lines.append("  Energies are per iteration of one pipeline, one GPU per rank.")
    if frontier.alternatives:
        heads = "".join(f"{f'+{slowdown:.0%}':>9}" for slowdown in SLOWDOWNS)
        lines.append(f"  saved at additional time    {heads}")
        for name, saved in frontier.savings().items():
            figures = ("-" if value is None else f"{max(value, 0.0):.1%}" for value in saved)
            lines.append(f"    {name:<26}{''.join(f'{figure:>9}' for figure in figures)}")
        lines.append(f"  {frontier.best_alternative_in_words()}")
    if provenance.simulated:
        lines.append("  The profile is SIMULATED: no GPU was measured.")
    return "\n".join(lines)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on stderr for work that takes more than a second.

    Yields a function that takes the name of the current step and the completed fraction, 0 to 1.
    """
    from tqdm import tqdm

    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, bar_format=layout, delay=1.0, leave=False, disable=None) as bar:

        def progress(what: str, done: float) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(done - bar.n)

        yield progress
