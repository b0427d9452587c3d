"""What the program says: in colour and with bars in a terminal, in plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from maestro_lod.progress import ProgressLine, progress_enabled


def say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def complain(error: object, code: int) -> int:
    line = " ".join(f"lod: {error}".split())  # some of torch's messages have several
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    return code


@contextmanager
def search_bar(quiet: bool) -> Iterator[Callable[[int, float], None]]:
    """Show how far a search of sizes has come: from all of the cost down to nothing."""
    console = Console()
    with progress_enabled(not quiet):
        if quiet or not console.is_terminal:
            tell = ProgressLine("searching sizes")
            yield lambda count, share: tell(lambda: _found(count, share))
            return
        columns = TextColumn("searching sizes"), BarColumn(), TextColumn("{task.fields[state]}")
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task("", total=1.0, state="")

            def show(count: int, share: float) -> None:
                bars.update(task, completed=1.0 - share, state=_found(count, share))

            yield show


def _found(count: int, share: float) -> str:
    return f"{count} size{'s' * (count > 1)}, down to {share:.2f}×"
