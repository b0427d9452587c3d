"""Disks that fail: the n-th file operation of a process raises, as a full or broken one would."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CODES = (errno.ENOSPC, errno.EIO, errno.EINTR)
_NAMES = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "truncate", "ftruncate")


class Disk:
    """Counts writes, syncs, renames and removals, and lets the n-th of them fail."""

    def __init__(self, fails_at: int | None, code: int) -> None:
        self.fails_at, self.code, self.done = fails_at, code, 0

    def does(self) -> None:
        self.done += 1
        if self.done == self.fails_at:
            raise OSError(self.code, os.strerror(self.code))

    def watched(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            self.does()
            return action(*arguments, **options)

        return act

    def opened(self, open_: Callable[..., Any]) -> Callable[..., Any]:
        """Open files whose writes are counted; of one that fails, half is written."""

        def open_watched(*arguments: Any, **options: Any) -> Any:
            file = open_(*arguments, **options)
            if not hasattr(file, "write") or not file.writable():
                return file
            return _Watched(file, self)

        return open_watched


class _Watched:
    """A file whose writes fail when the disk does."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        try:
            self._disk.does()
        except OSError:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise
        return int(self._file.write(data))

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing_disk(fails_at: int | None, code: int = errno.ENOSPC) -> Iterator[Disk]:
    """Let the n-th file operation in the block fail, or none, and count them."""
    disk = Disk(fails_at, code)
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.setattr(os, name, disk.watched(getattr(os, name)))
        opened = disk.opened(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        yield disk
