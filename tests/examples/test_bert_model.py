"""The BERT example's model and data, without launching ranks."""

import example
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM


@pytest.fixture(scope="module")
def train():
    return example.load("bert")


def config(*overrides):
    return example.config("bert", *overrides)


def run(functions, tokens):
    with torch.no_grad():
        for function in functions:
            tokens = function(tokens)
    return tokens


def test_the_model_computes_what_transformers_computes_with_the_same_weights(train):
    model = config("model=tiny").model
    torch.manual_seed(3)
    functions, (embedding, positions, *blocks, transform, bias) = example.build(train.bert_layers(model))
    theirs = BertForMaskedLM(
        BertConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.width,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            intermediate_size=4 * model.width,
            max_position_embeddings=model.positions,
        )
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.05)
        head = theirs.cls.predictions
        inputs = theirs.bert.embeddings
        embedding.weight.copy_(inputs.word_embeddings.weight)
        positions.positions.copy_(inputs.position_embeddings.weight)
        positions.segments.copy_(inputs.token_type_embeddings.weight)
        positions.norm.load_state_dict(inputs.LayerNorm.state_dict())
        for block, layer in zip(blocks, theirs.bert.encoder.layer, strict=True):
            block.load_state_dict(layer.state_dict())
        transform.dense.load_state_dict(head.transform.dense.state_dict())
        transform.norm.load_state_dict(head.transform.LayerNorm.state_dict())
        bias.bias.copy_(head.decoder.bias)
        tokens = torch.randint(model.vocabulary, (2, 64))
        torch.testing.assert_close(run(functions, tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_of_15_percent_of_the_tokens_80_are_masked_10_random_10_kept(train):
    sequences = torch.randint(256, (400, 512), generator=torch.Generator().manual_seed(1))
    vocabulary = train.read_vocabulary(None, 257)
    inputs, labels = train.masked_dataset(sequences, vocabulary, seed=5).tensors
    assert set((labels != -100).sum(dim=1).tolist()) == {round(0.15 * 512)}
    chosen = labels != train.NO_LABEL
    share = chosen.sum()
    assert share / labels.numel() == pytest.approx(0.15, abs=0.005)
    assert (inputs[chosen] == vocabulary.mask).sum() / share == pytest.approx(0.8, abs=0.01)
    assert (inputs[chosen] == labels[chosen]).sum() / share == pytest.approx(0.1, abs=0.01)
    assert (inputs[~chosen] != vocabulary.mask).all()
    whole = torch.where(chosen, labels, inputs)
    assert torch.equal(whole.sum(1).sort().values, sequences.sum(1).sort().values)


def test_special_tokens_stand_at_the_ends_and_are_never_masked(train, tmp_path):
    (tmp_path / "text").write_text("x" * 1000)
    vocabulary = train.Vocabulary(size=260, encode=lambda text: list(text.encode()), mask=256, begin=(257,), end=(258,))
    data = config(f"data.path={tmp_path}/text").data
    sequences = train.read_sequences(data, vocabulary, sequence_length=10)
    inputs, labels = train.masked_dataset(sequences, vocabulary, seed=1).tensors
    assert sequences.shape == (125, 10)
    assert (inputs[:, 0] == 257).all()
    assert (inputs[:, -1] == 258).all()
    assert (labels[:, [0, -1]] == train.NO_LABEL).all()


def test_the_loss_counts_masked_tokens_only_and_is_zero_without_any(train):
    logits = torch.randn(2, 3, 7)
    labels = torch.tensor([[1, -100, -100], [-100, 4, -100]])
    expected = torch.nn.functional.cross_entropy(logits[[0, 1], [0, 1]], torch.tensor([1, 4]))
    torch.testing.assert_close(train.masked_lm_loss(logits, labels), expected)
    assert train.masked_lm_loss(logits, torch.full((2, 3), -100)) == 0
