"""Dataset files: location, splits, checksums and rows."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Image, IterableDataset  # type: ignore[import-untyped]
from huggingface_hub import snapshot_download

from maestro_lod.errors import DataError, listed

_SUFFIXES = (".parquet", ".jsonl")
_PICTURES = {".jpeg", ".jpg", ".png"}
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Source:
    """Files of a dataset by split."""

    folder: Path
    splits: Mapping[str, Sequence[Path]]

    @property
    def of_pictures(self) -> bool:
        """True if the files are images, in one folder per class."""
        return self.splits["train"][0].suffix.lower() in _PICTURES

    def stamp(self) -> str:
        """Return a digest of all paths, sizes and times; reads no file."""
        files = []
        for paths in self.splits.values():
            for path in paths:
                status = path.stat()
                files.append((str(path.absolute()), status.st_size, status.st_mtime_ns))
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()

    def checksum(self) -> str:
        """Return a digest of all contents that does not depend on the folder; reads every file."""
        whole = hashlib.sha256()
        for split, paths in self.splits.items():
            for path in paths:
                name = path.relative_to(self.folder).as_posix()
                whole.update(f"{split} {name} {file_checksum(path)}\n".encode())
        return whole.hexdigest()


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def find_source(
    name: str, directory: Path | None, splits: Mapping[str, Sequence[str]], hub: str | None
) -> Source:
    """Find a dataset in a local folder or on the Hub; `splits` maps splits to possible names."""
    folder = _folder(name, directory, hub)
    if any(path.is_dir() for path in _children(folder / "train")):
        return Source(folder, {key: _in_classes(folder, names) for key, names in splits.items()})
    for suffix in _SUFFIXES:
        files = sorted(folder.rglob(f"*{suffix}"))
        found = {key: _of_split(files, names) for key, names in splits.items()}
        if found["train"]:
            break
    for key, paths in found.items():
        if not paths:
            split = splits[key][0]
            raise DataError(
                f"{folder} has no {split} split: expected {split}.parquet, {split}-*.parquet or "
                f"{split}.jsonl."
            )
    return Source(folder, found)


def _folder(name: str, directory: Path | None, hub: str | None) -> Path:
    if directory is not None:
        place = Path(directory) / name
        if not place.is_dir():
            raise DataError(f"{place} does not exist. {_advice(name, hub)}")
        return place
    home = os.environ.get("LOD_DATA")
    if home and (Path(home) / name).is_dir():
        return Path(home) / name
    looked = f" in {home}" if home else ""
    if hub is None:
        raise DataError(f"{name} was not found{looked}. {_advice(name, hub)}")
    try:
        patterns = [f"*{suffix}" for suffix in _SUFFIXES]
        return Path(snapshot_download(hub, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # network, disk and Hub raise many types
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(
            f"{name} was not found{looked}, and not downloaded ({reason}). {_advice(name, hub)}"
        ) from error


def _advice(name: str, hub: str | None) -> str:
    where = f"DIR/{name} and set LOD_DATA=DIR"
    if hub is None:
        return (
            "Put its parquet files (train-*, validation-*), or train/CLASS/*.JPEG and "
            f"val/CLASS/*.JPEG, in {where}."
        )
    return f"Download the files of huggingface.co/datasets/{hub} to {where}."


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _of_split(files: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """Return the files of a split: train.parquet, train-00000-of-00001.parquet, train/0.parquet."""
    named = re.compile(rf"({'|'.join(names)})(-|$)")
    own = [path for path in files if named.match(path.stem)]
    return own or [path for path in files if path.parent.name in names]


def _in_classes(folder: Path, names: Sequence[str]) -> list[Path]:
    for name in names:
        paths = [
            path
            for kind in _children(folder / name)
            if kind.is_dir()
            for path in _children(kind)
            if path.suffix.lower() in _PICTURES
        ]
        if paths:
            return paths
    raise DataError(f"{folder / names[0]} has no images in class folders: CLASS/*.JPEG.")


def rows(files: Sequence[Path], *columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns row by row; images stay encoded."""
    shown = listed([str(path) for path in files], most=2)
    if not any(path.stat().st_size for path in files):
        raise DataError(f"{shown} is empty.")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            present = _table(files, scratch).column_names
            missing = sorted(set(columns) - set(present))
            if not missing:
                table = _table(files, scratch, columns)
                for part in table.iter(_ROWS_AT_ONCE):
                    yield from zip(*(part[column] for column in columns), strict=True)
    except Exception as error:  # of Arrow, JSON, the disk: many families, one meaning
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{shown} cannot be read ({reason}). Download it again.") from error
    if missing:
        raise DataError(f"{shown} has no column {listed(missing)}; it has {listed(present)}.")


def _table(files: Sequence[Path], scratch: str, columns: Sequence[str] = ()) -> Any:
    """Return a stream of rows: ImageNet does not fit into memory and is read once."""
    paths = [str(path) for path in files]
    if files[0].suffix == ".jsonl":
        table = IterableDataset.from_json(paths, cache_dir=scratch)
    else:
        only = {"columns": list(columns)} if columns else {}
        table = IterableDataset.from_parquet(
            paths, cache_dir=scratch, batch_size=_ROWS_AT_ONCE, **only
        )
    for column in columns:
        if isinstance(table.features[column], Image):
            table = table.cast_column(column, Image(decode=False))
    return table
