"""Figures and texts for people: some digits, a unit of fitting size, no exponent, and no control characters.

Numbers of files whose sums would overflow are an error.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

J_PER_KWH = 3.6e6
_NONE = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NARROW NO-BREAK SPACE}"
_ASCII = str.maketrans(
    {_SPACE: " ", _MINUS: "-", _NONE: "-", "\N{PLUS-MINUS SIGN}": "+/-", "\N{MULTIPLICATION SIGN}": "x"}
)
# These change the order in which a terminal shows what follows.
_BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_LARGEST = 1e18


def number(value: float | None, digits: int = 4) -> str:
    """Return a figure with so many significant digits, thousands apart."""
    if value is None or not math.isfinite(value):
        return _NONE
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = max(0, digits - 1 - exponent)
    return f"{value:,.{decimals}f}".replace(",", _SPACE).replace("-", _MINUS)


def whole(value: float) -> str:
    """Return a count, thousands apart."""
    return f"{value:,.0f}".replace(",", _SPACE)


def percent(value: float | None, decimals: int = 1) -> str:
    """Return a signed percentage of a fraction."""
    if value is None or not math.isfinite(value):
        return _NONE
    text = f"{100 * value:+.{decimals}f}{_SPACE}%".replace("-", _MINUS)
    return text if any(digit in text for digit in "123456789") else text[1:]


def less_or_more(value: float, decimals: int = 1) -> str:
    """Return a change, as a fraction, in words: ``7.4 % less``."""
    text = percent(value, decimals)
    return f"{text[1:]} {'less' if value < 0 else 'more'}" if text[0] in f"+{_MINUS}" else f"{text} more"


def plain(text: str) -> str:
    """Return a text for terminals: in ASCII as far as it is figures and plain words, without control characters."""
    return "".join(character if character.isprintable() else " " for character in text.translate(_ASCII))


def joules(value_j: float | None) -> str:
    """Return an energy in J to GJ."""
    return _scaled(value_j, {"GJ": 1e9, "MJ": 1e6, "kJ": 1e3, "J": 1.0})


def watt_hours(value_j: float | None) -> str:
    """Return an energy [J] in Wh to GWh, as bills count it."""
    return _scaled(value_j, {"GWh": 3.6e12, "MWh": 3.6e9, "kWh": 3.6e6, "Wh": 3.6e3})


def grams(value_g: float | None) -> str:
    """Return a mass in g to t."""
    return _scaled(value_g, {"t": 1e6, "kg": 1e3, "g": 1.0})


def watts(value_w: float | None) -> str:
    """Return a power in W to MW."""
    return _scaled(value_w, {"MW": 1e6, "kW": 1e3, "W": 1.0})


def duration(value_s: float | None) -> str:
    """Return a time in ms to days."""
    return _scaled(value_s, {"days": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0, "ms": 1e-3})


def gpu_time(value_s: float | None) -> str:
    """Return GPU-seconds in a unit of fitting size, up to GPU-hours."""
    return _scaled(value_s, {"GPU-h": 3_600.0, "GPU-min": 60.0, "GPU-s": 1.0})


def money(value: float | None, currency: str) -> str:
    """Return a sum of money: two decimals, or three digits where it is below 1."""
    if value is None or not math.isfinite(value):
        return _NONE
    text = number(value, 3) if abs(value) < 1 else f"{value:,.2f}".replace(",", _SPACE).replace("-", _MINUS)
    return f"{text} {currency}"


def _scaled(value: float | None, sizes: Mapping[str, float]) -> str:
    """Return a value in the largest unit that makes it at least 1, with four digits."""
    if value is None or not math.isfinite(value):
        return _NONE
    # What is rounded up to the next unit counts as there: 999.96 J is 1.000 kJ.
    fitting = (unit for unit, size in sizes.items() if abs(value) >= 0.99995 * size)
    unit = next(fitting, list(sizes)[-1])
    return f"{number(value / sizes[unit])} {unit}"


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
