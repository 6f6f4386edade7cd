"""The GPT-3 example's model and data, without launching ranks."""

import example
import pytest
import torch


@pytest.fixture(scope="module")
def train():
    return example.load("gpt3")


def config(*overrides):
    return example.config("gpt3", *overrides)


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
