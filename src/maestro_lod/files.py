"""Files that are there as a whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maestro_lod.errors import CheckpointError

_PREFIX = ".writing-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place to write a file of that name; it replaces the old one once the block is done.

    Readers see the old file or the new one, never half. The place is a directory of its own beside
    the target, since libraries that write may make temporary files themselves: all of them go away
    with it, and a process that is killed leaves nothing but that directory.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{_PREFIX}{path.name}-") as place:
            written = Path(place) / path.name
            yield written
            with written.open("r+b") as file:
                os.fsync(file.fileno())
            plain = Path(place) / "plain"
            plain.touch()  # has the permissions of a file that is created plainly
            written.chmod(plain.stat().st_mode)  # safetensors lets nobody but the owner read
            os.replace(written, path)  # noqa: PTH105
        _sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path} ({error.strerror or error}).") from error


def remove_leftovers(directory: Path) -> None:
    """Remove what processes killed while they wrote there have left; nobody may be writing now."""
    for place in directory.glob(f"{_PREFIX}*"):
        shutil.rmtree(place)


def _sync_directory(directory: Path) -> None:
    """Make a rename last through a crash of the machine, where the system can do that."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
