"""``perseus-ds report``: one HTML file about a run."""

from __future__ import annotations

from pydantic import Field

from perseus_ds.cli.arguments import compose
from perseus_ds.cli.inputs import RunArguments, sources_for, with_folder
from perseus_ds.report.page import write_page
from perseus_ds.report.savings import Factors


class ReportArguments(RunArguments):
    """Arguments of the command; ``configs/cli/report.yaml`` explains them."""

    carbon_g_per_kwh: float = Field(ge=0, allow_inf_nan=False)
    price_per_kwh: float = Field(ge=0, allow_inf_nan=False)
    currency: str


def run(overrides: list[str]) -> int:
    """Write the report."""
    arguments = compose("report", with_folder(overrides), ReportArguments)
    found = sources_for(arguments)
    out = arguments.out or arguments.run / "report.html"
    factors = Factors(arguments.carbon_g_per_kwh, arguments.price_per_kwh, arguments.currency)
    write_page(found, factors, out)
    for text in found.missing:
        print(f"Not in the report: {text}")
    print(f"Written: {out}")
    return 0
