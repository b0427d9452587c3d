"""A run directory: settings, environment, metrics, checkpoint, model and result of one training.

config.yaml             every setting
environment.json        versions and machine
metrics.jsonl           one line per finished epoch, ranks included
checkpoint.safetensors  where to go on: weights, optimizer, sampler, random states
model.safetensors       the trained model, every size      (once finished)
result.json             test metrics, costs                (once finished)
report.html             all of it as a page                (once finished)
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from maestro_lod.app.binding import (
    fixed_settings,
    require_same_settings,
    require_same_weights,
    weights_digest,
)
from maestro_lod.app.data import Data
from maestro_lod.app.recipe import Recipe, dumped, load_recipe, settings_in
from maestro_lod.app.report import write_report
from maestro_lod.app.setup import Setup, data_of, model_of
from maestro_lod.app.trust import remember_trust, require_trust
from maestro_lod.checkpoint import load, save
from maestro_lod.cost import count_params, summary
from maestro_lod.errors import CheckpointError, OptionError, TrainingError
from maestro_lod.files import alone_in, read_json, remove_leftovers, replacing
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.state import load_state, save_state
from maestro_lod.train.evaluate import evaluate, to_evaluate
from maestro_lod.train.fit import FitOptions, Watch, fit
from maestro_lod.train.progress import Progress
from maestro_lod.train.record import EpochRecord


class Watcher(Protocol):
    """Who is told how a run goes."""

    def begin(self, run: Run, setup: Setup, progress: Progress) -> None: ...
    def step(self, progress: Progress) -> None: ...
    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, result: dict[str, Any]) -> None: ...


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint holds the last step."""


@dataclass(frozen=True)
class Run:
    """One run directory and its recipe."""

    directory: Path
    recipe: Recipe

    @classmethod
    def create(cls, recipe: Recipe, directory: Path) -> Run:
        """Return a run that `train` will write to a new or empty directory; writes nothing yet."""
        there = _existing(directory)
        if not there.is_dir():
            raise OptionError(f"--out {directory}: {there} is a file. Give a directory.")
        if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            raise OptionError(f"--out {directory}: {there} cannot be written to. Give another.")
        # hidden files do not count: a start that was killed at once may have left one
        if directory.is_dir() and any(
            not path.name.startswith(".") for path in directory.iterdir()
        ):
            raise OptionError(
                f"{directory} is not empty. Give another --out, or go on with the run in it: "
                f"lod resume {directory}"
            )
        return cls(directory, recipe)

    @classmethod
    def open(cls, directory: Path, *, trust: bool = False) -> Run:
        """Return an existing run; code that it names needs `trust`, unless trained here."""
        config = directory / "config.yaml"
        if not config.is_file():
            what = "holds no run (no config.yaml)" if directory.is_dir() else "is no directory"
            raise OptionError(f"{directory} {what}. A run is made by: lod train RECIPE --out DIR")
        if not trust:
            require_trust(settings_in(config), config)
        return cls(directory, load_recipe(str(config)))

    # -- files ---------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.safetensors"

    @property
    def model_file(self) -> Path:
        return self.directory / "model.safetensors"

    @property
    def finished(self) -> bool:
        return (self.directory / "result.json").exists()

    def result(self) -> dict[str, Any]:
        """Return what a finished run reached."""
        try:
            result: dict[str, Any] = read_json((self.directory / "result.json").read_text())
        except FileNotFoundError:
            raise OptionError(
                f"the run in {self.directory} has not finished. Go on with: lod resume "
                f"{self.directory}"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory / 'result.json'} is damaged ({error})."
            ) from None
        return result

    def epochs(self) -> list[EpochRecord]:
        """Return the records of the epochs that are finished."""
        lines = (self.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [EpochRecord.from_dict(read_json(line)) for line in lines]

    def write_json(self, name: str, value: Any) -> None:
        try:
            text = json.dumps(value, indent=1, allow_nan=False)
        except ValueError:
            broken = ", ".join(_not_finite(value))
            raise TrainingError(
                f"{self.directory / name} was not written: {broken} is NaN or infinite, so the "
                "training has diverged. Lower the learning rate or set clip_norm."
            ) from None
        self._write(name, text + "\n")

    def _write(self, name: str, text: str) -> None:
        with self._explained(), replacing(self.directory / name) as place:
            place.write_text(text, encoding="utf-8")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say how to go on where a file of the run cannot be written."""
        try:
            yield
        except CheckpointError as error:
            if error.__cause__ is None:  # not for want of room: something that no file can hold
                raise
            raise CheckpointError(f"{error} {self._way_out}") from error
        except OSError as error:
            raise CheckpointError(
                f"cannot write {error.filename or self.directory} ({error.strerror}). "
                f"{self._way_out}"
            ) from error

    @property
    def _way_out(self) -> str:
        if not (self.directory / "config.yaml").exists():
            return "Make room, or give another --out."
        return f"What was saved is whole: make room, then go on with: lod resume {self.directory}"

    # -- training ------------------------------------------------------------------------------

    def train(
        self, watchers: Sequence[Watcher] = (), stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Train to the end, from the checkpoint if there is one, and return the result.

        `stop` is asked after each step: if it says so, a checkpoint is written and `Interrupted`
        raised. Whatever happens, the last checkpoint that was complete stays.
        """
        finished, setup = self.finished, Setup.of(self.recipe)
        if not self.checkpoint.exists():
            self._make_directory(setup)
        with alone_in(self.directory):
            if self.finished > finished:  # another process was faster
                raise OptionError(f"the run in {self.directory} has finished meanwhile.")
            return self._train(setup, watchers, stop)

    def _train(
        self, setup: Setup, watchers: Sequence[Watcher], stop: Callable[[], bool]
    ) -> dict[str, Any]:
        recipe = self.recipe
        remove_leftovers(self.directory)
        progress = self._resumed(setup) if self.checkpoint.exists() else Progress()
        if not self.checkpoint.exists():
            self._begin(setup, progress)
        self._write("metrics.jsonl", "".join(map(_line, progress.history)))
        for watcher in watchers:
            watcher.begin(self, setup, progress)
        keeper = _Keeper(self, setup, watchers, stop)
        fit(
            setup.model,
            setup.data.train,
            optimizer=setup.optimizer,
            epochs=recipe.epochs,
            method=setup.method,
            loss=setup.loss,
            validation=setup.data.validation,
            schedule=setup.schedule,
            seed=recipe.seed,
            options=FitOptions(
                recipe.clip_norm, recipe.accumulate, recipe.amp, recipe.recalibration
            ),
            progress=progress,
            watch=Watch(keeper.step, keeper.epoch),
        )
        result = self._finish(setup, progress)
        for watcher in watchers:
            watcher.end(result)
        return result

    def _begin(self, setup: Setup, progress: Progress) -> None:
        """Write what a run starts with."""
        remember_trust(self.recipe.model_dump(mode="json"))
        self._write("config.yaml", dumped(self.recipe))
        self.write_json("environment.json", _environment(self.recipe, setup.data))
        self.save(setup, progress)

    def save(self, setup: Setup, progress: Progress) -> None:
        """Write the checkpoint of a place."""
        state = {
            "settings": fixed_settings(self.recipe),
            "model": setup.model.state_dict(),
            "optimizer": setup.optimizer.state_dict(),
            "method": setup.method.state_dict(),
            "progress": progress.state_dict(),
        }
        with self._explained():
            save_state(state, self.checkpoint)

    def _resumed(self, setup: Setup) -> Progress:
        """Put all parts into the state of the checkpoint and return the place reached."""
        state = load_state(self.checkpoint)
        require_same_settings(state.get("settings"), self.recipe, self.checkpoint)
        try:
            setup.model.load_state_dict(state["model"])
            if self.recipe.channels_last:
                setup.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            setup.optimizer.load_state_dict(state["optimizer"])
            # called "lod", and None for dense training, in checkpoints of the first version
            method = state["method"] if "method" in state else state["lod"] or {}
            setup.method.load_state_dict(method)
            progress = Progress.from_state(state["progress"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{self.checkpoint} does not belong to {self.directory / 'config.yaml'} ({reason})."
            ) from None
        if (progress.epoch, progress.batch) > (self.recipe.epochs, 0):
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
        with self._explained():
            if low_rank_layers(model):
                save(model, self.model_file)
            else:
                save_state(model.state_dict(), self.model_file)
        result = {
            "status": "finished",
            "settings": fixed_settings(self.recipe),
            "weights": weights_digest(model),
            "test": test,
            "validation": dict(progress.history[-1].validation),
            "summary": summary(model, data.example).to_dict(),
            "ledger": setup.method.training_cost(),
            "full_ranks": {name: m.full_rank for name, m in low_rank_layers(model).items()},
            "seconds": sum(record.seconds or 0.0 for record in progress.history),
            "epochs": progress.epoch,
        }
        self.write_json("result.json", result)
        with self._explained():
            write_report([self.directory], self.directory / "report.html")
        return result

    def _make_directory(self, setup: Setup) -> None:
        """Refuse to start where checkpoints would not fit: two at a time, with optimizer state."""
        moments = 1 if self.recipe.optimizer.name == "sgd" else 2
        needed = 2 * 4 * count_params(setup.model) * (1 + moments) + 2**20
        free = shutil.disk_usage(_existing(self.directory)).free
        if free < needed:
            raise CheckpointError(
                f"{self.directory} has {free / 1e6:.0f} MB free; checkpoints of this run need "
                f"about {needed / 1e6:.0f} MB. Make room or give another --out."
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise OptionError(
                f"--out {self.directory} cannot be written to ({error.strerror}). Give another."
            ) from None

    def note(self, record: EpochRecord) -> None:
        """Append an epoch to the metrics."""
        with self._explained(), (self.directory / "metrics.jsonl").open("a") as file:
            file.write(_line(record))

    # -- afterwards ----------------------------------------------------------------------------

    def trained(self, data: Data | None = None) -> tuple[nn.Module, Data]:
        """Return the model of a finished run, and its data."""
        result = self.result()  # says so if there is none
        require_same_settings(result.get("settings"), self.recipe, self.directory / "result.json")
        data = data or data_of(self.recipe)
        model = model_of(self.recipe, data)
        if low_rank_layers(model):
            model = load(self.model_file, into=model)
        else:
            state = load_state(self.model_file)
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
        stopping = self.stop()
        if stopping or time.monotonic() - self._saved >= self.run.recipe.checkpoint_every:
            self._save(progress)
        if stopping:
            raise Interrupted

    def epoch(self, progress: Progress) -> None:
        record = progress.history[-1]
        self._save(progress)
        self.run.note(record)
        for watcher in self.watchers:
            watcher.epoch(record)
        if self.stop() and progress.epoch < self.run.recipe.epochs:
            raise Interrupted

    def _save(self, progress: Progress) -> None:
        self.run.save(self.setup, progress)
        self._saved = time.monotonic()


def _existing(directory: Path) -> Path:
    """Return a directory, or the closest parent that exists."""
    whole = directory.absolute()
    return next(path for path in (whole, *whole.parents) if os.path.lexists(path))


def _not_finite(value: Any, where: str = "") -> list[str]:
    """Return where in nested data there are numbers that JSON does not have."""
    if isinstance(value, dict):
        parts = [_not_finite(part, f"{where}.{key}".lstrip(".")) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [_not_finite(part, where) for part in value]
    else:
        return [where] if isinstance(value, float) and not math.isfinite(value) else []
    return list(dict.fromkeys(itertools.chain.from_iterable(parts)))


def _line(record: EpochRecord) -> str:
    return json.dumps(record.to_dict()) + "\n"


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
