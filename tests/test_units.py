"""Formatting of figures for people."""

import logging

import pytest

from perseus_ds import units

SPACE, MINUS = "\N{NARROW NO-BREAK SPACE}", "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.number(1234567.0), f"1{SPACE}234{SPACE}567"),
        (units.number(0.000123456, 3), "0.000123"),
        (units.number(float("nan")), "\N{EN DASH}"),
        (units.percent(-0.1234), f"{MINUS}12.3{SPACE}%"),
        (units.percent(-0.0001), f"0.0{SPACE}%"),
        (units.joules(26_353_867), "26.35 MJ"),
        (units.joules(999.96), "1.000 kJ"),
        (units.joules(-0.5), f"{MINUS}0.5000 J"),
        (units.joules(0), "0 J"),
        (units.watt_hours(3.6e6), "1.000 kWh"),
        (units.grams(1500), "1.500 kg"),
        (units.watts(12_345), "12.35 kW"),
        (units.watts(861, like=1255), "0.861 kW"),
        (units.watts(24.25, like=1255), "0.024 kW"),
        (units.joules(12_340, like=999.96), "12.340 kJ"),
        (units.duration(61, like=float("nan")), "1.017 min"),
        (units.duration(0.0123), "12.30 ms"),
        (units.duration(90_000), "1.042 days"),
        (units.gpu_time(7200), "2.000 GPU-h"),
        (units.money(1234.5, "EUR"), f"1{SPACE}234.50 EUR"),
        (units.money(0.01234, "EUR"), "0.0123 EUR"),
        (units.whole(100_000), f"100{SPACE}000"),
    ],
)
def test_figures_are_short_and_have_a_unit_of_fitting_size(text, expected):
    assert text == expected


def test_what_is_logged_has_control_characters_as_escapes(caplog, monkeypatch):
    from perseus_ds.client.runtime import logger

    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.warning("%s, 100 %% of %d", "\x1b]0;b\x07\x9b\u202e\ud800\tc\n", 3)
    assert caplog.messages == ["\\x1b]0;b\\x07\\x9b\\u202e\\ud800\tc\n, 100 % of 3"]
    logger.warning("%d", "no number")  # raises no error


def test_columns_are_aligned_in_ascii():
    rows = [("layout", "time [s]", ""), ("a", "3 ± 1", "-1"), ("b", "12", "")]
    assert units.columns(rows) == ["layout  time [s]", "a        3 +/- 1  -1", "b             12"]
