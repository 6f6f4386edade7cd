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
        ({"gaol": {}}, "perseus.gaol: unknown key; did you mean 'goal'?"),
        ({"max_slowdown": 0.05}, "perseus.max_slowdown: unknown key; did you mean 'goal.max_slowdown'?"),
        ({"enabled": "yes"}, "perseus.enabled: expected a valid boolean, got 'yes'"),
        ({"goal": {"finish_by": "2026-11-22T08:00:00", "total_steps": 9}}, "its time zone"),
        ({"goal": {"finish_by": "2026-11-22T08:00:00Z"}}, 'perseus.goal: "finish_by" needs "total_steps"'),
        ({"goal": {"watts": 900, "power_fraction": 0.8}}, 'expected "watts" or "power_fraction", got both'),
        ({"goal": {"until": "2026-11-22T08:00:00Z"}}, '"until" is the end of a power limit'),
        (
            {"goal": {"power_fraction": 80}},
            "expected a fraction, at most 1, got 80. Did you mean 0.8?",
        ),
        ({"goal": {"max_slowdown": 1.05}}, "below 1, got 1.05. Did you mean 0.05, 5 % slower?"),
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
    value = "{mode: auto, goal: {max_slowdown: 0.05}}"
    monkeypatch.setenv("PERSEUS", value)
    with pytest.raises(ConfigError) as caught:
        settings_of(None)
    assert value in str(caught.value)
    assert "JSON without its quotes" in str(caught.value)
    assert "set PERSEUS to its path" in str(caught.value)


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_objects_in_the_variable_are_merged_with_those_of_the_block(monkeypatch, make):
    monkeypatch.setenv("PERSEUS", '{"goal": {"watts": 900}, "profile": {"warm_up": 5}, "metrics": null}')
    block = {"goal": {"max_slowdown": 0.05}, "profile": {"warm_up": 9, "clock_stride": 2}, "metrics": {"port": 9400}}
    config = settings_of(make(block))
    assert (config.goal.max_slowdown, config.goal.watts) == (0.05, 900.0)
    assert (config.profile.warm_up, config.profile.clock_stride) == (5, 2)
    assert config.metrics is None


def test_a_block_of_omegaconf_is_read_with_all_its_levels(monkeypatch):
    text = "{mode: auto, goal: {max_slowdown: 0.05}, simulated: {conditions: ['${oc.env:HARDER}']}}"
    monkeypatch.setenv("HARDER", "warming")
    config = parse_block(OmegaConf.create(text))
    assert config.goal.max_slowdown == 0.05
    assert config.simulated.conditions == ["warming"]
    assert settings_of(OmegaConf.create({"profile": {"warm_up": 5}})).profile.warm_up == 5
    with pytest.raises(ConfigError, match=r"perseus\.goal\.max_slowdown: expected"):
        parse_block(OmegaConf.create({"goal": {"max_slowdown": "fast"}}))


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_block({"enabled": 3, "modus": "run"})
    assert "perseus.enabled" in str(caught.value)
    assert "perseus.modus" in str(caught.value)
