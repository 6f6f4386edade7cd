"""Output that several commands share: a frontier in a few lines, a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from perseus_ds.artifacts.certificates import FILE_NAME as CERTIFICATES
from perseus_ds.artifacts.frontier import Frontier, describe
from perseus_ds.errors import ConfigError


def check_folder(out: Path) -> Path:
    """Check, before anything is computed, that a folder for a command's output can be made and written to; return it.

    Raises:
        ConfigError: It cannot.
        OSError: There can be no such path.
    """
    existing = next(path for path in (out, *out.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{out}: cannot be a folder ({existing} is a file). Give another one, out=….")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{out}: nothing can be written to {existing}. Give another folder, out=….")
    return out


def save_and_summarise(frontier: Frontier, profile: Path, out: Path, *, certificates: bool = False) -> str:
    """Save a frontier with the path of its profile, and return the lines to print about it."""
    provenance = frontier.provenance.model_copy(update={"profile": str(profile)})
    path = replace(frontier, provenance=provenance).save(out, certificates=certificates)
    more = f"\nWritten: {path.with_name(CERTIFICATES)}" if certificates else ""
    return f"{frontier_summary(frontier)}\nWritten: {path} and {path.with_suffix('.csv').name}{more}"


def frontier_summary(frontier: Frontier) -> str:
    """Return how many plans a frontier has, their times, and what they save."""
    figures = describe(frontier)
    fastest, provenance = frontier.plans[0], frontier.provenance
    slowdown = fastest.time_s / frontier.t_min_s - 1
    lines = [
        f"{figures['plans']} plans for {provenance.stages} stages and {provenance.micro_batches} micro-batches "
        f"({provenance.schedule}, solver {provenance.solver})",
        f"  all at the highest clock  {frontier.baseline.time_s:10.4f} s  {frontier.baseline.energy_j:12.2f} J",
        f"  fastest plan              {fastest.time_s:10.4f} s  {fastest.energy_j:12.2f} J  "
        f"saves {figures['saving_at_t_min']:.1%} at {slowdown:+.2%} time against T_min",
        f"  least energy (T*)         {figures['t_star_s']:10.4f} s  {frontier.plans[-1].energy_j:12.2f} J  "
        f"saves {figures['saving_at_t_star']:.1%}",
    ]
    if figures["mean_gap"] is not None:
        mean, worst = figures["mean_gap"], figures["worst_gap"]
        lines.append(f"  above the lower bound     mean {mean:.3%}, worst {worst:.3%} of the energy")
    lines.append("  Energies are per iteration of one pipeline, one GPU per rank.")
    if provenance.simulated:
        lines.append("  The profile is SIMULATED: no GPU was measured.")
    return "\n".join(lines)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on stderr for work that takes more than a second.

    Yields a function that takes the name of the present step and the fraction done, 0 to 1.
    """
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, bar_format=layout, delay=1.0, leave=False, disable=None) as bar:

        def progress(what: str, done: float) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(done - bar.n)

        yield progress
