"""Image datasets, decoded once into a memory-mapped array."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from maestro_lod.cli.data.batches import Data, Request
from maestro_lod.cli.data.cache import cached
from maestro_lod.cli.data.images import ImageFormat, Images, image_data
from maestro_lod.cli.data.sources import Source, find_source, rows
from maestro_lod.errors import DataError, listed
from maestro_lod.files.json_files import read_json_file

_log = logging.getLogger(__name__)
_AT_ONCE = 512


@dataclass(frozen=True)
class ImageSet:
    """Description of an image dataset: source, columns and stored format."""

    format: ImageFormat
    column: str
    """Name of the column of images."""
    hub: str | None
    classes: int | None = None
    """Number of classes; by default that of the training set."""
    test: tuple[str, ...] = ("test",)
    """Possible names of the test split."""
    resized: bool = False
    """True if images differ in size: the central square is resized to the stored side."""


SETS = {
    "mnist": ImageSet(
        ImageFormat(channels=1, side=28, crop=28, mean=(0.1307,), std=(0.3081,)),
        column="image",
        hub="ylecun/mnist",
        classes=10,
    ),
    "cifar10": ImageSet(
        ImageFormat(
            channels=3,
            side=32,
            crop=32,
            pad=4,
            flip=True,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
        ),
        column="img",
        hub="uoft-cs/cifar10",
        classes=10,
    ),
    "imagenet": ImageSet(
        ImageFormat(
            channels=3,
            side=256,
            crop=224,
            flip=True,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            evaluation_batch=200,
        ),
        column="image",
        hub=None,
        test=("val", "validation"),  # the labels of its test set are not public
        resized=True,
    ),
}


def load(request: Request) -> Data:
    """Load an image dataset; decode it if it is not in the cache."""
    name, kind = request.name, SETS[request.name]
    splits = {"train": ("train",), "test": kind.test}
    source = find_source(name, request.directory, splits, kind.hub)
    variant = f"decoded 1 {kind.format.channels}×{kind.format.side}×{kind.format.side}"
    build = partial(_decode_all, name, kind, source)
    checksum, (train, test, compressions) = cached(name, source, variant, build, _read)
    about = f"sha256 {checksum[:12]}"
    if "JPEG" in compressions and not kind.resized:  # ImageNet is published as JPEG
        about += "; JPEG copies: slightly lossy"
    classes = kind.classes or int(train.labels.max()) + 1
    return image_data(request, kind.format, train, test, classes, about)


def _read(folder: Path) -> tuple[Images, Images, list[str]]:
    def split(name: str) -> Images:
        pixels = np.load(folder / f"{name}-pixels.npy", mmap_mode="r", allow_pickle=False)
        return Images(pixels, np.load(folder / f"{name}-labels.npy", allow_pickle=False))

    about = read_json_file(folder / "about.json", {"compressions": [str]})
    return split("train"), split("test"), list(about["compressions"])


def _decode_all(name: str, kind: ImageSet, source: Source, folder: Path) -> None:
    """Write the pixels and labels of both splits to `folder`."""
    classes, compressions = kind.classes, set()
    channels, side = kind.format.channels, kind.format.side
    for split, files in source.splits.items():
        where = f"{name}, {split} split"
        content = _in_folders(source, split) if source.of_pictures else _in_tables(kind, files)
        labels, pictures = content
        classes = _checked_classes(where, labels, classes)
        np.save(folder / f"{split}-labels.npy", labels.astype(np.int64))
        pixels = np.lib.format.open_memmap(
            folder / f"{split}-pixels.npy",
            mode="w+",
            dtype=np.uint8,
            shape=(len(labels), channels, side, side),
        )
        compressions |= _decode(where, kind, pictures, pixels)
        pixels.flush()
    (folder / "about.json").write_text(json.dumps({"compressions": sorted(compressions)}))


def _in_tables(kind: ImageSet, files: Sequence[Path]) -> tuple[NDArray[Any], Iterator[Any]]:
    labels = np.array([label for (label,) in rows(files, "label")])
    return labels, (picture for (picture,) in rows(files, kind.column))


def _in_folders(source: Source, split: str) -> tuple[NDArray[Any], Iterator[Any]]:
    """Return labels and files in random order, so that the first ones are of all classes."""
    known = {path.parent.name for path in source.splits["train"]}
    label = {name: index for index, name in enumerate(sorted(known))}
    files = source.splits[split]
    strange = {path.parent.name for path in files} - known
    if strange:
        raise DataError(
            f"{source.folder} has test classes without training images: "
            f"{listed(sorted(strange))}. Both splits need the same class folders."
        )
    order = np.random.default_rng(0).permutation(len(files))
    labels = np.array([label[files[i].parent.name] for i in order])
    return labels, (files[i] for i in order)


def _checked_classes(where: str, labels: NDArray[Any], classes: int | None) -> int:
    """Check labels and return the number of classes; by default that of the first split."""
    if not len(labels):
        raise DataError(f"{where} is empty. Download it again.")
    if labels.dtype.kind not in "iu":
        wrong = next(label for label in labels.tolist() if not isinstance(label, int))
        raise DataError(f"{where}: labels must be whole numbers, not {wrong!r}.")
    most = int(labels.max()) + 1 if classes is None else classes
    if labels.min() < 0 or labels.max() >= most:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(
            f"{where}: label {wrong} is not one of the {most} classes, 0 to {most - 1}."
        )
    return most


def _decode(
    where: str, kind: ImageSet, pictures: Iterator[Any], pixels: NDArray[np.uint8]
) -> set[str]:
    """Decode all images into `pixels`; return the names of their compressions."""

    def named(index: int, picture: Any) -> str:
        return str(picture) if isinstance(picture, Path) else f"image {index}"

    def decode(index: int, picture: Any) -> str:
        try:
            with Image.open(_opened(picture)) as image:
                pixels[index] = _as_array(image, kind)
                return str(image.format)
        except UnidentifiedImageError as error:
            raise DataError(f"{where}: {named(index, picture)} is not an image.") from error
        except Exception as error:  # Pillow raises many types
            raise DataError(
                f"{where}: {named(index, picture)} cannot be used ({error})."
            ) from error

    compressions: set[str] = set()
    done = 0
    with ThreadPoolExecutor() as pool:
        while some := list(islice(pictures, _AT_ONCE)):
            compressions.update(pool.map(decode, range(done, done + len(some)), some))
            before, done = done, done + len(some)
            if 10 * before // len(pixels) < 10 * done // len(pixels):
                _log.info("%s: %d of %d images decoded", where, done, len(pixels))
    return compressions


def _opened(picture: Any) -> Path | io.BytesIO:
    """Return a path, bytes or a cell of a Hub image column in a form that Pillow can open."""
    if isinstance(picture, Path):
        return picture
    content = picture["bytes"] if isinstance(picture, dict) else picture
    return io.BytesIO(content)


def _as_array(image: Image.Image, kind: ImageSet) -> NDArray[np.uint8]:
    """Return the pixels as (channels, side, side)."""
    mode = "RGB" if kind.format.channels == 3 else "L"
    size = (kind.format.side, kind.format.side)
    if kind.resized:
        image.draft(mode, size)  # decodes JPEG files at about the needed size
        image = ImageOps.fit(image.convert(mode), size, Image.Resampling.BILINEAR)
    if image.size != size:
        raise ValueError(f"it is {image.width}×{image.height}, not {size[0]}×{size[1]}")
    pixels: NDArray[np.uint8] = np.asarray(image.convert(mode)).reshape(*size, -1)
    channels_first: NDArray[np.uint8] = pixels.transpose(2, 0, 1)
    return channels_first
