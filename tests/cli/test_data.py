"""Datasets come from files that are found, decoded once, split alike and varied as promised."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet
from torch import Tensor

from maestro_lod.cli.cache_directory import cache_directory
from maestro_lod.cli.data import DATA, Data, cache, decoded, images, load_data, sources
from maestro_lod.cli.data.batches import Request
from maestro_lod.cli.data.images import ImageFormat
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.errors import DataError, MaestroError, OptionError

REAL = Path(os.environ.get("LOD_DATA", ""))
CIFAR = decoded.SETS["cifar10"].format


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the data, the cache or the network of the machine."""

    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no network\nin tests")

    monkeypatch.setenv("LOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOD_DATA", raising=False)
    monkeypatch.setattr(sources, "snapshot_download", unreachable)


def pictures(count: int, kind: str = "mnist", seed: int = 0) -> NDArray[np.uint8]:
    shape = (count, 28, 28) if kind == "mnist" else (count, 32, 32, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def packed(picture: NDArray[np.uint8], compression: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, compression)
    return file.getvalue()


def write(
    path: Path, cells: Iterable[bytes | None], labels: Iterable[Any], column: str = "image"
) -> None:
    """A parquet file as the Hub has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": cell, "path": None} for cell in cells]
    parquet.write_table(pa.table({column: pa.array(rows, content), "label": list(labels)}), path)


def write_set(folder: Path, name: str = "mnist", train: int = 20, test: int = 7) -> Path:
    """A small dataset whose labels count up, in folder/name."""
    column = decoded.SETS[name].column
    for split, count in (("train", train), ("test", test)):
        cells = map(packed, pictures(count, name, seed=len(split)))
        write(folder / name / f"{split}.parquet", cells, [i % 10 for i in range(count)], column)
    return folder


def epoch(batches: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


# --- asking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"name": "cifar"}, "Did you mean 'cifar10'?"),
        ({"batch": 0}, "batch=0"),
        ({"batch": 2.5}, "batch=2.5"),
        ({"limit": 0}, "limit=0"),
        ({"limit": -3}, "limit=-3"),
        ({"seed": -1}, "seed=-1"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"validation": -0.1}, "validation=-0.1"),
        ({"validation": float("nan")}, "validation=nan"),
        ({"validation": 0.9, "limit": 1}, "leaves none to train on"),
        ({"min_count": 3}, "digits has no option 'min_count'; it has none."),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], told: str):
    options = {"name": "digits", "batch": 8} | options
    with pytest.raises(OptionError) as raised:
        load_data(options.pop("name"), **options)
    assert told in str(raised.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "maestro_lod.cli.data.decoded", raising=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"mnist needs the package PIL: pip install"):
        load_data("mnist", batch=8)


def test_every_name_has_a_loader():
    for module in DATA.values():
        assert callable(importlib.import_module(f"maestro_lod.cli.data.{module}").load)


# --- digits, and what all image datasets share ----------------------------------------------------


def test_digits_are_scikit_learns_at_mnists_size():
    data = load_data("digits", batch=100, validation=0)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = epoch(data.test)
    assert torch.equal(y, torch.tensor(labels[4::5]))
    assert x.shape == (359, 1, 28, 28)
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    for digit, x_of_digit in zip(pixels[4::5], x * 0.3251 + 0.3058, strict=True):
        small = Image.fromarray(digit.reshape(8, 8).astype(np.float32) / 16)
        large = np.asarray(small.resize((28, 28), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(x_of_digit[0].numpy(), large, atol=0.51 / 255)
    assert data.validation is None
    assert data.classes == 10 and data.example.shape == (1, 1, 28, 28)
    assert LeNet()(data.example).shape == (1, 10)


def test_training_images_have_mean_zero_and_deviation_one():
    x, _ = epoch(load_data("digits", batch=100, validation=0).train)
    assert abs(float(x.mean())) < 1e-3 and abs(float(x.std()) - 1) < 1e-3


def test_every_sample_comes_once_and_the_last_batch_is_whatever_is_left():
    data = load_data("digits", batch=100)
    assert data.validation is not None and data.test is not None
    sizes = [len(y) for _, y in data.train]
    assert sizes == [100] * 12 + [94]
    assert [len(sizes), 1, 1] == [len(data.train), len(data.validation), len(data.test)]
    x = torch.cat([epoch(data.train)[0], epoch(data.validation)[0]]).flatten(1)
    everything, _ = epoch(load_data("digits", batch=100, validation=0).train)
    assert torch.equal(
        torch.tensor(sorted(map(hash_of, x))),
        torch.tensor(sorted(map(hash_of, everything.flatten(1)))),
    )


def hash_of(row: Tensor) -> int:
    return hash(row.numpy().tobytes()) % 2**62


def test_one_seed_fixes_an_epoch_and_another_one_changes_it():
    data = load_data("digits", batch=64)

    def after(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return epoch(data.train)

    first, again, other = after(1), after(1), after(2)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
    assert not torch.equal(epoch(data.train)[1], other[1]), "the next epoch has another order"


def test_the_seed_counts_when_an_epoch_begins():
    data = load_data("digits", batch=64)
    torch.manual_seed(1)
    begun = iter(data.train)
    torch.rand(5)  # what happens before the first batch is taken does not matter
    torch.manual_seed(1)
    expected = epoch(data.train)
    assert torch.equal(epoch(begun)[1], expected[1])


def test_two_epochs_at_once_do_not_disturb_each_other():
    data = load_data("digits", batch=300)
    torch.manual_seed(1)
    one, two = epoch(data.train), epoch(data.train)
    torch.manual_seed(1)
    pairs = list(zip(iter(data.train), iter(data.train), strict=True))
    assert torch.equal(torch.cat([a[1] for a, _ in pairs]), one[1])
    assert torch.equal(torch.cat([b[1] for _, b in pairs]), two[1])


def test_the_seed_of_the_data_changes_the_order_but_not_the_split():
    one, two = (load_data("digits", batch=2000, seed=seed) for seed in (0, 1))
    orders = []
    for data in (one, two):
        torch.manual_seed(0)
        orders.append(epoch(data.train)[0])
    assert not torch.equal(*orders)
    assert {*map(hash_of, orders[0])} == {*map(hash_of, orders[1])}
    assert one.validation is not None and two.validation is not None
    assert torch.equal(epoch(one.validation)[0], epoch(two.validation)[0])


def test_evaluation_is_the_same_every_time_and_draws_nothing():
    data = load_data("digits", batch=64)
    before = torch.get_rng_state()
    first, again = epoch(data.test), epoch(data.test)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_limit_takes_the_first_samples():
    data = load_data("digits", batch=64, limit=50)
    everything = load_data("digits", batch=64, validation=0)
    assert data.validation is not None
    used = torch.cat([epoch(data.train)[0], epoch(data.validation)[0]])
    first = everything.train.images.pixels[:50]
    format = everything.train.format
    expected = images.normalized(torch.from_numpy(first), format)
    assert {*map(hash_of, used)} == {*map(hash_of, expected)}
    assert torch.equal(epoch(data.test)[0], epoch(everything.test)[0][:50])
    assert "45 training, 5 validation and 50 test" in data.note


@given(
    samples=st.integers(2, 400),
    share=st.floats(0, 0.5),
    limit=st.none() | st.integers(2, 500),
    seed=st.integers(0, 9),
)
def test_splits_are_disjoint_complete_and_the_same_for_every_seed(
    samples: int, share: float, limit: int | None, seed: int
):
    train, apart = Request("any", 8, seed, None, share, limit).split(samples)
    count = min(samples, limit or samples)
    assert sorted([*train.tolist(), *apart.tolist()]) == list(range(count))
    assert len(apart) == (max(1, round(share * count)) if share else 0)
    again = Request("any", 3, 0, None, share, limit).split(samples)
    assert torch.equal(train, again[0]) and torch.equal(apart, again[1])


# --- augmentation ---------------------------------------------------------------------------------


@given(
    side=st.integers(6, 10),
    pad=st.integers(0, 4),
    cut=st.integers(0, 3),
    flip=st.booleans(),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_a_varied_image_is_a_part_of_the_padded_image_maybe_mirrored(
    side: int, pad: int, cut: int, flip: bool, channels: int, seed: int
):
    crop = side - cut
    format = ImageFormat(channels, side, (0.0,), (1.0,), crop=crop, pad=pad, flip=flip)
    shape = (5, channels, side, side)
    originals = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    generator = torch.Generator().manual_seed(seed)
    results = images.varied(torch.from_numpy(originals.copy()), format, generator)
    assert results.shape == (5, channels, crop, crop) and results.dtype == torch.uint8
    for original, result in zip(originals, results.numpy(), strict=True):
        padded = np.pad(original, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
        spare = range(padded.shape[-1] - crop + 1)
        parts = [padded[:, y : y + crop, x : x + crop] for y in spare for x in spare]
        if flip:
            parts += [part[..., ::-1] for part in parts]
        assert any(np.array_equal(part, result) for part in parts)


def test_all_places_and_both_directions_occur_about_equally_often():
    place = torch.arange(32, dtype=torch.uint8)
    pixels = torch.stack(
        [place.expand(32, 32), place[:, None].expand(32, 32), place.expand(32, 32)]
    )
    generator = torch.Generator().manual_seed(0)
    many = images.varied(pixels.expand(4050, -1, -1, -1).clone(), CIFAR, generator).int()
    mirrored = many[:, 0, 0, 10] > many[:, 0, 0, 11]
    assert 0.45 < mirrored.float().mean() < 0.55
    # away from the border, a pixel tells its own place: its row, and its column unless mirrored
    top = many[:, 1, 10, 0] - 10 + 4
    left = many[~mirrored, 0, 0, 10] - 10 + 4
    for offsets in (top, left):
        share = offsets.bincount(minlength=9) / len(offsets)
        assert len(share) == 9 and share.min() > 0.08 and share.max() < 0.14
    assert abs(float(torch.corrcoef(torch.stack([top[~mirrored], left]).float())[0, 1])) < 0.1


@given(side=st.integers(1, 9), cut=st.integers(0, 8))
def test_the_middle_is_in_the_middle(side: int, cut: int):
    cut = min(cut, side - 1)
    row = images.middle(torch.arange(side).expand(1, 1, side, side), side - cut)[0, 0, 0]
    before, after = int(row[0]), side - 1 - int(row[-1])
    assert len(row) == side - cut and after - before in (0, 1)


def test_pixels_are_normalized_per_channel():
    format = ImageFormat(3, 1, (0.5, 0.25, 0.0), (0.5, 0.25, 1.0), crop=1)
    pixels = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    x = images.normalized(pixels, format)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.flatten(), torch.tensor([1.0, -1.0, 0.2]))


# --- files ----------------------------------------------------------------------------------------


def test_images_arrive_as_they_are_in_the_file(tmp_path: Path):
    data = load_data("mnist", batch=4, directory=write_set(tmp_path), validation=0)
    x, y = epoch(data.test)
    pixels = torch.from_numpy(pictures(7, seed=4)).float() / 255
    torch.testing.assert_close(x, ((pixels - 0.1307) / 0.3081)[:, None])
    assert y.tolist() == list(range(7)) and y.dtype == torch.int64
    assert data.classes == 10 and "sha256" in data.note and "lossy" not in data.note


def test_only_training_images_are_varied(tmp_path: Path):
    data = load_data("cifar10", batch=20, directory=write_set(tmp_path, "cifar10"), validation=0.5)
    assert data.validation is not None
    raw = torch.from_numpy(pictures(20, "cifar10", seed=5)).permute(0, 3, 1, 2)
    known = {*map(hash_of, images.normalized(raw, CIFAR))}
    assert {*map(hash_of, epoch(data.validation)[0])} < known
    assert len({*map(hash_of, epoch(data.train)[0])} & known) <= 1
    untouched = torch.from_numpy(pictures(7, "cifar10", seed=4)).permute(0, 3, 1, 2)
    assert torch.equal(epoch(data.test)[0], images.normalized(untouched, CIFAR))
    np.testing.assert_array_equal(data.train.images.pixels, raw.numpy())


def test_augmentation_is_fixed_by_the_seed_too(tmp_path: Path):
    data = load_data("cifar10", batch=8, directory=write_set(tmp_path, "cifar10"))
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(epoch(data.train)[0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    "layout",
    [
        ("train.parquet", "test.parquet"),
        ("mnist/train-00000-of-00001.parquet", "mnist/test-00000-of-00001.parquet"),
        ("default/train/0000.parquet", "default/test/0000.parquet"),
    ],
)
def test_the_layouts_of_the_hub_are_understood(tmp_path: Path, layout: tuple[str, str]):
    write_set(tmp_path)
    for name, place in zip(("train.parquet", "test.parquet"), layout, strict=True):
        target = tmp_path / "other" / "mnist" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "mnist" / name, target)
    data = load_data("mnist", batch=4, directory=tmp_path / "other", validation=0)
    assert len(data.train) == 5 and len(epoch(data.test)[1]) == 7


def test_a_split_in_several_files_is_read_in_their_order(tmp_path: Path):
    write_set(tmp_path)
    (tmp_path / "mnist" / "train.parquet").unlink()
    for part in (2, 0, 1):
        path = tmp_path / "mnist" / f"train-{part:05}-of-00003.parquet"
        write(path, map(packed, pictures(3, seed=part)), [part] * 3)
    data = load_data("mnist", batch=4, directory=tmp_path, validation=0)
    assert data.train.images.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    np.testing.assert_array_equal(data.train.images.pixels[3, 0], pictures(3, seed=1)[0])


def test_columns_without_the_hubs_description_and_plain_bytes_are_read_as_well(tmp_path: Path):
    write_set(tmp_path)
    cells = pa.array(list(map(packed, pictures(5))), pa.binary())
    table = pa.table({"label": list(range(5)), "more": ["x"] * 5, "image": cells})
    parquet.write_table(table, tmp_path / "mnist" / "train.parquet")
    data = load_data("mnist", batch=4, directory=tmp_path, validation=0)
    np.testing.assert_array_equal(data.train.images.pixels[:, 0], pictures(5))


def test_columns_with_the_hubs_description_are_read(tmp_path: Path):
    write_set(tmp_path)
    path = tmp_path / "mnist" / "train.parquet"
    features = {
        "image": {"_type": "Image"},
        "label": {"names": [str(i) for i in range(10)], "_type": "ClassLabel"},
    }
    described = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(parquet.read_table(path).replace_schema_metadata(described), path)
    data = load_data("mnist", batch=4, directory=tmp_path, validation=0)
    np.testing.assert_array_equal(data.train.images.pixels[:, 0], pictures(20, seed=5))


def test_jpeg_copies_are_called_lossy(tmp_path: Path):
    write_set(tmp_path, "cifar10")
    cells = [packed(picture, "JPEG") for picture in pictures(4, "cifar10")]
    write(tmp_path / "cifar10" / "train.parquet", cells, range(4), "img")
    assert "JPEG copies: slightly lossy" in load_data("cifar10", batch=4, directory=tmp_path).note


def write_classes(folder: Path, compression: str = "JPEG") -> Path:
    """A folder of class folders; the class tells the colour, the sizes differ."""
    for split, count in (("train", 6), ("val", 2)):
        for index, kind in enumerate(("n02", "n01", "n03")):
            for number in range(count):
                shape = (300 + 20 * number, 280 + 70 * index, 3)
                picture = np.full(shape, 60 * (1 + int(kind[2])), dtype=np.uint8)
                path = folder / "imagenet" / split / kind / f"{kind}_{number}.{compression}"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(path, compression)
    return folder


def test_imagenet_is_read_from_class_folders(tmp_path: Path):
    data = load_data("imagenet", batch=4, directory=write_classes(tmp_path), validation=0)
    assert data.classes == 3 and data.example.shape == (1, 3, 224, 224)
    for batches, count in ((data.train, 18), (data.test, 6)):
        x, y = epoch(batches)
        assert x.shape == (count, 3, 224, 224)
        assert y.bincount().tolist() == [count // 3] * 3
        grey = 60.0 * (2 + y) / 255
        mean, std = torch.tensor(data.train.format.mean), torch.tensor(data.train.format.std)
        torch.testing.assert_close(
            x.mean((2, 3)) * std + mean, grey[:, None].expand(-1, 3), atol=0.01, rtol=0
        )
    assert "lossy" not in data.note, "ImageNet is published as JPEG"
    assert len({*data.train.images.labels[:5].tolist()}) > 1, (
        "the first ones are of several classes"
    )


def test_imagenet_keeps_the_middle_square(tmp_path: Path):
    write_classes(tmp_path)
    wide = np.zeros((512, 1024, 3), dtype=np.uint8)
    wide[:, 256:768] = 255
    for path in (tmp_path / "imagenet" / "val").rglob("*.JPEG"):
        Image.fromarray(wide).save(path, "JPEG")
    data = load_data("imagenet", batch=4, directory=tmp_path)
    assert data.test.images.pixels[:, :, :, 4:-4].min() > 250


def test_imagenet_is_read_from_tables_and_tested_on_the_validation_split(tmp_path: Path):
    folder = tmp_path / "imagenet" / "data"
    cells = [packed(np.full((300, 260, 3), 9 * i, dtype=np.uint8), "JPEG") for i in range(6)]
    write(folder / "train-00000-of-00001.parquet", cells, [0, 1, 2, 0, 1, 2])
    write(folder / "validation-00000-of-00001.parquet", cells[:3], [2, 1, 0])
    write(folder / "test-00000-of-00001.parquet", cells[:1], [-1])
    data = load_data("imagenet", batch=4, directory=tmp_path, validation=0)
    assert epoch(data.test)[1].tolist() == [2, 1, 0] and data.classes == 3


def test_class_folders_must_agree(tmp_path: Path):
    write_classes(tmp_path)
    (tmp_path / "imagenet" / "train" / "n03").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="n03"):
        load_data("imagenet", batch=4, directory=tmp_path)


def test_images_outside_class_folders_are_not_taken_for_a_split(tmp_path: Path):
    write_classes(tmp_path)
    folder = tmp_path / "imagenet" / "val"
    for path in list(folder.rglob("*.JPEG")):
        path.rename(folder / path.name)
    with pytest.raises(DataError, match=r"val has no images in class folders"):
        load_data("imagenet", batch=4, directory=tmp_path)


# --- places ---------------------------------------------------------------------------------------


def size_of_train(data: Data) -> int:
    return len(epoch(data.train)[1])


def test_data_is_looked_for_in_the_order_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def found() -> int:
        return size_of_train(load_data("mnist", batch=4, validation=0))

    hub = write_set(tmp_path / "hub", train=11) / "mnist"
    asked: list[str] = []

    def download(repository: str, **options: Any) -> str:
        asked.append(f"{options['repo_type']} {repository}")
        return str(hub)

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert found() == 11 and asked == ["dataset ylecun/mnist"]
    monkeypatch.setenv("LOD_DATA", str(tmp_path / "environment"))
    assert found() == 11, "a place without this dataset is passed by"
    write_set(tmp_path / "environment", train=13)
    assert found() == 13
    given = load_data("mnist", batch=4, validation=0, directory=write_set(tmp_path, train=14))
    assert size_of_train(given) == 14
    assert len(asked) == 2


def test_a_given_directory_is_the_only_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOD_DATA", str(write_set(tmp_path / "environment")))
    with pytest.raises(DataError) as raised:
        load_data("mnist", batch=4, directory=tmp_path / "typo")
    told = str(raised.value)
    assert str(tmp_path / "typo" / "mnist") in told and "ylecun/mnist" in told


@pytest.mark.parametrize("name", [name for name in DATA if name != "digits"])
@pytest.mark.parametrize("somewhere", [False, True])
def test_missing_data_says_what_to_put_where(
    name: str, somewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if somewhere:
        monkeypatch.setenv("LOD_DATA", str(tmp_path / "somewhere"))
    with pytest.raises(DataError) as raised:
        load_data(name, batch=4)
    told = str(raised.value)
    assert "\n" not in told
    assert f"DIR/{name} and set LOD_DATA=DIR" in told
    assert (str(tmp_path / "somewhere") in told) == somewhere
    assert ("train/CLASS" if name == "imagenet" else "huggingface.co/datasets/") in told
    assert ("no network" in told) == (name != "imagenet"), "ImageNet is not asked for on the Hub"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path):
    (write_set(tmp_path) / "mnist" / "train.parquet").unlink()
    (tmp_path / "mnist" / "train.parquet").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"mnist cannot be read .*train\.parquet"):
        load_data("mnist", batch=4, directory=tmp_path)


def test_offline_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "snapshot_download", huggingface_hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(DataError, match="not downloaded"):
        load_data("mnist", batch=4)


# --- bad files ------------------------------------------------------------------------------------


def damaged(content: bytes) -> bytes:
    return content[:60] + bytes(len(content) - 120) + content[-60:]


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no split": (Path.unlink, "has no train split"),
    "no parquet": (lambda path: path.write_bytes(b"hello"), "cannot be read"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "cannot be read"),
    "damaged": (lambda path: path.write_bytes(damaged(path.read_bytes())), "cannot be read"),
    "no bytes": (lambda path: path.write_bytes(b""), "is empty"),
    "no rows": (lambda path: write(path, [], pa.array([], pa.int64())), "is empty"),
    "other column": (
        lambda path: write(path, [b""], [0], column="picture"),
        "has no column image; it has picture, label",
    ),
    "no label": (
        lambda path: parquet.write_table(pa.table({"image": [b""]}), path),
        "has no column label; it has image",
    ),
    "no image": (lambda path: write(path, [b"hello"], [0]), "image 0 is not an image"),
    "image missing": (lambda path: write(path, [None], [0]), "image 0 is not an image"),
    "cut image": (
        lambda path: write(path, [packed(pictures(1)[0])[:-400]], [0]),
        "image 0 cannot be used",
    ),
    "other size": (
        lambda path: write(path, map(packed, pictures(2, "cifar10")), [0, 1]),
        "it is 32×32, not 28×28",
    ),
    "numbers for images": (
        lambda path: parquet.write_table(pa.table({"image": [3], "label": [0]}), path),
        "image 0 cannot be used",
    ),
    "label too large": (
        lambda path: write(path, map(packed, pictures(2)), [3, 10]),
        "label 10 is not one of the 10 classes, 0 to 9",
    ),
    "label hidden": (
        lambda path: write(path, map(packed, pictures(2)), [3, -1]),
        "label -1 is not one of the 10 classes",
    ),
    "label of text": (
        lambda path: write(path, map(packed, pictures(2)), ["7", "8"]),
        "labels must be whole numbers, not '7'",
    ),
    "label missing": (
        lambda path: write(path, map(packed, pictures(2)), [1, None]),
        "labels must be whole numbers, not None",
    ),
}


@pytest.mark.parametrize(("spoil", "told"), BAD.values(), ids=BAD.keys())
def test_bad_files_give_one_clear_line(tmp_path: Path, spoil: Callable[[Path], Any], told: str):
    spoil(write_set(tmp_path) / "mnist" / "train.parquet")
    with pytest.raises(MaestroError) as raised:
        load_data("mnist", batch=4, directory=tmp_path)
    assert isinstance(raised.value, DataError)
    assert told in str(raised.value) and "\n" not in str(raised.value)
    left = list((tmp_path / "cache").iterdir()) if (tmp_path / "cache").exists() else []
    assert left == [], "nothing half-made stays"


# --- cache ----------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[], Data]:
    write_set(tmp_path / "data")
    return lambda: load_data("mnist", batch=4, directory=tmp_path / "data", validation=0)


def forbidden(*_: Any) -> None:
    raise AssertionError("this should not be called")


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, nothing may be decoded."""
    return lambda: monkeypatch.setattr(decoded, "_decode_all", forbidden)


@pytest.fixture
def no_hashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, no file may be read for its checksum."""

    def forbid() -> None:
        for module in (sources, cache):
            monkeypatch.setattr(module, "file_checksum", forbidden)

    return forbid


def test_data_is_decoded_and_hashed_once(
    loaded: Callable[[], Data], no_decoding: Callable[[], None], no_hashing: Callable[[], None]
):
    first = loaded()
    no_decoding()
    no_hashing()
    again = loaded()
    assert again.note == first.note
    assert torch.equal(epoch(again.test)[0], epoch(first.test)[0])


def test_arrays_are_mapped_not_read(loaded: Callable[[], Data]):
    pixels = loaded().train.images.pixels
    assert isinstance(pixels, np.memmap) and not pixels.flags.writeable


def test_a_changed_source_is_decoded_anew(loaded: Callable[[], Data], tmp_path: Path):
    before = loaded()
    write(tmp_path / "data" / "mnist" / "test.parquet", map(packed, pictures(7, seed=9)), range(7))
    after = loaded()
    assert after.note != before.note
    np.testing.assert_array_equal(after.test.images.pixels[:, 0], pictures(7, seed=9))
    assert len(entries(tmp_path)) == 2


def test_the_same_files_elsewhere_use_the_same_entry(
    loaded: Callable[[], Data], tmp_path: Path, no_decoding: Callable[[], None]
):
    note = loaded().note
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    no_decoding()
    copied = load_data("mnist", batch=4, directory=tmp_path / "copy", validation=0)
    assert copied.note == note and len(entries(tmp_path)) == 1


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def change_one_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "pixels cut short": ("train-pixels.npy", cut_short),
    "pixels changed": ("test-pixels.npy", change_one_byte),
    "labels changed": ("train-labels.npy", change_one_byte),
    "pixels gone": ("train-pixels.npy", Path.unlink),
    "manifest gone": ("manifest.json", Path.unlink),
    "manifest cut short": ("manifest.json", cut_short),
    "manifest of something else": ("manifest.json", lambda path: path.write_text("[]")),
    "manifest without sizes": (
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace('"size"', '"sise"')),
    ),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_made_anew(
    loaded: Callable[[], Data],
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], Any],
    caplog: pytest.LogCaptureFixture,
):
    before = loaded()
    expected, note = epoch(before.test)[0], before.note
    labels = before.train.images.labels.tolist()
    (entry,) = entries(tmp_path)
    damage(entry / name)
    with caplog.at_level(logging.WARNING):
        after = loaded()
    assert "is damaged and is built again" in caplog.text
    assert torch.equal(epoch(after.test)[0], expected)
    assert after.train.images.labels.tolist() == labels and after.note == note
    assert entries(tmp_path) == [entry], "the damaged one is gone, and nothing else is left"
    caplog.clear()
    loaded()
    assert not caplog.text


def test_an_entry_that_was_only_touched_is_kept(
    loaded: Callable[[], Data],
    tmp_path: Path,
    no_decoding: Callable[[], None],
    no_hashing: Callable[[], None],
):
    loaded()
    (entry,) = entries(tmp_path)
    os.utime(entry / "train-pixels.npy", (1, 1))
    no_decoding()
    loaded()  # read and compared
    no_hashing()
    loaded()  # and remembered


def test_a_cache_that_cannot_be_written_is_an_error(
    loaded: Callable[[], Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="Set LOD_CACHE to a directory that can") as raised:
        loaded()
    assert "\n" not in str(raised.value)


def test_a_full_disk_is_an_error_and_leaves_nothing(
    loaded: Callable[[], Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match="No space left"):
        loaded()
    assert entries(tmp_path) == []


def test_the_cache_is_in_the_home_directory_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LOD_CACHE")
    assert cache_directory() == tmp_path / ".cache" / "maestro-lod"


@pytest.mark.parametrize("damage_first", [False, True])
def test_another_process_may_be_faster(tmp_path: Path, damage_first: bool):
    """The other one starts and ends while this one builds; both get what they asked for."""
    (tmp_path / "file").write_text("content")
    source = sources.Source(tmp_path, {"train": [tmp_path / "file"]})

    def build(folder: Path) -> None:
        (folder / "made").write_text("content")

    def read(folder: Path) -> str:
        return (folder / "made").read_text()

    def slow_build(folder: Path) -> None:
        assert cache.cached("any", source, "", build, read)[1] == "content"
        build(folder)

    if damage_first:
        cache.cached("any", source, "", build, read)
        cut_short(entries(tmp_path)[0] / "made")
    assert cache.cached("any", source, "", slow_build, read)[1] == "content"
    (entry,) = entries(tmp_path)
    assert read(entry) == "content"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_may_decode_at_once(tmp_path: Path):
    write_set(tmp_path / "data", train=600)
    code = (
        "import sys\nfrom pathlib import Path\nfrom maestro_lod.cli.data import load_data\n"
        "sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
        "data = load_data('mnist', batch=4, directory=Path(sys.argv[1]))\n"
        "sys.stdout.write(f'{data.note} {data.train.images.pixels.sum()}\\n')"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "data")]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    told = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        told.append(process.communicate(timeout=120)[0])
        assert process.returncode == 0
    assert told[0] == told[1] and "540 training" in told[0]
    assert len(entries(tmp_path)) == 1


# --- the real files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_real_files_are_understood(name: str, tmp_path: Path):
    found = sorted((REAL / name).rglob("test*.parquet"))
    if not found:
        pytest.skip(f"no {name} in {REAL}; put it there or set LOD_DATA")
    (tmp_path / name).mkdir()
    some = parquet.read_table(found[0]).slice(0, 2000)  # all would take too long
    for split in ("train", "test"):
        parquet.write_table(some, tmp_path / name / f"{split}.parquet")
    data = load_data(name, batch=64, directory=tmp_path)
    x, y = epoch(data.test)
    assert y.tolist() == some["label"].to_pylist()
    assert x.mean((0, 2, 3)).abs().max() < 0.1 and (x.std((0, 2, 3)) - 1).abs().max() < 0.1
    jpeg = some[decoded.SETS[name].column][0].as_py()["bytes"].startswith(b"\xff\xd8")
    assert ("lossy" in data.note) == jpeg
