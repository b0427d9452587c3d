"""Cache of preprocessed datasets, keyed by the checksum of the source files.

An entry is built in a temporary directory and moved into place, so that it is never incomplete and
several processes may build it at the same time. Size, time and checksum of each file are recorded:
a file with another size or time is read and compared, and a damaged entry is built again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from maestro_lod.cli.cache_directory import cache_directory
from maestro_lod.cli.data.sources import Source, file_checksum
from maestro_lod.errors import CheckpointError, DataError
from maestro_lod.files.atomic import replacing
from maestro_lod.files.json_files import Shape, read_json_file

T = TypeVar("T")

_log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_FILE: Shape = {"size": int, "mtime_ns": int, "sha256": str}
_SHAPE: Shape = {"stamp": str, "checksum": str, "files": {str: _FILE}}


def cached(
    name: str,
    source: Source,
    variant: str,
    build: Callable[[Path], None],
    read: Callable[[Path], T],
) -> tuple[str, T]:
    """Return the checksum of a source and the cached result of preprocessing it.

    Args:
        name: Name of the dataset.
        source: Its files.
        variant: Description of what `build` does, part of the key.
        build: Writes the preprocessed files; called if the entry is missing or damaged.
        read: Reads the preprocessed files.
    """
    cache = cache_directory()
    try:
        stamp = source.stamp()
        checksum = _known_checksum(cache, name, stamp) or source.checksum()
    except OSError as error:
        raise DataError(f"the files of {name} cannot be read ({error}).") from error
    key = hashlib.sha256(f"{checksum} {variant}".encode()).hexdigest()[:16]
    entry = cache / f"{name}-{key}"
    if entry.exists():
        # a damaged entry, or one that another process is replacing
        with suppress(OSError, ValueError, CheckpointError):
            if _is_sound(entry, stamp):
                return checksum, read(entry)
        _log.warning("%s is damaged and is built again", entry)
    return checksum, _made(entry, {"stamp": stamp, "checksum": checksum}, build, read)


def _known_checksum(cache: Path, name: str, stamp: str) -> str | None:
    """Return the recorded checksum of a source whose files have not changed; else None."""
    for path in cache.glob(f"{name}-*/{_MANIFEST}"):
        manifest = _manifest(path)
        if manifest is not None and manifest["stamp"] == stamp:
            return str(manifest["checksum"])
    return None


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = read_json_file(path, _SHAPE)
    except CheckpointError:
        return None
    return manifest


def _described(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": file_checksum(path),
    }


def _is_sound(entry: Path, stamp: str) -> bool:
    """Return True if all files are as they were written; record the ones that were read."""
    manifest = _manifest(entry / _MANIFEST)
    if manifest is None:
        return False
    files = manifest["files"]
    now = {}
    for name, before in files.items():
        status = (entry / name).stat()
        if status.st_size != before["size"]:
            return False
        same = status.st_mtime_ns == before["mtime_ns"]
        now[name] = before if same else _described(entry / name)
        if now[name]["sha256"] != before["sha256"]:
            return False
    if now != files or manifest["stamp"] != stamp:
        with suppress(OSError, CheckpointError):  # a read-only cache is sufficient
            _write(entry / _MANIFEST, manifest | {"files": now, "stamp": stamp})
    return True


def _write(path: Path, manifest: dict[str, Any]) -> None:
    with replacing(path) as place:
        place.write_text(json.dumps(manifest, indent=2))


def _made(
    entry: Path, manifest: dict[str, Any], build: Callable[[Path], None], read: Callable[[Path], T]
) -> T:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}-"))
    except OSError as error:
        raise DataError(
            f"the cache {entry.parent} cannot be written ({error}). Set LOD_CACHE to a directory "
            "that can."
        ) from error
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        build(new)
        files = {path.name: _described(path) for path in sorted(new.iterdir())}
        _write(new / _MANIFEST, manifest | {"files": files})
        # opened before they move: another process may replace the entry
        result = read(new)
        with suppress(FileNotFoundError):
            entry.rename(old)
        with suppress(OSError):  # another process was faster
            new.rename(entry)
        return result
    except OSError as error:
        raise DataError(
            f"the cache {entry.parent} cannot be written ({error}). Make room, or set LOD_CACHE to "
            "another directory."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
