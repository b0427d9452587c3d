"""Files of a run in its directory, and checks that they belong together.

config.yaml             every setting
environment.json        versions and machine
metrics.jsonl           one line per finished epoch, ranks included
checkpoint.safetensors  the state to resume from: weights, optimizer, sampler, random states
model.safetensors       the trained model, in every size      (once finished)
result.json             test metrics, costs                (once finished)
report.html             all of this as a page               (once finished)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.cli.recipe import Recipe, without_budget_steps
from maestro_lod.cli.yaml_settings import shown
from maestro_lod.errors import CheckpointError, OptionError, TrainingError, listed
from maestro_lod.files.atomic import alone_in, open_to_append, remove_leftovers, replacing
from maestro_lod.files.json_files import Shape, parse_json, read_json_file, read_limited
from maestro_lod.train.progress import EpochRecord

_RESULT: Shape = {
    "settings?": dict | None, "weights?": str | None, "full_ranks?": {str: int},
    "summary": {"dense_params": int}, "ledger": ({"relative_macs": float | None}, None),
    "size?": ({str: float}, None), "seconds": float, "epochs": int,
}  # fmt: skip
"""Parts of a result that are read, which results of older versions have too."""


@dataclass(frozen=True)
class RunDirectory:
    """Reader and writer of the files of one run."""

    directory: Path

    def require_new(self) -> None:
        """Raise OptionError for a directory that is not empty or cannot be written to."""
        there = _existing(self.directory)
        if not there.is_dir():
            raise OptionError(f"--out {self.directory}: {there} is a file. Give a directory.")
        if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            raise OptionError(
                f"--out {self.directory}: {there} cannot be written to. Give another."
            )
        # hidden files do not count: a start that was killed may have left one
        if self.directory.is_dir() and any(
            not path.name.startswith(".") for path in self.directory.iterdir()
        ):
            raise OptionError(
                f"{self.directory} is not empty. Give another --out, or resume the run in it: "
                f"lod resume {self.directory}"
            )

    def make(self, needed: int) -> None:
        """Make the directory; raise CheckpointError if it has less than `needed` bytes free."""
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

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.safetensors"

    @property
    def model_file(self) -> Path:
        return self.directory / "model.safetensors"

    @property
    def finished(self) -> bool:
        return (self.directory / "result.json").exists()

    def tidy(self) -> None:
        """Remove temporary files and the lock of a process that was killed after the run ended."""
        with alone_in(self.directory):
            remove_leftovers(self.directory)

    def result(self) -> dict[str, Any]:
        """Return the result of a finished run."""
        if not self.finished:
            raise OptionError(
                f"the run in {self.directory} has not finished. Resume with: lod resume "
                f"{self.directory}"
            )
        result: dict[str, Any] = read_json_file(self.directory / "result.json", _RESULT)
        return result

    def epochs(self) -> list[EpochRecord]:
        """Return the records of the finished epochs."""
        path = self.directory / "metrics.jsonl"
        try:
            lines = read_limited(path).splitlines()
            return [EpochRecord.from_dict(parse_json(line, {"epoch": int})) for line in lines]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error}).") from None

    def write_json(self, name: str, value: Any) -> None:
        try:
            text = json.dumps(value, indent=1, allow_nan=False)
        except ValueError:
            broken = ", ".join(_not_finite(value))
            raise TrainingError(
                f"{self.directory / name} was not written: {broken} is NaN or infinite, so the "
                "training has diverged. Lower the learning rate or set clip_norm."
            ) from None
        self.write(name, text + "\n")

    def write(self, name: str, text: str) -> None:
        with self.explained(), replacing(self.directory / name) as place:
            place.write_text(text, encoding="utf-8")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise CheckpointError with the way out if a file of the run cannot be written."""
        try:
            yield
        except CheckpointError as error:
            if error.__cause__ is None:  # not a full disk: a value that the file format cannot hold
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
        return f"Saved files are complete. Make room, then resume with: lod resume {self.directory}"

    def write_metrics(self, records: Iterable[EpochRecord]) -> None:
        """Replace the metrics."""
        self.write("metrics.jsonl", "".join(map(_line, records)))

    def append(self, record: EpochRecord) -> None:
        """Append an epoch to the metrics."""
        with self.explained(), open_to_append(self.directory / "metrics.jsonl") as file:
            file.write(_line(record))


def _existing(directory: Path) -> Path:
    """Return a directory or its closest parent that exists."""
    whole = directory.absolute()
    return next(path for path in (whole, *whole.parents) if os.path.lexists(path))


def _not_finite(value: Any, where: str = "") -> list[str]:
    """Return the keys of NaN and infinite numbers in nested data."""
    if isinstance(value, dict):
        parts = [_not_finite(part, f"{where}.{key}".lstrip(".")) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [_not_finite(part, where) for part in value]
    else:
        return [where] if isinstance(value, float) and not math.isfinite(value) else []
    return list(dict.fromkeys(itertools.chain.from_iterable(parts)))


def _line(record: EpochRecord) -> str:
    return json.dumps(record.to_dict()) + "\n"


# -- files that belong together ----------------------------------------------------------------

MAY_CHANGE = (
    *("recipe", "description", "code"),
    *("epochs", "device", "threads", "checkpoint_every", "tensorboard"),
)


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that must not change after a run has begun."""
    settings = recipe.model_dump(mode="json", exclude={*MAY_CHANGE})
    settings["data"].pop("directory")  # data may move
    return settings


def require_same_settings(before: Mapping[str, Any] | None, recipe: Recipe, file: Path) -> None:
    """Raise CheckpointError if a file was written with other settings; old files name none."""
    now = fixed_settings(recipe)
    known = without_budget_steps(before or {}, used=True)
    known = {key: value for key, value in known.items() if key in now}
    changed = _differences("", known, {key: now[key] for key in known})
    if changed:
        raise CheckpointError(
            f"{file} does not belong to {file.parent / 'config.yaml'}: {listed(changed, 3)}. Once "
            f"a run has begun only {', '.join(MAY_CHANGE[3:])} and data.directory may change. Undo "
            "that, or start another run with it: lod train config.yaml --out DIR"
        )


def _differences(place: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            line
            for key in {**before, **now}
            if before.get(key) != now.get(key)
            for line in _differences(f"{place}.{key}", before.get(key), now.get(key))
        ]
    return [f"{place[1:]} is {shown(before)} in one and {shown(now)} in the other"]


def require_same_weights(about: Mapping[str, Any], model: nn.Module, file: Path) -> None:
    """Raise CheckpointError if a file describes other weights; old files name none."""
    if about.get("weights") not in (None, weights_digest(model)):
        raise CheckpointError(
            f"{file} is of another model than the model.safetensors in its directory. Restore "
            "the wrong one of the two, or write it again with lod train or lod frontier."
        )


def weights_digest(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers that does not depend on the device."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {[*value.shape]}".encode())
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
