"""Progress of a run: live bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from maestro_lod.cli.recipe import Recipe
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.train import progress as training
from maestro_lod.train.budget import Budget
from maestro_lod.train.method import total_epochs
from maestro_lod.train.progress import EpochRecord

_EVERY = 10.0  # least seconds between lines in a pipe


class Display:
    """Watcher that shows loss, accuracy, total rank and cost relative to dense."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self.begun = False
        self._bars: Progress | None = None
        self._epochs = self._batches = 0
        self._refreshed = time.monotonic()

    def prepare(self, run: Run) -> None:
        name = run.recipe.recipe or run.recipe.model.name
        doing = "resuming" if run.checkpoint.exists() else f"training {name} into"
        self._line(f"{doing} {run.directory}: {_task(run.recipe)}")

    def begin(self, run: Run, setup: Setup, progress: training.Progress) -> None:
        self.begun = True
        self._epochs = total_epochs(setup.method, run.recipe.epochs)
        self._batches = len(setup.data.train)
        self._line(setup.data.note)
        if progress.epoch == self._epochs:
            self._line("resuming after the last epoch")
        elif progress.step:
            self._line(f"resuming at epoch {progress.epoch + 1}, batch {progress.batch + 1}")
        if self.console.is_terminal and not self.quiet:
            self._show_bars(progress)

    def _show_bars(self, progress: training.Progress) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
            console=self.console,
            expand=True,
            transient=True,  # keeps the lines of the epochs
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

    def step(self, progress: training.Progress) -> None:
        now = time.monotonic()
        if self._bars is None:
            if not self.quiet and now - self._refreshed >= _EVERY:  # a long epoch
                self._refreshed = now
                place = f"epoch {progress.epoch + 1}/{self._epochs}, batch {progress.batch}/"
                means = _described("train", progress.score.means())
                self._line(f"{place}{self._batches}  {means}")
            return
        if now - self._refreshed < 0.1:
            return
        self._refreshed = now
        self._bars.update(self._run, completed=progress.epoch * self._batches + progress.batch)
        self._bars.update(
            self._epoch,
            completed=progress.batch,
            description=f"epoch {progress.epoch + 1}/{self._epochs}",
            state=_described("train", progress.score.means()),
        )

    def epoch(self, record: EpochRecord) -> None:
        self._refreshed = time.monotonic()
        if self._bars is not None:
            done = record.epoch * self._batches
            self._bars.update(self._run, completed=done, state=_cost(record))
            self._bars.update(self._epoch, completed=self._batches)
        width = len(str(self._epochs))
        self._line(
            f"epoch {record.epoch:{width}d}/{self._epochs}  {_measures(record)}  "
            f"{_cost(record)}  {record.seconds or 0.0:.1f} s"
        )

    def end(self, result: dict[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _line(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _task(recipe: Recipe) -> str:
    """Describe the training: model, data, method, objective and epochs."""
    settings = recipe.settings
    chosen = {key: getattr(settings, key) for key in settings.alternatives}
    goals = (
        f", {value if isinstance(value, Budget) else f'{key}={value}'}"
        for key, value in chosen.items()
        if value
    )
    what = f"{recipe.model.name} on {recipe.data.name}, method={recipe.method}{''.join(goals)}"
    return f"{what}, epochs={recipe.epochs}"


def _measures(record: EpochRecord) -> str:
    """Describe loss and accuracy, on validation data if there is any."""
    if record.validation:
        return _described("validation", record.validation)
    return _described("train", record.train)


def _described(split: str, means: Mapping[str, float]) -> str:
    shown = {"loss": f"{split} loss {{:.4f}}", "accuracy": "accuracy {:.2%}"}
    shown["perplexity"] = "perplexity {:.2f}"
    return "  ".join(text.format(means[name]) for name, text in shown.items() if name in means)


def _cost(record: EpochRecord) -> str:
    """Describe the size of the model relative to dense, or `dense` if it is unchanged."""
    if not record.ranks and {record.relative_params, record.relative_macs} <= {None, 1.0}:
        return "dense"
    parts = [] if record.total_rank is None else [f"rank {record.total_rank}"]
    for what, share in (("params", record.relative_params), ("MACs", record.relative_macs)):
        if share is not None:
            parts.append(f"{what} {share:.2f}×")
    return "  ".join(parts)
