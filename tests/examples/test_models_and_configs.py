"""Sizes, data and configuration of the examples, without launching ranks."""

from pathlib import Path

import example
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from perseus_ds.config import PerseusConfig, parse_block
from perseus_ds.errors import ConfigError

# Published by Merak-Zeus, in millions. The head of GPT-3 shares the weights of the token embedding. BERT base and large
# are without the biases of the blocks' matrices.
PUBLISHED_MILLIONS = {
    "bert": {"base": 109.43, "large": 334.95, "huge": 1276.40},
    "gpt3": {
        "small": 124.44,
        "medium": 354.82,
        "large": 758.73,
        "xl": 1313.63,
        "2.7b": 2648.93,
        "6.7b": 6654.21,
        "13b": 12848.14,
        "175b": 174591.68,
    },
    "wide_resnet": {"50x2": 68.88, "50x4": 223.44, "50x8": 804.16, "101x2": 126.89, "101x4": 419.63, "101x8": 1517.37},
}


SIZES = [(name, size) for name, sizes in PUBLISHED_MILLIONS.items() for size in sizes]


def count_parameters(layers):
    """Count a model's parameters, tied ones once, without allocating them."""
    with torch.device("meta"):
        _, modules = example.build(layers)
    return sum(p.numel() for m in modules for p in m.parameters())


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_parameter_counts_are_the_published_ones(name, size):
    layers = getattr(example.load(name), f"{name}_layers")(example.config(name, f"model={size}").model)
    assert round(count_parameters(layers) / 1e6, 2) == PUBLISHED_MILLIONS[name][size]


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
    with pytest.raises(ConfigError, match=f"data: {found}, expected at least 128, a micro-batch for each pipeline"):
        train.training_data(cfg, pipelines=16)


@pytest.mark.parametrize(
    ("name", "size", "global_batch"), [("bert", "large", 256), ("gpt3", "xl", 1024), ("wide_resnet", "101x8", 1536)]
)
def test_the_deepspeed_config_keeps_the_global_batch_and_passes_the_perseus_block(name, size, global_batch):
    cfg = example.config(name, f"model={size}", "perseus.goal.max_slowdown=0.1")
    built = example.load(name).deepspeed_config(cfg, pipelines=8)
    assert built["train_micro_batch_size_per_gpu"] * built["gradient_accumulation_steps"] * 8 == global_batch
    assert built["perseus"]["goal"]["max_slowdown"] == 0.1


@pytest.mark.parametrize("name", ["gpt3", "bert", "wide_resnet"])
def test_every_key_of_the_perseus_block_is_valid_and_none_is_missing(name):
    block = OmegaConf.to_container(example.config(name).perseus)
    assert parse_block(block) == PerseusConfig()
    assert set(block) == set(PerseusConfig.model_fields)
    assert set(block["profile"]) == set(PerseusConfig().profile.__class__.model_fields)
    assert set(block["simulated"]) == set(PerseusConfig().simulated.__class__.model_fields)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["bert", "gpt3", "wide_resnet"])
def test_the_examples_leave_loggers_as_they_are(name):
    """Otherwise they would not show warnings of Perseus."""
    with initialize_config_dir(str(ROOT / "configs" / name), version_base=None):
        hydra = compose("config", return_hydra_config=True).hydra
    for logging in (hydra.job_logging, hydra.hydra_logging):
        assert logging.root is None
        assert not logging.disable_existing_loggers
