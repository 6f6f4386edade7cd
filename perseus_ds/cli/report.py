"""``perseus-ds report``: one HTML file about a run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from perseus_ds.cli.arguments import RunArguments, argument


@dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments):
    """Show what a run saved, and write one HTML file about it: frontier, timelines, savings (report.html)."""

    examples = (
        "perseus-ds report perseus",
        "perseus-ds report perseus price_per_kwh=0.25 currency=EUR",
    )

    carbon_g_per_kwh: float = argument(
        "emissions of electricity [g CO2 equivalent per kWh]; the default is the world's mean in 2022 (Ember, 2023)",
        436.0,
        at_least=0,
    )
    price_per_kwh: float = argument("price of electricity; the default is an example", 0.10, at_least=0)
    currency: str = argument("currency of the price", "USD")
    pue: float = argument(
        "energy of the data centre per energy of its GPUs (PUE); 1 counts the GPUs alone", 1.0, at_least=1
    )
    tokens_per_sample: int | None = argument("sequence length, for the energy of a token", None, at_least=1)


def run(arguments: Arguments) -> int:
    """Write the report."""
    from perseus_ds.artifacts.evidence import FILE_NAME
    from perseus_ds.cli.inputs import sources_for
    from perseus_ds.report.jobs import Factors, jobs_of, main_job
    from perseus_ds.report.page import as_text, report_page, tiles, write_output

    if (arguments.run / FILE_NAME).is_file():
        return _report_evidence(arguments.run, arguments.out)
    found = sources_for(arguments)
    factors = Factors(**{field.name: getattr(arguments, field.name) for field in fields(Factors)})
    jobs = jobs_of(found)
    shown = tiles(found, main_job(jobs), factors)
    out = write_output(report_page(found, jobs, shown, factors), arguments.out, arguments.run, "report.html")
    print(as_text(shown, simulated=found.simulated))
    for text in found.missing:
        print(f"Not in the report: {text}")
    print(f"Written: {out}")
    return 0


def _report_evidence(folder: Path, out: Path | None) -> int:
    """Write the page about checks on a GPU."""
    from perseus_ds.artifacts.evidence import FILE_NAME, Evidence
    from perseus_ds.report.page import evidence_page, evidence_text, write_output

    evidence = Evidence.load(folder / FILE_NAME)
    written = write_output(evidence_page(evidence), out, folder, "evidence.html")
    print(evidence_text(evidence))
    print(f"Written: {written}")
    return 0
