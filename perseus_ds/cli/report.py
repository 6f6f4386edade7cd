"""``perseus-ds report``: one HTML file about a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perseus_ds.cli.arguments import argument
from perseus_ds.cli.run_arguments import RunArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments):
    """Write one HTML file about a run: its frontier, timelines and savings (report.html)."""

    examples: ClassVar = ("perseus-ds report perseus", "perseus-ds report perseus price_per_kwh=0.25 currency=EUR")

    carbon_g_per_kwh: float = argument(
        "emissions of electricity [g CO2 equivalent per kWh]; the default is the world's mean in 2022 (Ember, 2023)",
        436.0,
        at_least=0,
    )
    price_per_kwh: float = argument("price of electricity; the default is an example", 0.10, at_least=0)
    currency: str = argument("currency of the price", "USD")


def run(arguments: Arguments) -> int:
    """Write the report."""
    from perseus_ds.cli.inputs import sources_for
    from perseus_ds.report.page import write_page
    from perseus_ds.report.savings import Factors

    found = sources_for(arguments)
    out = arguments.out or arguments.run / "report.html"
    factors = Factors(arguments.carbon_g_per_kwh, arguments.price_per_kwh, arguments.currency)
    write_page(found, factors, out)
    for text in found.missing:
        print(f"Not in the report: {text}")
    print(f"Written: {out}")
    return 0
