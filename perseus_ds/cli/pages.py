"""``perseus-ds report``, ``compare``, ``trace`` and ``plot``: pages and pictures about runs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from perseus_ds.cli.values import Amount, OptionalCount, OptionalIndex, OptionalPath, Paths, RunArguments, Text, limited
from perseus_ds.errors import ConfigError

if TYPE_CHECKING:
    from perseus_ds.report.inputs import Inputs
    from perseus_ds.report.timeline import DrawnTimeline


@dataclass(frozen=True, kw_only=True)
class ReportCommand(RunArguments):
    """Print the savings of a run, and write an HTML page about it (report.html)."""

    examples = (
        "perseus-ds report perseus",
        "perseus-ds report perseus --price-per-kwh 0.25 --currency EUR",
        "perseus-ds report perseus --json",
    )

    carbon_g_per_kwh: Amount = 436.0
    """carbon intensity of electricity [g CO2 equivalent per kWh]; by default the world's mean in 2022 (Ember, 2023)"""
    price_per_kwh: Amount = 0.1
    """price of electricity; the default is an example"""
    currency: str = "USD"
    """currency of the price"""
    pue: Annotated[float, limited(float, at_least=1)] = 1.0
    """energy of the data centre per energy of its GPUs (PUE); 1 counts only the GPUs"""
    tokens_per_sample: OptionalCount = None
    """sequence length, for the energy per token"""
    json: bool = False
    """print all figures as JSON, and write no page"""

    def execute(self) -> int:
        from perseus_ds.artifacts.evidence import FILE_NAME
        from perseus_ds.cli.inputs import progress_bar, sources_for

        if (self.run / FILE_NAME).is_file():
            return _report_evidence(self.run, self.out)
        with progress_bar("reading") as progress:
            from perseus_ds.report.facts import Factors, facts, figures
            from perseus_ds.report.page import html, text, write_output

            found = sources_for(self)
            factors = Factors(**{field.name: getattr(self, field.name) for field in fields(Factors)})
            report = facts(found, factors)
            if not self.json:
                progress("page", 0.5)
                out = write_output(html(report), self.out, self.run, "report.html")
        if self.json:
            print(json.dumps(figures(report, time.time())))
            return 0
        print(text(report))
        for missing in found.missing:
            print(f"Not in the report: {missing}")
        print(f"Written: {out}")
        return 0


def _report_evidence(folder: Path, out: Path | None) -> int:
    from perseus_ds.artifacts.evidence import FILE_NAME, Evidence
    from perseus_ds.report.page import evidence_page, evidence_text, write_output

    evidence = Evidence.load(folder / FILE_NAME)
    written = write_output(evidence_page(evidence), out, folder, "evidence.html")
    print(evidence_text(evidence))
    print(f"Written: {written}")
    return 0


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Compare runs, and write an HTML page about the comparison (comparison.html)."""

    examples = (
        "perseus-ds compare perseus perseus-2",
        "perseus-ds compare perseus perseus-2 --baseline perseus-2 --out compared.html",
    )

    runs: Positional[Paths]
    """output folders of training runs"""
    baseline: Text = None
    """name of the run to compare with; by default the one with the most iterations at default clocks"""
    out: OptionalPath = None
    """file to write, or an existing folder for it; by default in the folder of the first run"""

    def execute(self) -> int:
        from perseus_ds.cli.inputs import progress_bar

        with progress_bar("reading") as progress:
            from perseus_ds.report.comparison import compare, comparison_page, comparison_text
            from perseus_ds.report.inputs import read
            from perseus_ds.report.page import write_output

            runs, steps = [], len(self.runs) + 1
            for number, folder in enumerate(self.runs):
                progress(f"reading {folder}", number / steps)
                runs.append(read(folder))
            progress("page", len(self.runs) / steps)
            comparison = compare(runs, self.baseline)
            out = write_output(comparison_page(comparison), self.out, self.runs[0], "comparison.html")
        print(comparison_text(comparison))
        print(f"Written: {out}")
        return 0


@dataclass(frozen=True, kw_only=True)
class TraceCommand(RunArguments):
    """Write predicted and measured timelines for Perfetto (trace.json)."""

    examples = ("perseus-ds trace perseus",)

    plan: OptionalIndex = None
    """index of the plan on the frontier, 0 is the fastest; by default the plan in use"""

    def execute(self) -> int:
        from perseus_ds.cli.inputs import progress_bar, sources_for

        with progress_bar("reading") as progress:
            from perseus_ds.report.inputs import label
            from perseus_ds.report.page import write_output
            from perseus_ds.report.timeline import chrome_trace, measured_timeline

            found = sources_for(self)
            progress("timelines", 0.5)
            suffix = ", simulated" if found.simulated else ""
            timelines = {f"predicted: {name}{suffix}": each for name, each in _predicted(found, self.plan).items()}
            for run, iteration in found.measured:
                name = f"measured: {label(run, iteration)}{suffix}"
                timelines[name] = measured_timeline(iteration)
            if not timelines:
                raise ConfigError(f"{self.run}: there is no timeline to write. {' '.join(found.missing)}")
            about = {"simulated": found.simulated, "energies": found.energy_notes, "written_by": "perseus-ds"}
            text = json.dumps(chrome_trace(timelines, about, found.profile)) + "\n"
            out = write_output(text, self.out, self.run, "trace.json")
        for missing in found.missing:
            print(f"Not in the trace: {missing}")
        print(f"Written: {out}, with {len(timelines)} timelines; open it at https://ui.perfetto.dev")
        return 0


def _predicted(found: Inputs, number: int | None) -> dict[str, DrawnTimeline]:
    from perseus_ds.report.timeline import timeline

    if found.dag is None or found.profile is None or found.frontier is None:
        return {}
    plans = found.frontier.plans
    number = (found.plan_used or 0) if number is None else number
    if number >= len(plans):
        raise ConfigError(f"--plan {number}: the frontier has plans 0 to {len(plans) - 1}.")
    return {
        "highest clock": timeline(found.dag, found.profile, found.frontier.baseline),
        f"plan {number}": timeline(found.dag, found.profile, plans[number]),
    }


@dataclass(frozen=True, kw_only=True)
class PlotCommand(RunArguments):
    """Draw the frontier, and the pipeline's timeline at the highest clock and under a plan."""

    examples = (
        "perseus-ds plot perseus",
        "perseus-ds plot perseus --out pictures --max-slowdown 0.05",
    )

    out: OptionalPath = None
    """folder for frontier.png and timeline.png; by default the folder of the run"""
    max_slowdown: Amount = 0.0
    """slowdown setting of the plan to draw; by default the fastest plan"""

    def execute(self) -> int:
        from perseus_ds.cli.inputs import check_folder, progress_bar, sources_for

        with progress_bar("reading") as progress:
            from perseus_ds.report.facts import points_of_one_pipeline
            from perseus_ds.report.pictures import frontier_picture, timeline_picture
            from perseus_ds.report.timeline import timeline

            found = sources_for(self)
            if found.frontier is None or found.profile is None or found.dag is None:
                raise ConfigError(f"{self.run}: some inputs of the pictures are missing. {' '.join(found.missing)}")
            measured = points_of_one_pipeline(found)
            if self.runs and not measured:
                raise ConfigError(
                    "--runs: no iterations at default clocks or under a plan in any of them. Train for more steps."
                )
            plan = found.frontier.within(self.max_slowdown)
            before, after = (timeline(found.dag, found.profile, each) for each in (found.frontier.baseline, plan))
            out = check_folder(self.out or self.run)
            progress("frontier.png", 0.5)
            frontier_picture(found.frontier, out / "frontier.png", in_use=plan, measured=measured)
            progress("timeline.png", 0.75)
            timeline_picture(before, after, found.frontier.provenance, out / "timeline.png")
        print(f"Written: {out / 'frontier.png'} and timeline.png")
        return 0
