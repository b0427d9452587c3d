"""How far something has come, in a line every few seconds: for people who wait, not for pipes.

There is one switch, `show_progress`. Unless it was set, or the variable LOD_PROGRESS is 0 or 1,
lines are shown in terminals and notebooks and nowhere else. They go to standard error, and whatever
takes less than two seconds says nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

OnProgress: TypeAlias = Callable[[int, int, str], object]
"""`on_progress(done, total, note)`: the number of steps that are done, the number of all steps, and
what is being done."""

_FIRST, _EVERY = 2.0, 5.0  # seconds until the first line, and between lines
_asked: bool | None = None


def show_progress(on: bool | None = True) -> None:
    """Show how far trainings, searches and measurements have come; None: where somebody looks.

    >>> lod.show_progress()  # also in a log file
    """
    global _asked
    _asked = on


@contextmanager
def progress_shown(on: bool) -> Iterator[None]:
    """Set the switch inside a `with` block."""
    before = _asked
    show_progress(on)
    try:
        yield
    finally:
        show_progress(before)


def _is_shown() -> bool:
    if _asked is not None:
        return _asked
    if (said := os.environ.get("LOD_PROGRESS")) in ("0", "1"):
        return said == "1"
    return "ipykernel" in sys.modules or sys.stderr.isatty()


class Telling:
    """Tells of one thing that takes long; called as often as one likes, it writes now and then."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._next = time.monotonic() + _FIRST
        self._has_told = False

    def __call__(self, text: Callable[[], str]) -> None:
        """Write what `text()` says, if it is time for a line."""
        if _is_shown() and time.monotonic() >= self._next:
            self._write(text())

    def end(self, text: Callable[[], str]) -> None:
        """Write how it ended, if anything was written before."""
        if _is_shown() and self._has_told:
            self._write(text())

    def _write(self, text: str) -> None:
        self._has_told = True
        self._next = time.monotonic() + _EVERY
        sys.stderr.write(f"{self.what}: {text}\n")
        sys.stderr.flush()
