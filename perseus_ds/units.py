"""Formats figures with suitable units for people, and makes texts printable.

Figures have a few significant digits and no exponent. Texts have no control characters. Numbers in files that are so
large that sums would overflow are an error.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

J_PER_KWH = 3.6e6
_NONE = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NARROW NO-BREAK SPACE}"
_ASCII = str.maketrans(
    {_SPACE: " ", _MINUS: "-", _NONE: "-", "\N{PLUS-MINUS SIGN}": "+/-", "\N{MULTIPLICATION SIGN}": "x"}
)
# These characters change the order in which a terminal displays the text that follows.
_BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_LARGEST = 1e18


def number(value: float | None, digits: int = 4, *, like: float | None = None) -> str:
    """Format a number with thousands separated, and with the given number of significant digits.

    The number of decimals may be that of another number with which it is compared.
    """
    if value is None or not math.isfinite(value):
        return _NONE
    if value == 0:
        return "0"
    model = like or value
    exponent = int(f"{model:.{digits - 1}e}".partition("e")[2])
    decimals = max(0, digits - 1 - exponent)
    return f"{value:,.{decimals}f}".replace(",", _SPACE).replace("-", _MINUS)


def whole(value: float) -> str:
    """Format a count with thousands separated."""
    return f"{value:,.0f}".replace(",", _SPACE)


def percent(value: float | None, decimals: int = 1) -> str:
    """Format a fraction as a signed percentage."""
    if value is None or not math.isfinite(value):
        return _NONE
    text = f"{100 * value:+.{decimals}f}{_SPACE}%".replace("-", _MINUS)
    return text if any(digit in text for digit in "123456789") else text[1:]


def plain(text: str) -> str:
    """Return a text for terminals: figures in ASCII, control characters replaced by spaces."""
    return "".join(character if character.isprintable() else " " for character in text.translate(_ASCII))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines, the first column aligned left and the others right."""
    table = [[plain(cell) for cell in row] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
    aligned = ([name.ljust(first), *map(str.rjust, cells, others)] for name, *cells in table)
    return ["  ".join(cells).rstrip() for cells in aligned]


def joules(value_j: float | None, *, like: float | None = None) -> str:
    """Format an energy, in J to GJ. It may have the unit of another energy with which it is compared."""
    return _scaled(value_j, {"GJ": 1e9, "MJ": 1e6, "kJ": 1e3, "J": 1.0}, like)


def watt_hours(value_j: float | None) -> str:
    """Format an energy [J] in Wh to GWh, the units of electricity bills."""
    return _scaled(value_j, {"GWh": 3.6e12, "MWh": 3.6e9, "kWh": 3.6e6, "Wh": 3.6e3})


def grams(value_g: float | None) -> str:
    """Format a mass, in g to t."""
    return _scaled(value_g, {"t": 1e6, "kg": 1e3, "g": 1.0})


def watts(value_w: float | None, *, like: float | None = None) -> str:
    """Format a power, in W to MW. It may have the unit of another power with which it is compared."""
    return _scaled(value_w, {"MW": 1e6, "kW": 1e3, "W": 1.0}, like)


def watts_between(lowest_w: float | None, highest_w: float | None) -> str:
    """Format two powers in the unit of the higher one, such as ``0.861 to 1.255 kW``."""
    return f"{watts(lowest_w, like=highest_w).split(' ')[0]} to {watts(highest_w)}"


def duration(value_s: float | None, *, like: float | None = None) -> str:
    """Format a time, in ms to days. It may have the unit of another time with which it is compared."""
    return _scaled(value_s, {"days": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}, like)


def gpu_time(value_s: float | None) -> str:
    """Format GPU-seconds, in GPU-seconds to GPU-hours."""
    return _scaled(value_s, {"GPU-h": 3_600.0, "GPU-min": 60.0, "GPU-s": 1.0})


def money(value: float | None, currency: str) -> str:
    """Format an amount of money: two decimals, or three significant digits if it is below 1."""
    if value is None or not math.isfinite(value):
        return _NONE
    text = number(value, 3) if abs(value) < 1 else f"{value:,.2f}".replace(",", _SPACE).replace("-", _MINUS)
    return f"{text} {currency}"


def _scaled(value: float | None, sizes: Mapping[str, float], like: float | None = None) -> str:
    """Format a value with four digits, in the largest unit in which it, or the value ``like``, is at least 1."""
    if value is None or not math.isfinite(value):
        return _NONE
    model = like if like and math.isfinite(like) else value
    # A value that rounds up to the next unit uses that unit: 999.96 J is 1.000 kJ.
    fitting = (unit for unit, size in sizes.items() if abs(model) >= 0.99995 * size)
    unit = next(fitting, list(sizes)[-1])
    return f"{number(value / sizes[unit], like=model / sizes[unit])} {unit}"


def printable(text: str) -> str:
    """Return a text with control characters and lone surrogates replaced by escape sequences.

    Terminals interpret sequences of control characters as commands. Line ends and tabs are kept.
    """
    if text.isascii() and text.isprintable():  # most texts are, and the check of single characters is slow
        return text
    return "".join(c.encode("unicode_escape").decode() if _is_control(c) else c for c in text)


def log_printable(record: logging.LogRecord) -> bool:
    """Make the text of a log record printable, as a logger's filter that accepts all records."""
    with contextlib.suppress(Exception):  # the logger itself reports arguments that do not fit the format
        record.msg, record.args = printable(record.getMessage()), ()
    return True


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    return character < " " or "\x7f" <= character <= "\x9f" or "\ud800" <= character <= "\udfff" or character in _BIDI


def bounded(value: Any) -> Any:
    """Return a value parsed from JSON with its texts made printable.

    Raises:
        ValueError: If a number is not finite or too large.
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
