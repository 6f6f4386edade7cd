"""The ``perseus`` block of a job: of its config, and of the environment variable ``PERSEUS``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.io import parse_json, read_text
from perseus_ds.artifacts.limits import MOST_JSON_BYTES
from perseus_ds.errors import ConfigError
from perseus_ds.runtime.config import PerseusConfig, parse_block

VARIABLE = "PERSEUS"


def settings_of(block: Any) -> PerseusConfig | None:
    """Return the settings of a job; None if neither its own config nor the environment has any.

    Args:
        block: The ``perseus`` block of the job's config; None without one. A key of the variable ``PERSEUS`` (JSON, or
            the path of a JSON file) replaces the same key of the block.

    Raises:
        ConfigError: The message names the key and says what to write instead.
    """
    variable = from_environment()
    if variable is None:
        return None if block is None else parse_block(block)
    if block is not None and not isinstance(block, Mapping):
        return parse_block(block)
    return parse_block({**(block or {}), **variable})


def from_environment() -> Mapping[str, Any] | None:
    """Return the block of the variable ``PERSEUS``; None if it is not set or empty.

    Raises:
        ConfigError: It is neither a JSON object nor the path of a file with one.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    source = VARIABLE
    if not text.startswith("{"):
        source = f"{VARIABLE}={text}"
        try:
            text = read_text(Path(text), ConfigError, "JSON file", MOST_JSON_BYTES)
        except ConfigError as error:
            raise ConfigError(
                f'{source}: expected JSON such as {{"mode": "auto"}} or the path of a JSON file: {error}'
            ) from None
    try:
        block = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{source}: this is not JSON: {error}.") from None
    if not isinstance(block, Mapping):
        raise ConfigError(f'{source}: expected an object such as {{"mode": "auto"}}, got {block!r}.')
    return block
