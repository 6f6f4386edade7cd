"""Text sources of the language-model examples, which are the same for both."""

import sys

import datasets
import example
import pytest
from omegaconf import OmegaConf
from tokenizers import BertWordPieceTokenizer
from transformers import BertTokenizerFast

from perseus_ds.errors import ConfigError

TEXT = "the clock of a stage follows the plan of the pipeline, and the plan follows the clock. " * 40


@pytest.fixture(scope="module", params=["gpt3", "bert"])
def train(request):
    return example.load(request.param)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator([TEXT], vocab_size=90, show_progress=False)
    trained.save_model(str(folder))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def tokens(train, path=None, tokenizer=None, max_tokens=100_000, vocabulary=512):
    """Return an example's tokens of a source, as one row."""
    data = OmegaConf.create(
        {"path": path and str(path), "tokenizer": tokenizer and str(tokenizer), "max_tokens": max_tokens}
    )
    if hasattr(train, "read_tokens"):
        return train.read_tokens(data, vocabulary)
    return train.read_sequences(data, train.read_vocabulary(data.tokenizer, vocabulary), sequence_length=64).flatten()


def test_the_default_text_is_the_standard_library_up_to_the_limit(train):
    text = bytes(tokens(train, max_tokens=64_000).tolist())
    assert len(text) == 64_000
    assert b"import " in text


def test_a_text_file_is_read_as_bytes_unless_there_is_a_tokenizer(train, tokenizer, tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT)
    as_bytes, as_words = tokens(train, file), tokens(train, file, tokenizer)
    assert TEXT.encode().startswith(bytes(as_bytes.tolist()))
    assert len(as_words) < len(as_bytes) / 2
    assert as_words.max() < 90


def test_a_saved_dataset_is_read_by_its_text_column(train, tmp_path):
    split = datasets.Dataset.from_dict({"text": [TEXT, TEXT.upper()]})
    split.save_to_disk(tmp_path / "alone")
    datasets.DatasetDict({"train": split}).save_to_disk(tmp_path / "splits")
    expected = (TEXT + TEXT.upper()).encode()
    for folder in ("alone", "splits"):
        read = bytes(tokens(train, tmp_path / folder).tolist())
        assert expected.startswith(read)
        assert len(read) > len(TEXT)
    datasets.Dataset.from_dict({"words": [TEXT]}).save_to_disk(tmp_path / "other")
    with pytest.raises(ConfigError, match="expected one called text"):
        tokens(train, tmp_path / "other")


def test_without_the_package_datasets_a_folder_is_refused_with_a_remedy(train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="requires the package datasets"):
        tokens(train, tmp_path)


def test_a_tokenizer_that_is_not_there_is_not_looked_for_on_the_internet(train, monkeypatch):
    with pytest.raises(ConfigError, match=r"data\.tokenizer: bert-base-uncased is not a folder"):
        tokens(train, tokenizer="bert-base-uncased")


def test_a_vocabulary_too_small_for_the_tokenizer_is_named(train, tokenizer):
    with pytest.raises(ConfigError, match=r"model\.vocabulary: expected at least \d+, .*got 64"):
        tokens(train, tokenizer=tokenizer, vocabulary=64)
