"""The Wide-ResNet example's model and data, without launching ranks."""

import example
import numpy as np
import pytest
import torch

from perseus_ds.errors import ConfigError
from perseus_ds.simulation.work import FlopCounter


@pytest.fixture(scope="module")
def train():
    return example.load("wide_resnet")


def config(*overrides):
    return example.config("wide_resnet", *overrides)


def test_the_simulator_sees_the_published_work_and_twice_as_much_in_the_backward(train):
    with torch.device("meta"):
        functions, _ = example.build(train.wide_resnet_layers(config("model=50x2").model))
        logits = torch.empty(1, 3, 224, 224)
        with FlopCounter() as forward:
            for function in functions:
                logits = function(logits)
        with FlopCounter() as backward:
            train.classification_loss(logits, torch.empty(1, dtype=torch.int64)).backward()
    assert forward.flops == pytest.approx(2 * 11.40e9, rel=0.005)  # multiply-adds, as documented by torchvision
    assert backward.flops == pytest.approx(2 * forward.flops, rel=0.03)  # the images themselves have no gradient


def test_images_of_a_folder_are_scaled_and_keep_their_labels(train, tmp_path):
    images = np.arange(6 * 3 * 4 * 4, dtype=np.uint8).reshape(6, 3, 4, 4)
    np.save(tmp_path / "images.npy", images)
    torch.save(torch.arange(6), tmp_path / "labels.pt")
    data = train.training_data(config(f"data.path={tmp_path}", "model.micro_batch_size=2"), 1)
    assert len(data) == 6
    for image, label in data:
        torch.testing.assert_close(image, torch.from_numpy(images[int(label)]).float() / 127.5 - 1)


def test_what_is_wrong_with_a_folder_is_named(train, tmp_path):
    def problem(images, labels):
        np.save(tmp_path / "images.npy", images)
        np.save(tmp_path / "labels.npy", labels)
        with pytest.raises(ConfigError, match=r"data\.path") as raised:
            train.training_data(config(f"data.path={tmp_path}", "model.micro_batch_size=2"), 1)
        return str(raised.value)

    with pytest.raises(ConfigError, match=r"images\.npy or .*images\.pt, found neither"):
        train.training_data(config(f"data.path={tmp_path}", "model.micro_batch_size=2"), 1)
    assert "(5, 4, 4, 3)" in problem(np.zeros((5, 4, 4, 3)), np.zeros(5))
    assert "labels beyond 0 to 9" in problem(np.zeros((5, 3, 4, 4)), np.full(5, 10))
