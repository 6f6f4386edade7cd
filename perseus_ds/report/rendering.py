"""Fills the templates of pages that need nothing else, neither a server nor a network."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2

from perseus_ds import units
from perseus_ds.artifacts.io import write_atomically
from perseus_ds.errors import ConfigError
from perseus_ds.report.palette import PALETTE, SCALE, css
from perseus_ds.runtime.words import event_in_words

_FILTERS = {
    "in_words": event_in_words,
    **{
        name: getattr(units, name)
        for name in (
            "number", "whole", "percent", "joules", "watt_hours", "grams", "watts", "duration", "gpu_time", "money"
        )
    },
}  # fmt: skip


def rendered(template: str, data: Mapping[str, Any], **variables: Any) -> str:
    """Return a page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perseus_ds.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    plotly = importlib.resources.files("perseus_ds.report").joinpath("page/plotly-basic.min.js")
    colours = {"palette": {name: [c.light, c.dark] for name, c in PALETTE.items()}, "scale": SCALE}
    return environment.get_template(template).render(
        data=_as_json({**data, **colours}),
        plotly=plotly.read_text(encoding="utf-8").replace("</script", "<\\/script"),
        palette_css=css(),
        scale=SCALE,
        version=importlib.metadata.version("perseus-ds"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **variables,
    )


def _as_json(data: Mapping[str, Any]) -> str:
    """Return JSON that may stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def write_output(content: str, out: Path | None, folder: Path, name: str) -> Path:
    """Write a file, and return its path.

    Args:
        content: What to write.
        out: The file, or an existing folder to put it in; None for the default.
        folder: Where the file lies by default.
        name: What it is called in a folder.

    Raises:
        ConfigError: It cannot be written there.
    """
    path = out or folder / name
    try:
        if out is not None and out.is_dir():
            path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}). Give another file, out=….") from None
    return path
