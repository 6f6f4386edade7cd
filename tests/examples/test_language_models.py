"""Models and data of the GPT-3 and BERT examples, without launching ranks."""

import sys

import datasets
import example
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

from perseus_ds.errors import ConfigError

TEXT = "the clock of a stage follows the plan of the pipeline, and the plan follows the clock. " * 40


@pytest.fixture(scope="module")
def bert():
    return example.load("bert")


@pytest.fixture(scope="module")
def gpt3():
    return example.load("gpt3")


@pytest.fixture(params=["gpt3", "bert"])
def train(request):
    return request.getfixturevalue(request.param)


def run(functions, tokens):
    with torch.no_grad():
        for function in functions:
            tokens = function(tokens)
    return tokens


def test_bert_computes_what_transformers_computes_with_the_same_weights(bert):
    model = example.config("bert", "model=tiny").model
    torch.manual_seed(3)
    functions, (embedding, positions, *blocks, transform, bias) = example.build(bert.bert_layers(model))
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


def test_of_15_percent_of_the_tokens_80_are_masked_10_random_10_kept(bert):
    sequences = torch.randint(256, (400, 512), generator=torch.Generator().manual_seed(1))
    vocabulary = bert.read_vocabulary(None, 257)
    inputs, labels = bert.masked_dataset(sequences, vocabulary, seed=5).tensors
    chosen = labels != bert.NO_LABEL
    share = chosen.sum()
    assert set(chosen.sum(dim=1).tolist()) == {round(0.15 * 512)}
    assert (inputs[chosen] == vocabulary.mask).sum() / share == pytest.approx(0.8, abs=0.01)
    assert (inputs[chosen] == labels[chosen]).sum() / share == pytest.approx(0.1, abs=0.01)
    assert (inputs[~chosen] != vocabulary.mask).all()


def test_the_loss_of_bert_counts_masked_tokens_only_and_is_zero_without_any(bert):
    logits = torch.randn(2, 3, 7)
    labels = torch.tensor([[1, -100, -100], [-100, 4, -100]])
    expected = torch.nn.functional.cross_entropy(logits[[0, 1], [0, 1]], torch.tensor([1, 4]))
    torch.testing.assert_close(bert.masked_lm_loss(logits, labels), expected)
    assert bert.masked_lm_loss(logits, torch.full((2, 3), -100)) == 0


@pytest.mark.parametrize("tie_head", ["true", "false"])
def test_logits_of_gpt3_depend_on_earlier_tokens_only(gpt3, tie_head):
    torch.manual_seed(0)
    model = example.config("gpt3", "model=tiny", f"model.tie_head={tie_head}").model
    functions, _ = example.build(gpt3.gpt3_layers(model))
    tokens = torch.randint(0, 256, (1, 64))
    changed = tokens.clone()
    changed[0, 40] = (tokens[0, 40] + 1) % 256
    difference = (run(functions, tokens) - run(functions, changed)).abs().amax(dim=(0, 2))
    assert difference[:40].max() < 1e-5 < difference[40:].min()


def test_labels_of_gpt3_are_the_next_tokens_and_every_window_appears_once(gpt3):
    inputs, labels = gpt3.next_token_dataset(torch.arange(200), sequence_length=8, seed=1).tensors
    assert torch.equal(labels, inputs + 1)
    assert sorted(inputs[:, 0].tolist()) == list(range(0, 192, 8))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator([TEXT], vocab_size=90, show_progress=False)
    trained.save_model(str(folder))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def tokens_of(train, path=None, tokenizer=None, max_tokens=100_000, vocabulary=512):
    """Return an example's tokens of a source, as one row."""
    data = OmegaConf.create(
        {"path": path and str(path), "tokenizer": tokenizer and str(tokenizer), "max_tokens": max_tokens}
    )
    if hasattr(train, "read_tokens"):
        return train.read_tokens(data, vocabulary)
    return train.read_sequences(data, train.read_vocabulary(data.tokenizer, vocabulary), sequence_length=64).flatten()


def test_the_default_text_is_the_standard_library_up_to_the_limit(train):
    text = bytes(tokens_of(train, max_tokens=64_000).tolist())
    assert len(text) == 64_000
    assert b"import " in text


def test_a_text_file_is_read_as_bytes_unless_there_is_a_tokenizer(train, tokenizer, tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT)
    as_bytes, as_words = tokens_of(train, file), tokens_of(train, file, tokenizer)
    assert TEXT.encode().startswith(bytes(as_bytes.tolist()))
    assert len(as_words) < len(as_bytes) / 2
    assert as_words.max() < 90
    with pytest.raises(ConfigError, match=r"model\.vocabulary: expected at least \d+, .*got 64"):
        tokens_of(train, file, tokenizer, vocabulary=64)
    with pytest.raises(ConfigError, match=r"data\.tokenizer: bert-base-uncased is not a folder"):
        tokens_of(train, tokenizer="bert-base-uncased")


def test_a_saved_dataset_is_read_by_its_text_column(gpt3, tmp_path, monkeypatch):
    split = datasets.Dataset.from_dict({"text": [TEXT, TEXT.upper()]})
    split.save_to_disk(tmp_path / "alone")
    datasets.DatasetDict({"train": split}).save_to_disk(tmp_path / "splits")
    for folder in ("alone", "splits"):
        assert bytes(tokens_of(gpt3, tmp_path / folder).tolist()) == (TEXT + TEXT.upper()).encode()
    datasets.Dataset.from_dict({"words": [TEXT]}).save_to_disk(tmp_path / "other")
    with pytest.raises(ConfigError, match="expected one called text"):
        tokens_of(gpt3, tmp_path / "other")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="requires the package datasets"):
        tokens_of(gpt3, tmp_path / "alone")
