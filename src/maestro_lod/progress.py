"""Rate-limited progress lines on standard error.

`show_progress` is the only switch. Unless it was called, or the variable LOD_PROGRESS is 0 or 1,
lines are shown in terminals and notebooks only. Work that takes less than two seconds prints none.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

OnProgress: TypeAlias = Callable[[int, int, str], object]
"""`on_progress(done, total, note)`: the number of finished steps, the number of all steps, and the
name of the current task."""

_FIRST, _EVERY = 2.0, 5.0  # seconds until the first line, and between lines
_switch: bool | None = None


def show_progress(on: bool | None = True) -> None:
    """Show or hide the progress lines of trainings, searches and measurements.

    Args:
        on: True shows them everywhere, also in log files; False hides them; None, the initial
            state, shows them in terminals and notebooks.

    Example:
        >>> lod.show_progress()
    """
    global _switch
    _switch = on


@contextmanager
def progress_enabled(on: bool) -> Iterator[None]:
    """Set the switch inside a `with` block."""
    before = _switch
    show_progress(on)
    try:
        yield
    finally:
        show_progress(before)


def _is_enabled() -> bool:
    if _switch is not None:
        return _switch
    if (variable := os.environ.get("LOD_PROGRESS")) in ("0", "1"):
        return variable == "1"
    return "ipykernel" in sys.modules or sys.stderr.isatty()


class ProgressLine:
    """The progress of one task: call it at every step, it writes a line every few seconds."""

    def __init__(self, task: str) -> None:
        self.task = task
        self._next = time.monotonic() + _FIRST
        self._has_written = False

    def __call__(self, text: Callable[[], str]) -> None:
        """Write the line that `text` returns if one is due."""
        if _is_enabled() and time.monotonic() >= self._next:
            self._write(text())

    def end(self, text: Callable[[], str]) -> None:
        """Write a last line, unless none was written before."""
        if _is_enabled() and self._has_written:
            self._write(text())

    def _write(self, text: str) -> None:
        self._has_written = True
        self._next = time.monotonic() + _EVERY
        sys.stderr.write(f"{self.task}: {text}\n")
        sys.stderr.flush()
