"""One text for what is wrong with a block or a file: where, what was expected, what was found."""

import pytest
from pydantic import ValidationError

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.artifacts.validation import did_you_mean, expectation, explain


def problems(block):
    with pytest.raises(ValidationError) as caught:
        ProfileInfo.model_validate(block)
    return explain(caught.value, ProfileInfo, "profile.json: ").splitlines()


def test_keys_deep_within_a_file_are_named_with_what_was_meant():
    row = {"stage": 0, "kind": "forward", "clock_mhz": 900, "samples": 1}
    assert problems({"rows": [row, {**row, "kind": "fordward", "stge": 1}]}) == [
        "profile.json: rows.1.kind: expected 'forward', 'backward', 'backward_input', 'backward_weight', 'recompute' "
        "or 'tail', got 'fordward'; did you mean 'forward'?",
        "profile.json: rows.1.stge: unknown key; did you mean 'stage'?",
    ]


def test_a_missing_key_is_named_without_the_whole_block_around_it():
    assert problems({"rows": [{"stage": 0, "kind": "forward", "clock_mhz": 900}]}) == [
        "profile.json: rows.0.samples: missing."
    ]


def test_of_many_problems_the_first_are_told_and_the_others_are_counted():
    lines = problems(dict.fromkeys("abcdefghijklmnopqrstuvwxyz"))
    assert len(lines) == 11
    assert lines[-1] == "profile.json: 16 more problems like these."


def test_long_values_are_cut_short():
    assert len(problems({"rows": "x" * 10_000})[0]) < 200


def test_only_similar_words_are_offered():
    assert did_you_mean("optimse", ["optimize", "report"]) == "did you mean 'optimize'?"
    assert did_you_mean("nonsense", ["optimize", "report"]) == ""
    assert expectation("key", "a number", "x") == "key: expected a number, got 'x'."
