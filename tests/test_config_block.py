"""The ``perseus`` block is validated strictly, and every error says what to write instead."""

import pytest

from perseus_ds.config import parse_block
from perseus_ds.errors import ConfigError


def test_enabled_alone_is_a_complete_block():
    assert parse_block({"enabled": True}).mode == "auto"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"max_slowdwn": 0.1}, "perseus.max_slowdwn: unknown key; did you mean 'max_slowdown'?"),
        ({"profile": {"clock_strid": 2}}, "perseus.profile.clock_strid: unknown key; did you mean 'clock_stride'?"),
        ({"zzz": 1}, "known keys are enabled, mode"),
        ({"enabled": "yes"}, "perseus.enabled: expected a valid boolean, got 'yes'"),
        ({"max_slowdown": -0.1}, "perseus.max_slowdown: expected greater than or equal to 0, got -0.1"),
        ({"mode": "train"}, "perseus.mode: expected 'auto', 'observe', 'profile' or 'run', got 'train'"),
        ({"mode": "run"}, '"mode": "run" needs "frontier"'),
        ({"mode": "run", "frontier": "/nowhere/frontier.json"}, "/nowhere/frontier.json does not exist"),
        ({"device": "cuda"}, "perseus.device: expected 'auto', 'nvml'"),
        (True, 'expected an object such as {"enabled": true}'),
    ],
)
def test_a_wrong_block_says_what_to_write_instead(block, message):
    with pytest.raises(ConfigError) as caught:
        parse_block(block)
    assert message in str(caught.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_block({"enabled": 3, "modus": "run"})
    assert "perseus.enabled" in str(caught.value)
    assert "perseus.modus" in str(caught.value)
