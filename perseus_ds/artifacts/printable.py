"""Text and numbers of files that may be shown: no control characters, no numbers whose sums overflow."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

# These change the order in which a terminal shows what follows.
_BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_LARGEST = 1e18


def printable(text: str) -> str:
    """Return a text in which each control character, and each lone half of a surrogate pair, is written as its escape.

    Terminals take sequences of control characters for commands. The ends of lines and tabs stay.
    """
    if text.isascii() and text.isprintable():  # nearly all are, and characters one by one take long
        return text
    return "".join(c.encode("unicode_escape").decode() if _is_control(c) else c for c in text)


def log_printable(record: logging.LogRecord) -> bool:
    """Make the text of a line of a log printable; a filter for a logger, which lets all lines pass."""
    with contextlib.suppress(Exception):  # the logger itself says where a text and its values do not fit
        record.msg, record.args = printable(record.getMessage()), ()
    return True


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    return character < " " or "\x7f" <= character <= "\x9f" or "\ud800" <= character <= "\udfff" or character in _BIDI


def bounded(value: Any) -> Any:
    """Return the value of a JSON text with printable texts.

    Raises:
        ValueError: A number is not finite, or too large.
    """
    kind = type(value)
    if kind is float or kind is int:  # most values are numbers
        if not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"a number beyond {_LARGEST:g}")
        return value
    if kind is str:
        return printable(value)
    if kind is list:
        return [bounded(part) for part in value]
    if kind is dict:
        return {printable(key): bounded(part) for key, part in value.items()}
    return value
