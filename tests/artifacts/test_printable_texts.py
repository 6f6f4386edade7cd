"""Texts that quote files reach terminals without control characters."""

import logging

import perseus_ds.runtime.recorder  # noqa: F401 - as every job does
from perseus_ds.artifacts.printable import printable


def test_control_characters_are_written_as_their_escapes():
    assert printable("a\x1b]0;b\x07\x9b\u202e\ud800\tc\n") == "a\\x1b]0;b\\x07\\x9b\\u202e\\ud800\tc\n"


def test_what_is_logged_holds_no_control_characters(caplog):
    logging.getLogger("perseus_ds").warning("perseus: %s, 100 %% of %d", "\x1b]0;PWNED\x07", 3)
    assert caplog.messages == ["perseus: \\x1b]0;PWNED\\x07, 100 % of 3"]


def test_a_text_that_its_values_do_not_fit_is_no_error_of_the_caller(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("perseus_ds").handle(
        logging.LogRecord("perseus_ds", logging.DEBUG, __file__, 1, "%d", ("no number",), None)
    )
