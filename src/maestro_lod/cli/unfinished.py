"""Output directories of long commands, and the finished stages that they resume from.

Finished stages are in `OUT.unfinished`. `OUT` is put in place in one rename, then the stages are
removed: whenever a command is killed, the same command resumes there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from maestro_lod.errors import OptionError
from maestro_lod.files.atomic import alone_for, filling_directory, replacing, writing

_WRITTEN = "written"


@contextmanager
def unfinished(out: Path) -> Iterator[Unfinished]:
    """Start or resume the work on a new directory; raise BusyError if another process does it."""
    work = Unfinished(out)
    with alone_for(out):
        shutil.rmtree(work.removed, ignore_errors=True)
        work.require_new()
        try:
            yield work
        finally:
            with suppress(OSError):  # fails if it has parts
                work.parts.rmdir()


class Unfinished:
    """Work on one output directory."""

    def __init__(self, out: Path) -> None:
        self._out = Path(os.path.abspath(out))  # noqa: PTH100
        self.parts = Path(f"{self._out}.unfinished")
        """Directory of finished stages, for `resume=`."""
        self.removed = self.parts.with_name(f".removing-{self.parts.name}")
        """Directory that stages are moved to before removal, so that a kill leaves all or none."""

    def require_new(self) -> None:
        """Raise OptionError for a directory with content that this work has not written."""
        used = self._out.exists() and (not self._out.is_dir() or any(self._out.iterdir()))
        if used and not self._is_written():
            raise OptionError(f"--out {self._out} exists already. Give a new directory.")

    def write(self, fill: Callable[[Path], None]) -> None:
        """Fill the directory, move it into place and remove the stages."""
        if not self._is_written():
            self._put_in_place(fill)
        self._remove_parts()

    def _remove_parts(self) -> None:
        with writing(self.parts):
            if self.parts.exists():
                os.rename(self.parts, self.removed)  # noqa: PTH104
        shutil.rmtree(self.removed, ignore_errors=True)  # the next call removes the rest

    def _put_in_place(self, fill: Callable[[Path], None]) -> None:
        note = self.parts / _WRITTEN
        with writing(note):
            self.parts.mkdir(exist_ok=True)
        try:
            with filling_directory(self._out) as place:
                fill(place)
                with replacing(note) as file:
                    file.write_text(_identity(place))
        except BaseException:
            if not self._is_written():
                note.unlink(missing_ok=True)
            raise

    def _is_written(self) -> bool:
        try:
            return (self.parts / _WRITTEN).read_text() == _identity(self._out)
        except OSError:
            return False


def _identity(directory: Path) -> str:
    """Return an identity of a directory that is kept when it is renamed."""
    return str(directory.stat().st_ino)
