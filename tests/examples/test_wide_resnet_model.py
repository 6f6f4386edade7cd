"""The Wide-ResNet example's model and data, without launching ranks."""

import example
import numpy as np
import pytest
import torch

from perseus_ds.client.timers import FlopCounter
from perseus_ds.errors import ConfigError


@pytest.fixture(scope="module")
def train():
    return example.load("wide_resnet")


def config(*overrides):
    return example.config("wide_resnet", *overrides)


def run(functions, images):
    for function in functions:
        images = function(images)
    return images


# torchvision documents 11.4 and 22.75 billion multiply-adds for an image of 224 x 224.
@pytest.mark.parametrize(("size", "multiply_adds"), [("50x2", 11.40e9), ("101x2", 22.75e9)])
def test_the_simulator_sees_the_published_work_and_twice_as_much_in_the_backward(train, size, multiply_adds):
    with torch.device("meta"):
        functions, _ = example.build(train.wide_resnet_layers(config(f"model={size}").model))
        images = torch.empty(1, 3, 224, 224)
        with FlopCounter() as forward:
            logits = run(functions, images)
        with FlopCounter() as backward:
            train.classification_loss(logits, torch.empty(1, dtype=torch.int64)).backward()
    assert forward.flops == pytest.approx(2 * multiply_adds, rel=0.005)
    assert backward.flops == pytest.approx(2 * forward.flops, rel=0.03)  # the images themselves have no gradient


def test_synthetic_images_are_the_same_each_time_and_tell_their_class(train):
    first, again = (train.training_data(config("data.images=64"), 1) for _ in range(2))
    assert torch.equal(first[3][0], again[3][0])
    assert sorted(first.indices) == list(range(64))
    images = torch.stack([image for image, _ in first])
    labels = torch.stack([label for _, label in first])
    alike = torch.corrcoef(images.flatten(1))[labels[:, None] == labels]
    assert alike.mean() > 0.3


@pytest.mark.parametrize("suffix", ["npy", "pt"])
def test_images_of_a_folder_are_scaled_and_keep_their_labels(train, tmp_path, suffix):
    images = np.arange(6 * 3 * 4 * 4, dtype=np.uint8).reshape(6, 3, 4, 4)
    labels = np.arange(6)
    for name, array in (("images", images), ("labels", labels)):
        if suffix == "npy":
            np.save(tmp_path / f"{name}.npy", array)
        else:
            torch.save(torch.from_numpy(array), tmp_path / f"{name}.pt")
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
