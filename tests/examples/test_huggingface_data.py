"""Data of the example for Hugging Face models."""

from itertools import islice

import datasets
import example
import pytest
import torch
from omegaconf import OmegaConf
from transformers import ByT5Tokenizer

from perseus_ds.errors import ConfigError

TEXTS = ["the clock of a stage", "follows the plan"]
END = 1


@pytest.fixture(scope="module")
def train():
    return example.load("huggingface")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def texts(train, path):
    return train.read_texts(OmegaConf.create({"path": path and str(path), "subset": None}))


def test_texts_come_from_a_file_a_folder_or_what_datasets_has_saved(train, tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "more" / "b.txt").write_text(TEXTS[1])
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    assert texts(train, folder / "a.txt")["text"][:] == TEXTS[:1]
    for path in (folder, tmp_path / "saved", tmp_path / "splits"):
        assert texts(train, path)["text"][:] == TEXTS
    assert len(texts(train, None)) > 10


def test_sources_without_texts_are_errors(train, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"neither \*.txt files nor a dataset"):
        texts(train, tmp_path)
    with pytest.raises(ConfigError, match="expected one called text"):
        train.pack(datasets.Dataset.from_dict({"words": TEXTS}), ByT5Tokenizer(extra_ids=0), 8)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"data\.path: someone/texts is neither a file nor a folder"):
        texts(train, "someone/texts")


def test_texts_are_packed_to_sequences_of_one_length_with_their_ends_marked(train):
    packed = train.pack(datasets.Dataset.from_dict({"text": TEXTS}), ByT5Tokenizer(extra_ids=0), 12)["input_ids"][:]
    stream = [token for text in TEXTS for token in [*(byte + 3 for byte in text.encode()), END]]
    assert packed.shape == (3, 12)
    assert packed.flatten().tolist() == stream[:36]


def test_pipelines_train_every_sequence_once_an_epoch_and_continue_where_they_were(train):
    data = datasets.Dataset.from_dict({"input_ids": [[row] for row in range(12)]}).with_format("torch")

    def rows(number, pipeline, start=0):
        made = train.batches(data, size=2, pipelines=2, pipeline=pipeline, seed=0, start=start)
        return [tuple(tokens.flatten().tolist()) for tokens, labels in islice(made, number) if tokens is labels]

    epoch = [row for pipeline in range(2) for batch in rows(3, pipeline) for row in batch]
    assert sorted(epoch) == list(range(12))
    assert rows(6, 0)[3:] != rows(3, 0)
    assert all(rows(8, 1)[start:] == rows(8 - start, 1, start) for start in range(8))
    assert torch.is_tensor(next(train.batches(data, size=1, pipelines=1, pipeline=0, seed=0))[0])
