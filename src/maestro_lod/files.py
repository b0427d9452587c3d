"""Files that are there as a whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
import stat
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
    target = Path(os.path.realpath(path))  # a link stays one
    with blaming(path):
        place = tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{_PREFIX}{target.name}-")
    with place as directory:
        written = Path(directory) / target.name
        yield written
        with blaming(path):
            written.chmod(_mode(target, Path(directory)))  # safetensors lets only the owner read
            with written.open("r+b") as file:
                os.fsync(file.fileno())
            os.replace(written, target)  # noqa: PTH105
            _sync_directory(target.parent)


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Tell trouble with files in the `with` block as trouble with writing this one."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path} ({error.strerror or error}).") from error


def _mode(target: Path, directory: Path) -> int:
    """Return the permissions of a file that is there, or of one that would be created plainly."""
    if not target.exists():
        target = directory / f"{target.name}.plain"
        target.touch()
    return stat.S_IMODE(target.stat().st_mode)


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
