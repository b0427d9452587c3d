"""Terminal output: colour and progress bars in a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from maestro_lod.progress import OnProgress, ProgressLine, progress_enabled


def say(text: str) -> None:
    """Print a text to standard output."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def complain(error: object, code: int) -> int:
    """Print an error in one line to standard error and return the exit code."""
    line = " ".join(f"lod: {error}".split())  # some of torch's messages have several lines
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    return code


@contextmanager
def search_bar(quiet: bool) -> Iterator[OnProgress]:
    """Show the progress of a frontier search, from the full cost down to zero."""
    console = Console()
    with progress_enabled(not quiet):
        if quiet or not console.is_terminal:
            tell = ProgressLine("searching sizes")
            yield lambda done, total, note: tell(lambda: note)
            return
        columns = TextColumn("searching sizes"), BarColumn(), TextColumn("{task.fields[state]}")
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task("", total=100, state="")

            def show(done: int, total: int, note: str) -> None:
                bars.update(task, completed=done, total=total, state=note)

            yield show
