"""Strict validation of the ``perseus`` block, with errors that state the remedy."""

import pytest
from omegaconf import OmegaConf

from perseus_ds.config import parse_block, settings_of
from perseus_ds.errors import ConfigError


def test_enabled_alone_is_a_complete_block():
    assert parse_block({"enabled": True}).mode == "auto"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"polcy": {}}, "perseus.polcy: unknown key; did you mean 'policy'?"),
        ({"enabled": "yes"}, "perseus.enabled: expected a valid boolean, got 'yes'"),
        ({"policy": {"name": "deadline", "finish_by": "2026-11-22T08:00:00", "total_steps": 9}}, "its time zone"),
        ({"policy": {"name": "power_cap"}}, "perseus.policy.watts: missing"),
        ({"policy": {"max_slowdown": 0.1}}, "perseus.policy.name: missing."),
        ({"policy": {"name": "slowdown", "max_slowdown": 1.05}}, "below 1, got 1.05. Did you mean 0.05, 5 % slower?"),
        ({"profile": 3}, "perseus.profile: expected an object with keys and values, got 3."),
        ({"mode": "run"}, '"mode": "run" needs "frontier"'),
        ({"metrics": {}}, 'expected "port", such as 9400, or "textfile"'),
        ({"metrics": {"textfile": "perseus.txt"}}, "perseus.metrics.textfile"),
        *((block, 'expected an object such as {"enabled": true}') for block in (True, False, "", [])),
    ],
)
def test_a_wrong_block_says_what_to_write_instead(block, message):
    with pytest.raises(ConfigError) as caught:
        settings_of(block)
    assert message in str(caught.value)


def test_a_variable_that_lost_its_quotes_is_shown_with_the_remedy(monkeypatch):
    value = "{mode: auto, policy: {name: slowdown, max_slowdown: 0.05}}"
    monkeypatch.setenv("PERSEUS", value)
    with pytest.raises(ConfigError) as caught:
        settings_of(None)
    assert value in str(caught.value)
    assert "JSON without its quotes" in str(caught.value)
    assert "set PERSEUS to its path" in str(caught.value)


def test_a_block_of_omegaconf_is_read_with_all_its_levels(monkeypatch):
    text = "{mode: auto, policy: {name: slowdown, max_slowdown: 0.05}, simulated: {conditions: ['${oc.env:HARDER}']}}"
    monkeypatch.setenv("HARDER", "warming")
    config = parse_block(OmegaConf.create(text))
    assert config.policy.max_slowdown == 0.05
    assert config.simulated.conditions == ["warming"]
    assert settings_of(OmegaConf.create({"profile": {"warm_up": 5}})).profile.warm_up == 5
    with pytest.raises(ConfigError, match=r"perseus\.policy\.name: expected"):
        parse_block(OmegaConf.create({"policy": {"name": "fast"}}))


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_block({"enabled": 3, "modus": "run"})
    assert "perseus.enabled" in str(caught.value)
    assert "perseus.modus" in str(caught.value)
