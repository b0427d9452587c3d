"""How a run looks in the terminal: live bars, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from maestro_lod.tasks.run import Run
from maestro_lod.tasks.setup import Setup
from maestro_lod.train import fit


class Display:
    """A watcher that shows loss, accuracy, total rank and cost relative to dense, live."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self.begun = False
        self._bars: Progress | None = None
        self._epochs = self._batches = 0
        self._refreshed = 0.0

    def begin(self, run: Run, setup: Setup, progress: fit.Progress) -> None:
        recipe = run.recipe
        self.begun = True
        self._epochs, self._batches = recipe.epochs, len(setup.data.train)
        if progress.epoch == self._epochs:
            self._line(f"resuming {run.directory} after its last epoch")
        elif progress.step:
            place = f"epoch {progress.epoch + 1}, batch {progress.batch + 1}"
            self._line(f"resuming {run.directory} at {place}")
        else:
            self._line(f"{recipe.recipe or recipe.model.name}: {setup.data.note}")
            self._line(f"writing to {run.directory}")
        if self.console.is_terminal and not self.quiet:
            self._show_bars(progress)

    def _show_bars(self, progress: fit.Progress) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
            console=self.console,
            expand=True,
            transient=True,  # what remains are the lines of the epochs
        )
        self._run = self._bars.add_task(
            "training",
            total=self._epochs * self._batches,
            completed=progress.epoch * self._batches + progress.batch,
            state=_cost(progress.history[-1]) if progress.history else "",
        )
        self._epoch = self._bars.add_task(
            "epoch", total=self._batches, completed=progress.batch, state=""
        )
        self._bars.start()

    def step(self, progress: fit.Progress) -> None:
        now = time.monotonic()
        if self._bars is None or now - self._refreshed < 0.1:
            return
        self._refreshed = now
        self._bars.update(self._run, completed=progress.epoch * self._batches + progress.batch)
        self._bars.update(
            self._epoch,
            completed=progress.batch,
            description=f"epoch {progress.epoch + 1}/{self._epochs}",
            state=_described(progress.score.means("train_")),
        )

    def epoch(self, record: dict[str, Any]) -> None:
        if self._bars is not None:
            done = record["epoch"] * self._batches
            self._bars.update(self._run, completed=done, state=_cost(record))
            self._bars.update(self._epoch, completed=self._batches)
        width = len(str(self._epochs))
        self._line(
            f"epoch {record['epoch']:{width}d}/{self._epochs}  {_described(record)}  "
            f"{_cost(record)}  {record['seconds']:.1f} s"
        )

    def end(self, result: dict[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Take the bars down, whatever happened."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _line(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _described(record: dict[str, Any]) -> str:
    """Say loss and accuracy, on held-out data where there is some."""
    kind = "validation" if "validation_loss" in record else "train"
    parts = []
    if f"{kind}_loss" in record:
        parts.append(f"{kind} loss {record[f'{kind}_loss']:.4f}")
    if f"{kind}_accuracy" in record:
        parts.append(f"accuracy {record[f'{kind}_accuracy']:.2%}")
    if f"{kind}_perplexity" in record:
        parts.append(f"perplexity {record[f'{kind}_perplexity']:.2f}")
    return "  ".join(parts)


def _cost(record: dict[str, Any]) -> str:
    if "total_rank" not in record:
        return "dense"
    cost = f"rank {record['total_rank']}  params {record['relative_params']:.2f}×"
    macs = record.get("relative_macs")
    return cost if macs is None else f"{cost}  MACs {macs:.2f}×"
