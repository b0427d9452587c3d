"""A training in a run directory: create, train, resume, open."""

from __future__ import annotations

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

from maestro_lod.cli.data import Data
from maestro_lod.cli.recipe import SGD, Recipe, checked, dumped, without_budget_steps
from maestro_lod.cli.report import write_report
from maestro_lod.cli.run_files import (
    RunDirectory,
    fixed_settings,
    require_same_settings,
    require_same_weights,
    weights_digest,
)
from maestro_lod.cli.setup import Setup, data_of, model_of
from maestro_lod.cli.torchrun import (
    any_process,
    is_main_process,
    processes,
    run_in_main_process,
    wrapped,
)
from maestro_lod.cli.user_code import remember_trust, require_trust
from maestro_lod.cli.yaml_settings import settings_in
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.atomic import alone_in, remove_leftovers, require_no_link_out
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers.ranks import low_rank_layers, match_ranks
from maestro_lod.model.checkpoint import load, save
from maestro_lod.model.cost import count_params, summary
from maestro_lod.train.evaluate import evaluate, evaluation_loss
from maestro_lod.train.fit import FitOptions, Watch, fit
from maestro_lod.train.method import Reshaping, total_epochs
from maestro_lod.train.progress import EpochRecord, Progress

logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """Observer of a run: its progress, epochs and result."""

    def prepare(self, run: Run) -> None: ...
    def begin(self, run: Run, setup: Setup, progress: Progress) -> None: ...
    def step(self, progress: Progress) -> None: ...
    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, result: dict[str, Any]) -> None: ...


class Interrupted(Exception):
    """Raised when a run was asked to stop; its checkpoint holds the last step."""


@dataclass(frozen=True)
class Run(RunDirectory):
    """A run directory and its recipe."""

    recipe: Recipe

    @classmethod
    def create(cls, recipe: Recipe, directory: Path) -> Run:
        """Return a run that `train` will write to a new or empty directory; writes nothing yet.

        Args:
            recipe: The settings of the run.
            directory: A directory that does not exist or is empty.

        Raises:
            OptionError: If the directory is not empty or cannot be written to.

        Example:
            >>> Run.create(load_recipe("digits"), Path("runs/a")).train()
        """
        run = cls(directory, recipe)
        run.require_new()
        return run

    @classmethod
    def open(cls, directory: Path, *, trust: bool = False) -> Run:
        """Open an existing run.

        Args:
            directory: The directory that `lod train` has written.
            trust: Allow the user code that the run names; not needed if it was trained here.

        Raises:
            OptionError: If there is no run, its settings are wrong, or its code is not trusted.
        """
        config = directory / "config.yaml"
        if not config.is_file():
            what = (
                "contains no run (no config.yaml)" if directory.is_dir() else "is not a directory"
            )
            raise OptionError(f"{directory} {what}. To make one: lod train RECIPE --out DIR")
        require_no_link_out(directory)
        settings = without_budget_steps(settings_in(config), used=True)
        if not trust:
            require_trust(settings, config)
        return cls(directory, checked(settings, str(config)))

    # -- training ------------------------------------------------------------------------------

    def train(
        self, watchers: Sequence[Watcher] = (), stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Train to the end, from the checkpoint if there is one.

        Args:
            watchers: Observers of the run.
            stop: Called after each step; if it returns True, a checkpoint is written.

        Returns:
            The result, as in `result.json`.

        Raises:
            Interrupted: If `stop` has returned True. The last complete checkpoint always stays.
        """
        for watcher in watchers:  # before data and model, which take long
            watcher.prepare(self)
        finished, setup = self.finished, Setup.of(self.recipe)
        needed = _checkpoint_bytes(self.recipe, setup.model)
        run_in_main_process(lambda: None if self.checkpoint.exists() else self.make(needed))
        with alone_in(self.directory) if is_main_process() else nullcontext():
            if self.finished > finished:  # another process was faster
                raise OptionError(f"another process has finished the run in {self.directory}.")
            return self._train(setup, watchers, stop)

    def _train(
        self, setup: Setup, watchers: Sequence[Watcher], stop: Callable[[], bool]
    ) -> dict[str, Any]:
        recipe, begun = self.recipe, run_in_main_process(self._tidied)
        progress = self._resumed(setup) if begun else Progress()
        run_in_main_process(lambda: self._begin(setup, progress, begun))
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
        result = run_in_main_process(lambda: self._finish(setup, progress))
        for watcher in watchers:
            watcher.end(result)
        return result

    def _tidied(self) -> bool:
        """Remove temporary files of a killed process; return True if there is a checkpoint."""
        remove_leftovers(self.directory)
        return self.checkpoint.exists()

    def _begin(self, setup: Setup, progress: Progress, begun: bool) -> None:
        """Write the files that a run starts with, and the metrics up to this place."""
        if not begun:
            remember_trust(self.recipe.model_dump(mode="json"))
            self.write("config.yaml", dumped(self.recipe))
            self.write_json("environment.json", _environment(self.recipe, setup.data))
            self.save(setup, progress)
        self.write_metrics(progress.history)

    def save(self, setup: Setup, progress: Progress) -> None:
        """Write the checkpoint."""
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
        """Restore all parts from the checkpoint and return the progress."""
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
        except CheckpointError:  # of a method that is gone
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{self.checkpoint} does not belong to {self.directory / 'config.yaml'} ({reason})."
            ) from None
        if (progress.epoch, progress.batch) > (total_epochs(setup.method, self.recipe.epochs), 0):
            raise OptionError(
                f"epochs={self.recipe.epochs} in {self.directory / 'config.yaml'}, but the run has "
                f"finished {progress.epoch} epochs. Give that number or more."
            )
        return progress

    def _finish(self, setup: Setup, progress: Progress) -> dict[str, Any]:
        """Test the model and write it with the result and the report."""
        model, data = setup.model, setup.data
        test: dict[str, float] = {}
        if data.test is not None:
            test = evaluate(model, data.test, evaluation_loss(setup.loss))
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
            "full_ranks": {name: m.full_rank for name, m in low_rank_layers(model).items()},
            "seconds": sum(record.seconds or 0.0 for record in progress.history),
            "epochs": progress.epoch,
        }
        self.write_json("result.json", result)
        with self.explained():
            write_report([self.directory], self.directory / "report.html")
        return result

    # -- afterwards ----------------------------------------------------------------------------

    def trained(self, data: Data | None = None) -> tuple[nn.Module, Data]:
        """Return the model of a finished run, and its data (loaded unless given)."""
        result = self.result()
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
    """Writes checkpoints and metrics while a run trains, calls its watchers, and stops it."""

    def __init__(
        self, run: Run, setup: Setup, watchers: Sequence[Watcher], stop: Callable[[], bool]
    ) -> None:
        self.run, self.setup, self.watchers, self.stop = run, setup, watchers, stop
        self._saved = time.monotonic()

    def step(self, progress: Progress) -> None:
        for watcher in self.watchers:
            watcher.step(progress)
        stopping = any_process(self.stop())
        if stopping or time.monotonic() - self._saved >= self.run.recipe.checkpoint_every:
            self._save(progress)
        if stopping:
            raise Interrupted

    def epoch(self, progress: Progress) -> None:
        record = progress.history[-1]
        self._save(progress)
        if is_main_process():
            self.run.append(record)
        for watcher in self.watchers:
            watcher.epoch(record)
        total = total_epochs(self.setup.method, self.run.recipe.epochs)
        if any_process(self.stop()) and progress.epoch < total:
            raise Interrupted

    def _save(self, progress: Progress) -> None:
        if is_main_process():
            self.run.save(self.setup, progress)
        self._saved = time.monotonic()


def _checkpoint_bytes(recipe: Recipe, model: nn.Module) -> int:
    """Estimate the bytes that two checkpoints with optimizer state need."""
    return 2 * 4 * count_params(model) * (1 + _moments(recipe)) + 2**20


def _moments(recipe: Recipe) -> int:
    """Return the number of values that the optimizer keeps per parameter."""
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
