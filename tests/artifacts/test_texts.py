"""What is wrong with a block or a file, in one text; texts that quote files reach terminals printable."""

import logging

import pytest
from pydantic import ValidationError

import perseus_ds.runtime.recorder  # noqa: F401 - as every job does
from perseus_ds.artifacts.printable import printable
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.validation import did_you_mean, expectation, explain


def problems(block):
    with pytest.raises(ValidationError) as caught:
        ProfileInfo.model_validate(block)
    return explain(caught.value, ProfileInfo, "profile.json: ").splitlines()


def test_keys_deep_within_a_file_are_named_with_what_was_meant():
    row = {"stage": 0, "kind": "forward", "clock_mhz": 900, "samples": 1}
    of_kind, of_stage = problems({"rows": [row, {**row, "kind": "fordward", "stge": 1}]})
    assert of_kind.startswith("profile.json: rows.1.kind: expected 'forward', 'backward', ")
    assert of_kind.endswith(" or 'tail', got 'fordward'; did you mean 'forward'?")
    assert of_stage == "profile.json: rows.1.stge: unknown key; did you mean 'stage'?"


def test_a_missing_key_is_named_without_the_whole_block_around_it():
    assert problems({"rows": [{"stage": 0, "kind": "forward", "clock_mhz": 900}]}) == [
        "profile.json: rows.0.samples: missing."
    ]


def test_of_many_problems_the_first_are_told_and_the_others_are_counted():
    lines = problems(dict.fromkeys("abcdefghijklmnopqrstuvwxyz"))
    assert len(lines) == 6
    assert lines[-1] == "profile.json: 21 more problems like these."


def test_long_values_are_cut_short():
    assert len(problems({"rows": "x" * 10_000})[0]) < 200


def test_only_similar_words_are_offered():
    assert did_you_mean("optimse", ["optimize", "report"]) == "did you mean 'optimize'?"
    assert did_you_mean("nonsense", ["optimize", "report"]) == ""
    assert expectation("key", "a number", "x") == "key: expected a number, got 'x'."


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
