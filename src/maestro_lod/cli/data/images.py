"""Batches of images from one array, augmented and normalized batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from maestro_lod.cli.data.batches import Data, Request, epoch_generator


@dataclass(frozen=True)
class ImageFormat:
    """Stored size, augmentation and normalization of the images of a dataset."""

    channels: int
    side: int
    """Stored height and width."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int
    """Height and width of model inputs: a random crop in training, else the central one."""
    pad: int = 0
    """Width of the reflected border for random crops."""
    flip: bool = False
    evaluation_batch: int = 1000


@dataclass(frozen=True)
class Images:
    """Images (samples, channels, side, side) as uint8, with their classes as int64."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class ImageBatches:
    """Batches of some images; shuffled and augmented with a seed, unchanged without one."""

    images: Images
    rows: Tensor
    batch: int
    format: ImageFormat
    seed: int | None = None

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # drawn here, not at the first batch: the caller's seed counts when the epoch begins
        return self._epoch(None if self.seed is None else epoch_generator(self.seed))

    def _epoch(self, generator: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.rows
        if generator is not None:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        for part in torch.split(rows, self.batch):
            chosen = part.numpy()
            pixels = torch.from_numpy(self.images.pixels[chosen])
            if generator is None:
                pixels = middle(pixels, self.format.crop)
            else:
                pixels = varied(pixels, self.format, generator)
            labels = torch.from_numpy(self.images.labels[chosen])
            yield normalized(pixels, self.format), labels


def middle(pixels: Tensor, crop: int) -> Tensor:
    """Return the central crop × crop part of each image."""
    edge = (pixels.shape[-1] - crop) // 2
    return pixels[..., edge : edge + crop, edge : edge + crop]


def varied(pixels: Tensor, format: ImageFormat, generator: torch.Generator) -> Tensor:
    """Return a random crop of each image, half of them mirrored; may change `pixels`."""
    count, crop = len(pixels), format.crop
    if format.pad:
        pixels = F.pad(pixels, [format.pad] * 4, mode="reflect")
    spare = pixels.shape[-1] - crop
    if spare:
        top, left = torch.randint(spare + 1, (2, count), generator=generator).numpy()
        # a view of all parts of all images, of which only the chosen ones are copied; in numpy,
        # which copies them line by line and is several times faster here than torch
        parts = sliding_window_view(pixels.numpy(), (crop, crop), axis=(2, 3))
        pixels = torch.from_numpy(parts[np.arange(count), :, top, left])
    if format.flip:
        mirrored = torch.rand(count, generator=generator) < 0.5
        pixels[mirrored] = pixels[mirrored].flip(3)
    return pixels


def normalized(pixels: Tensor, format: ImageFormat) -> Tensor:
    """Return float32 images normalized by mean and standard deviation of the dataset."""
    mean = 255 * torch.tensor(format.mean)[:, None, None]
    std = 255 * torch.tensor(format.std)[:, None, None]
    return pixels.to(torch.float32).sub_(mean).div_(std)


def image_data(
    request: Request, format: ImageFormat, train: Images, test: Images, classes: int, about: str
) -> Data:
    """Return the batches of an image dataset; `about` ends its note."""
    rows, apart = request.split(len(train.labels))
    tested = torch.arange(request.first(len(test.labels)))
    # evaluation keeps no gradients, so it has room for larger batches
    evaluation = max(request.batch, format.evaluation_batch)
    side = format.crop
    return Data(
        train=ImageBatches(train, rows, request.batch, format, request.seed),
        validation=ImageBatches(train, apart, evaluation, format) if len(apart) else None,
        test=ImageBatches(test, tested, evaluation, format),
        example=torch.zeros(1, format.channels, side, side),
        classes=classes,
        note=f"{request.name}: {len(rows):,} training, {len(apart):,} validation and "
        f"{len(tested):,} test images of {format.channels}×{side}×{side}; {about}",
    )
