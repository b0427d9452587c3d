"""One training in a run directory: made, trained to the end, opened again."""

from __future__ import annotations

import functools
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from maestro_lod.cli.consent import remember_trust, require_trust
from maestro_lod.cli.data import Data
from maestro_lod.cli.recipe import SGD, Recipe, checked, dumped
from maestro_lod.cli.report import write_report
from maestro_lod.cli.run_directory import RunDirectory
from maestro_lod.cli.run_identity import (
    fixed_settings,
    require_same_settings,
    require_same_weights,
    weights_digest,
)
from maestro_lod.cli.setup import Setup, data_of, dense_model_of, model_of
from maestro_lod.cli.torchrun import any_says, by_the_first, is_first, processes, wrapped
from maestro_lod.cli.yaml_settings import settings_in
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.atomic import alone_in, remove_leftovers, require_no_link_out
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers.ranks import low_rank_layers, match_ranks
from maestro_lod.model.checkpoint import load, save
from maestro_lod.model.cost import count_params, summary
from maestro_lod.train.callbacks import Watch
from maestro_lod.train.evaluate import evaluate, to_evaluate
from maestro_lod.train.fit import FitOptions, fit
from maestro_lod.train.footprint import footprint
from maestro_lod.train.method import Reshaping, total_epochs
from maestro_lod.train.progress import Progress
from maestro_lod.train.record import EpochRecord

logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """Who is told how a run goes."""

    def prepare(self, run: Run) -> None: ...
    def begin(self, run: Run, setup: Setup, progress: Progress) -> None: ...
    def step(self, progress: Progress) -> None: ...
    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, result: dict[str, Any]) -> None: ...


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint holds the last step."""


@dataclass(frozen=True)
class Run(RunDirectory):
    """One run directory and its recipe."""

    recipe: Recipe

    @classmethod
    def create(cls, recipe: Recipe, directory: Path) -> Run:
        """Return a run that `train` will write to a new or empty directory; writes nothing yet."""
        run = cls(directory, recipe)
        run.require_new()
        return run

    @classmethod
    def open(cls, directory: Path, *, trust: bool = False) -> Run:
        """Return an existing run; code that it names needs `trust`, unless trained here."""
        config = directory / "config.yaml"
        if not config.is_file():
            what = "holds no run (no config.yaml)" if directory.is_dir() else "is no directory"
            raise OptionError(f"{directory} {what}. A run is made by: lod train RECIPE --out DIR")
        require_no_link_out(directory)
        settings = settings_in(config)
        if not trust:
            require_trust(settings, config)
        return cls(directory, checked(settings, str(config)))

    # -- training ------------------------------------------------------------------------------

    def train(
        self, watchers: Sequence[Watcher] = (), stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Train to the end, from the checkpoint if there is one, and return the result.

        `stop` is asked after each step: if it says so, a checkpoint is written and `Interrupted`
        raised. Whatever happens, the last checkpoint that was complete stays.
        """
        for watcher in watchers:  # before data and model, which take long
            watcher.prepare(self)
        finished, setup = self.finished, Setup.of(self.recipe)
        needed = _checkpoint_bytes(self.recipe, setup.model)
        by_the_first(lambda: None if self.checkpoint.exists() else self.make(needed))
        with alone_in(self.directory) if is_first() else nullcontext():
            if self.finished > finished:  # another process was faster
                raise OptionError(f"the run in {self.directory} has finished meanwhile.")
            return self._train(setup, watchers, stop)

    def _train(
        self, setup: Setup, watchers: Sequence[Watcher], stop: Callable[[], bool]
    ) -> dict[str, Any]:
        recipe, begun = self.recipe, by_the_first(self._tidied)
        progress = self._resumed(setup) if begun else Progress()
        by_the_first(lambda: self._begin(setup, progress, begun))
        for watcher in watchers:
            watcher.begin(self, setup, progress)
        keeper = _Keeper(self, setup, watchers, stop)
        fit(
            wrapped(setup.model),
            setup.data.train,
            optimizer=setup.optimizer,
            epochs=recipe.epochs,
            method=setup.method,
            loss=setup.loss,
            validation=setup.data.validation,
            schedule=setup.schedule,
            seed=recipe.seed,
            options=FitOptions(
                recipe.clip_norm,
                recipe.accumulate,
                recipe.amp,
                recipe.recalibration,
                share_batches=processes() > 1,
            ),
            progress=progress,
            watch=Watch(keeper.step, keeper.epoch),
        )
        result = by_the_first(lambda: self._finish(setup, progress))
        for watcher in watchers:
            watcher.end(result)
        return result

    def _tidied(self) -> bool:
        """Remove what a kill has left, and say whether the run has begun before."""
        remove_leftovers(self.directory)
        return self.checkpoint.exists()

    def _begin(self, setup: Setup, progress: Progress, begun: bool) -> None:
        """Write what a run starts with, and the metrics as they are at this place."""
        if not begun:
            remember_trust(self.recipe.model_dump(mode="json"))
            self.write("config.yaml", dumped(self.recipe))
            self.write_json("environment.json", _environment(self.recipe, setup.data))
            self.save(setup, progress)
        self.write_metrics(progress.history)

    def save(self, setup: Setup, progress: Progress) -> None:
        """Write the checkpoint of a place."""
        state = {
            "settings": fixed_settings(self.recipe),
            "model": setup.model.state_dict(),
            "optimizer": setup.optimizer.state_dict(),
            "method": setup.method.state_dict(),
            "progress": progress.state_dict(),
        }
        with self.explained():
            save_state(state, self.checkpoint)

    def _resumed(self, setup: Setup) -> Progress:
        """Put all parts into the state of the checkpoint and return the place reached."""
        state = load_state(self.checkpoint)
        require_same_settings(state.get("settings"), self.recipe, self.checkpoint)
        try:
            # called "lod", and None for dense training, in checkpoints of the first version
            method = state["method"] if "method" in state else state["lod"] or {}
            if isinstance(setup.method, Reshaping):
                setup.method.reshape(method)
            match_ranks(setup.model, state["model"])
            setup.model.load_state_dict(state["model"])
            if self.recipe.channels_last:
                setup.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            setup.optimizer.load_state_dict(state["optimizer"])
            setup.method.load_state_dict(method)
            progress = Progress.from_state(state["progress"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{self.checkpoint} does not belong to {self.directory / 'config.yaml'} ({reason})."
            ) from None
        if (progress.epoch, progress.batch) > (total_epochs(setup.method, self.recipe.epochs), 0):
            raise OptionError(
                f"epochs={self.recipe.epochs} in {self.directory / 'config.yaml'}, but the run has "
                f"gone beyond: {progress.epoch} are done. Give that many or more."
            )
        return progress

    def _finish(self, setup: Setup, progress: Progress) -> dict[str, Any]:
        """Test the model, and write it, the result and the report."""
        model, data = setup.model, setup.data
        test: dict[str, float] = {}
        if data.test is not None:
            test = evaluate(model, data.test, to_evaluate(setup.loss))
        if data.score is not None:
            test |= data.score(model)
        with self.explained():
            if low_rank_layers(model):
                save(model, self.model_file)
            else:
                save_state(model.state_dict(), self.model_file)
        counted = summary(model, data.example)
        dense = {"dense_params": setup.dense.params, "dense_macs": setup.dense.macs}
        result = {
            "status": "finished",
            "settings": fixed_settings(self.recipe),
            "weights": weights_digest(model),
            "test": test,
            "validation": dict(progress.history[-1].validation),
            "size": progress.history[-1].size(),
            "summary": counted.to_dict() | dense,
            "ledger": setup.method.training_cost(),
            "memory": self._memory(setup, counted.dense_params == setup.dense.params),
            "full_ranks": {name: m.full_rank for name, m in low_rank_layers(model).items()},
            "seconds": sum(record.seconds or 0.0 for record in progress.history),
            "epochs": progress.epoch,
        }
        self.write_json("result.json", result)
        with self.explained():
            write_report([self.directory], self.directory / "report.html")
        return result

    def _memory(self, setup: Setup, of_full_width: bool) -> dict[str, dict[str, int]] | None:
        """Count what a training step holds at full rank, at the end, and for the dense model."""
        if not low_rank_layers(setup.model):
            return None
        count = functools.partial(
            footprint, example=setup.data.example,
            batch=-(-self.recipe.batch // processes()), moments=_moments(self.recipe),
        )  # fmt: skip
        try:
            dense = setup.model if of_full_width else dense_model_of(self.recipe, setup.data)
            return {
                "dense": count(dense, form="dense").to_dict(),
                "full rank": count(setup.model, form="full rank").to_dict(),
                "at the end": count(setup.model).to_dict(),
            }
        except Exception as error:  # of the user's model, and no reason to lose what was trained
            logger.warning("the memory of a step cannot be counted (%s).", error)
            return None

    # -- afterwards ----------------------------------------------------------------------------

    def trained(self, data: Data | None = None) -> tuple[nn.Module, Data]:
        """Return the model of a finished run, and its data."""
        result = self.result()  # says so if there is none
        require_same_settings(result.get("settings"), self.recipe, self.directory / "result.json")
        data = data or data_of(self.recipe)
        model = model_of(self.recipe, data)
        if low_rank_layers(model) or result.get("full_ranks"):
            model = load(self.model_file, into=model)
        else:
            state = load_state(self.model_file)
            self.recipe.settings.reshape(model, state)
            try:
                model.load_state_dict(state)
            except RuntimeError as error:
                raise CheckpointError(f"{self.model_file} is of another model. {error}") from None
        require_same_weights(result, model, self.directory / "result.json")
        return model, data


class _Keeper:
    """Keeps a run's checkpoint and metrics up to date, tells its watchers, asks when to stop."""

    def __init__(
        self, run: Run, setup: Setup, watchers: Sequence[Watcher], stop: Callable[[], bool]
    ) -> None:
        self.run, self.setup, self.watchers, self.stop = run, setup, watchers, stop
        self._saved = time.monotonic()

    def step(self, progress: Progress) -> None:
        for watcher in self.watchers:
            watcher.step(progress)
        stopping = any_says(self.stop())
        if stopping or time.monotonic() - self._saved >= self.run.recipe.checkpoint_every:
            self._save(progress)
        if stopping:
            raise Interrupted

    def epoch(self, progress: Progress) -> None:
        record = progress.history[-1]
        self._save(progress)
        if is_first():
            self.run.append(record)
        for watcher in self.watchers:
            watcher.epoch(record)
        total = total_epochs(self.setup.method, self.run.recipe.epochs)
        if any_says(self.stop()) and progress.epoch < total:
            raise Interrupted

    def _save(self, progress: Progress) -> None:
        if is_first():
            self.run.save(self.setup, progress)
        self._saved = time.monotonic()


def _checkpoint_bytes(recipe: Recipe, model: nn.Module) -> int:
    """Return about what checkpoints need: two at a time, with optimizer state."""
    return 2 * 4 * count_params(model) * (1 + _moments(recipe)) + 2**20


def _moments(recipe: Recipe) -> int:
    """Return how many values the optimizer keeps for each parameter."""
    optimizer = recipe.optimizer
    return int(optimizer.momentum > 0) if isinstance(optimizer, SGD) else 2


def _environment(recipe: Recipe, data: Data) -> dict[str, Any]:
    return {
        "maestro_lod": metadata.version("maestro-lod"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": recipe.device,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": data.note,
    }
