"""The GPT-3 example's model and data, without launching ranks."""

import example
import pytest
import torch
from omegaconf import OmegaConf

from perseus_ds.runtime.config import PerseusConfig, parse_block

# Published by Merak-Zeus, in millions; the head shares the token embedding's weights.
PUBLISHED_MILLIONS = {
    "small": 124.44,
    "medium": 354.82,
    "large": 758.73,
    "xl": 1313.63,
    "2.7b": 2648.93,
    "6.7b": 6654.21,
    "13b": 12848.14,
    "175b": 174591.68,
}


@pytest.fixture(scope="module")
def train():
    return example.load("gpt3")


def config(*overrides):
    return example.config("gpt3", *overrides)


@pytest.mark.parametrize("size", PUBLISHED_MILLIONS)
def test_parameter_counts_are_the_published_ones_with_a_tied_head(train, size):
    count = example.count_parameters(train.gpt3_layers(config(f"model={size}").model))
    assert round(count / 1e6, 2) == PUBLISHED_MILLIONS[size]


def test_an_untied_head_adds_one_vocabulary_matrix(train):
    tied, untied = (
        example.count_parameters(train.gpt3_layers(config("model=small", f"model.tie_head={tie}").model))
        for tie in ("true", "false")
    )
    assert untied - tied == 50257 * 768


@pytest.mark.parametrize("tie_head", ["true", "false"])
def test_logits_depend_on_earlier_tokens_only(train, tie_head):
    torch.manual_seed(0)
    model = config("model=tiny", f"model.tie_head={tie_head}").model
    functions, _ = example.build(train.gpt3_layers(model))

    def logits(tokens):
        for function in functions:
            tokens = function(tokens)
        return tokens

    tokens = torch.randint(0, 256, (1, 64))
    changed = tokens.clone()
    changed[0, 40] = (tokens[0, 40] + 1) % 256
    with torch.no_grad():
        difference = (logits(tokens) - logits(changed)).abs().amax(dim=(0, 2))
    assert difference.shape == (64,)
    assert difference[:40].max() < 1e-5
    assert difference[40:].min() > 1e-5


def test_labels_are_the_next_tokens_and_every_window_appears_once(train):
    inputs, labels = train.next_token_dataset(torch.arange(200), sequence_length=8, seed=1).tensors
    assert torch.equal(labels, inputs + 1)
    assert sorted(inputs[:, 0].tolist()) == list(range(0, 192, 8))


def test_the_order_of_the_data_follows_the_seed(train):
    first, again, other = (train.next_token_dataset(torch.arange(200), 8, seed).tensors[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("gpt3", "max_tokens=8000", "124 sequences"),
        ("bert", "max_tokens=8000", "125 sequences"),
        ("wide_resnet", "images=127", "127 images"),
    ],
)
def test_too_little_data_for_a_micro_batch_of_each_pipeline_is_named(name, data, found):
    train, cfg = example.load(name), example.config(name, f"data.{data}", "model.micro_batch_size=8")
    assert len(train.training_data(cfg, pipelines=15)) == int(found.split()[0])
    with pytest.raises(ValueError, match=f"data: {found}, less than a micro-batch for each pipeline: 128"):
        train.training_data(cfg, pipelines=16)


def test_the_deepspeed_config_keeps_the_global_batch_and_passes_the_perseus_block(train):
    built = train.deepspeed_config(config("model=xl", "+perseus.policy.max_slowdown=0.1"), pipelines=8)
    assert built["train_micro_batch_size_per_gpu"] * built["gradient_accumulation_steps"] * 8 == 1024
    assert built["perseus"]["policy"]["max_slowdown"] == 0.1


@pytest.mark.parametrize("name", ["gpt3", "bert", "wide_resnet"])
def test_every_key_of_the_perseus_block_is_valid_and_none_is_missing(name):
    block = OmegaConf.to_container(example.config(name).perseus)
    assert parse_block(block) == PerseusConfig()
    assert set(block) == set(PerseusConfig.model_fields)
    assert set(block["profile"]) == set(PerseusConfig().profile.__class__.model_fields)
    assert set(block["simulated"]) == set(PerseusConfig().simulated.__class__.model_fields)
