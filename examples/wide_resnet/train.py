"""Train a Wide-ResNet with DeepSpeed pipeline parallelism and Perseus.

    deepspeed --num_gpus 4 examples/wide_resnet/train.py model=tiny
    torchrun --nproc_per_node 4 examples/wide_resnet/train.py model=tiny steps=100 --profile

Configuration: ``configs/wide_resnet``, with Hydra. ``--profile`` is short for ``perseus.mode=profile``.
The model is that of Zagoruyko and Komodakis (2016) for ImageNet: a ResNet with wider bottlenecks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from omegaconf import DictConfig, ListConfig
from torch import nn
from torch.utils.data import Dataset, Subset

sys.path.append(str(Path(__file__).parents[2]))

import perseus_ds
from examples.deepspeed_training import deepspeed_config, require_batches, run, start_ranks, train
from perseus_ds.errors import ConfigError

try:
    import hydra
except ModuleNotFoundError as error:
    sys.exit(f'{error}. Install its requirements in the folder of the repository: pip install ".[examples]"')

EXPANSION = 4  # ratio of a bottleneck's output channels to its inner ones (at width factor 1)
NOISE = 1.0  # standard deviation of the noise of synthetic images, relative to the patterns of their classes


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with batch normalisation. With stride 1 it keeps the image's size."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Stem(nn.Module):
    """Reduces an image to the first block's channels, at a quarter of its height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = convolution(3, channels, size=7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(next(self.parameters()).dtype)
        return self.pool(torch.relu(self.convolution(images)))


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut. A wide ResNet has more channels in the middle one."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(inputs, width, size=1)
        self.middle = convolution(width, width, size=3, stride=stride)
        self.expand = convolution(width, outputs, size=1)
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else convolution(inputs, outputs, size=1, stride=stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.middle(torch.relu(self.reduce(images))))
        return torch.relu(self.expand(hidden) + self.shortcut(images))


class Head(nn.Module):
    """Computes a logit for each class from the last block's channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images.mean(dim=(2, 3)))


def wide_resnet_layers(model: DictConfig) -> list[LayerSpec]:
    """Return the layers of a Wide-ResNet. A ``PipelineModule`` builds only those of its stage."""
    layers, inputs = [LayerSpec(Stem, model.channels)], model.channels
    for group, blocks in enumerate(model.blocks):
        channels = model.channels * 2**group
        for index in range(blocks):
            stride = 2 if group > 0 and index == 0 else 1
            layers.append(LayerSpec(Bottleneck, inputs, channels * model.width_factor, channels * EXPANSION, stride))
            inputs = channels * EXPANSION
    return [*layers, LayerSpec(Head, inputs, model.classes)]


def classification_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(logits.float(), labels)


class Pipeline(PipelineModule):
    """A pipeline with a partition that may be given explicitly.

    ``[0, 7, 16, 25, 35]`` assigns the layers 0 to 6, 7 to 15, 16 to 24 and 25 to 34 to four stages.
    """

    def _partition_layers(self, method: str | ListConfig) -> None:
        if isinstance(method, str):
            super()._partition_layers(method)
            return
        self.parts, layers = list(method), len(self._layer_specs)
        if self.parts[0] != 0 or self.parts[-1] != layers or sorted(set(self.parts)) != self.parts:
            raise ConfigError(
                f"model.partition: expected numbers that rise from 0 to {layers} layers, got {self.parts}."
            )
        if len(self.parts) != self.num_stages + 1:
            raise ConfigError(f"model.partition: {self.parts} are {len(self.parts) - 1} stages, not {self.num_stages}.")
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])


class SyntheticImages(Dataset):
    """Noise on top of one pattern for each class, generated on access."""

    def __init__(self, count: int, size: int, classes: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (count,), generator=random)
        self.patterns = torch.randn(classes, 3, 8, 8, generator=random)
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        label = self.labels[index]
        pattern = nn.functional.interpolate(self.patterns[label][None], size=self.size)[0]
        random = torch.Generator().manual_seed(self.seed + index)
        return pattern + NOISE * torch.randn(pattern.shape, generator=random), label


class StoredImages(Dataset):
    """Memory-mapped arrays in a folder: ``images`` (count, 3, height, width) and ``labels`` (count,).

    The files are .npy or .pt.
    """

    def __init__(self, folder: str, classes: int) -> None:
        self.images, self.labels = self._load(folder, "images"), self._load(folder, "labels").long()
        if self.images.ndim != 4 or self.images.shape[1] != 3 or self.labels.shape != self.images.shape[:1]:
            raise ConfigError(
                f"data.path: {folder} has images of shape {tuple(self.images.shape)} and labels of shape "
                f"{tuple(self.labels.shape)}; expected (count, 3, height, width) and (count,)."
            )
        if self.labels.min() < 0 or self.labels.max() >= classes:
            raise ConfigError(f"data.path: {folder} has labels beyond 0 to {classes - 1}. Set model.classes.")

    @staticmethod
    def _load(folder: str, name: str) -> torch.Tensor:
        stem = Path(folder) / name
        if stem.with_suffix(".pt").is_file():
            loaded: torch.Tensor = torch.load(stem.with_suffix(".pt"), mmap=True, weights_only=True)
            return loaded
        if stem.with_suffix(".npy").is_file():
            return torch.from_numpy(np.load(stem.with_suffix(".npy"), mmap_mode="c"))
        raise ConfigError(f"data.path: expected {stem}.npy or {stem}.pt, found neither.")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        scaled = image.float() / 127.5 - 1 if image.dtype == torch.uint8 else image.float()
        return scaled, self.labels[index]


def training_data(cfg: DictConfig, pipelines: int) -> Subset:
    """Return images and labels in random order, enough for the given number of data-parallel pipelines."""
    classes, size = cfg.model.classes, cfg.model.image_size
    stored, count = cfg.data.path, cfg.data.images
    images: Any = StoredImages(stored, classes) if stored else SyntheticImages(count, size, classes, cfg.seed)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(cfg.seed))
    data = Subset(images, order.tolist())
    require_batches(len(data), "images", cfg, pipelines)
    return data


@hydra.main(version_base="1.3", config_path="../../configs/wide_resnet", config_name="config")  # type: ignore[untyped-decorator]
def main(cfg: DictConfig) -> None:
    """Train, or measure a profile."""
    ranks = start_ranks()
    stages = cfg.stages or ranks

    module = Pipeline(
        layers=wide_resnet_layers(cfg.model),
        num_stages=stages,
        loss_fn=classification_loss,
        partition_method=cfg.model.partition,
        seed_layers=True,  # the same weights for all partitions
        seed_fn=torch.manual_seed,
        base_seed=cfg.seed,
    )
    engine, *_ = perseus_ds.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        training_data=training_data(cfg, pipelines=ranks // stages),
        config=deepspeed_config(cfg, pipelines=ranks // stages),
    )
    train(engine, cfg)


if __name__ == "__main__":
    run(main)
