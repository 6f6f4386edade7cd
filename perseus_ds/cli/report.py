"""``perseus-ds report``: one HTML file about a run."""

from __future__ import annotations

from pydantic import Field

from perseus_ds.cli.arguments import compose
from perseus_ds.cli.inputs import RunArguments, sources_for, with_folder
from perseus_ds.report.jobs import jobs_of, main_job
from perseus_ds.report.page import report_page
from perseus_ds.report.rendering import write_output
from perseus_ds.report.savings import Factors
from perseus_ds.report.tiles import as_text, tiles


class ReportArguments(RunArguments):
    """Arguments of the command; ``configs/cli/report.yaml`` explains them."""

    carbon_g_per_kwh: float = Field(ge=0, allow_inf_nan=False)
    price_per_kwh: float = Field(ge=0, allow_inf_nan=False)
    currency: str
    pue: float = Field(ge=1, allow_inf_nan=False)
    tokens_per_sample: int | None = Field(ge=1)


def run(overrides: list[str]) -> int:
    """Write the report."""
    arguments = compose("report", with_folder(overrides), ReportArguments)
    found = sources_for(arguments)
    factors = Factors(
        carbon_g_per_kwh=arguments.carbon_g_per_kwh,
        price_per_kwh=arguments.price_per_kwh,
        currency=arguments.currency,
        pue=arguments.pue,
        tokens_per_sample=arguments.tokens_per_sample,
    )
    jobs = jobs_of(found)
    shown = tiles(found, main_job(jobs), factors)
    out = write_output(report_page(found, jobs, shown, factors), arguments.out, arguments.run, "report.html")
    print(as_text(shown, simulated=found.simulated))
    for text in found.missing:
        print(f"Not in the report: {text}")
    print(f"Written: {out}")
    return 0
