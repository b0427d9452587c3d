"""Reader of run directories for the report, finished or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maestro_lod.cli.yaml_settings import settings_in
from maestro_lod.errors import CheckpointError, OptionError, listed, suggest
from maestro_lod.files.atomic import require_no_link_out
from maestro_lod.files.json_files import parse_json, read_json_file, read_limited
from maestro_lod.train.progress import EpochRecord

METRICS = ("bleu", "accuracy", "perplexity", "loss")
"""Metrics of a model; the first one that was measured is the headline."""


@dataclass(frozen=True)
class Size:
    """Parameters or MACs of a model, absolute and relative to the dense model."""

    value: float | None
    relative: float | None

    @property
    def dense(self) -> float | None:
        if self.value is None or not self.relative:
            return None
        return self.value / self.relative


@dataclass(frozen=True)
class SplitScore:
    """Value of a metric on a split: test, validation or train."""

    metric: str
    value: float
    split: str


@dataclass(frozen=True)
class ReportedRun:
    """Contents of one run directory."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    epochs: list[EpochRecord]
    """One record per finished epoch, in order."""
    result: dict[str, Any]
    """Empty while the run is unfinished."""
    frontier: dict[str, Any]
    """Empty if no frontier was searched."""

    @property
    def finished(self) -> bool:
        return bool(self.result)

    @property
    def low_rank(self) -> bool:
        return bool(self.layers)

    @cached_property
    def ranks(self) -> list[dict[str, float]]:
        """Rank of each layer after each epoch."""
        return [numbers(dict(epoch.ranks)) for epoch in self.epochs]

    @cached_property
    def layers(self) -> list[str]:
        """Low-rank layers, in the order of the model."""
        return list(dict.fromkeys(name for ranks in self.ranks for name in ranks))

    @cached_property
    def full_ranks(self) -> dict[str, float]:
        """Full rank of each layer; for unfinished runs the largest rank so far."""
        seen = {name: max(ranks.get(name, 0.0) for ranks in self.ranks) for name in self.layers}
        return seen | numbers(self.result.get("full_ranks"))

    @property
    def final_ranks(self) -> dict[str, float]:
        return self.ranks[-1] if self.ranks else {}

    @property
    def ledger(self) -> dict[str, Any]:
        """Cost of the training, relative to training the dense model."""
        return mapping(self.result.get("ledger"))

    @property
    def seconds(self) -> float | None:
        """Training time so far."""
        spent = [drawable(epoch.seconds) or 0.0 for epoch in self.epochs]
        return number(self.result, "seconds") or sum(spent) or None

    def trend(self, key: str) -> list[tuple[float, float | None]]:
        """Return (epoch, value) for each finished epoch, by a key of its `numbers`."""
        return [(epoch.epoch, drawable(epoch.numbers().get(key))) for epoch in self.epochs]

    def mean(self, key: str) -> float | None:
        """Return the mean of a value over the epochs that have it."""
        known = [value for _, value in self.trend(key) if value is not None]
        return sum(known) / len(known) if known else None

    def size(self, kind: str) -> Size:
        """Return "params" or "macs" of the model, each layer in its cheaper form."""
        cost = mapping(self.result.get("summary"))
        value, dense = number(cost, f"fused_{kind}"), number(cost, f"dense_{kind}")
        if value is not None and dense:
            return Size(value, value / dense)
        last = self.epochs[-1].numbers() if self.epochs else {}
        return Size(number(last, kind), number(last, f"relative_{kind}"))

    def score_on(self, split: str, metric: str) -> SplitScore | None:
        """Return the final score on a split, or else that of the last epoch."""
        value = number(mapping(self.result.get(split)), metric)
        if value is None and self.epochs:
            last = self.epochs[-1]
            reached = {"train": last.train, "validation": last.validation}.get(split, {})
            value = drawable(reached.get(metric))
        return None if value is None else SplitScore(metric, value, split)

    def score(self, metric: str | None = None) -> SplitScore | None:
        """Return the score on test, validation or training data, the first that has one."""
        for split in ("test", "validation", "train"):
            for name in METRICS if metric is None else (metric,):
                if score := self.score_on(split, name):
                    return score
        return None


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read run directories; raise CheckpointError with the file that cannot be used and why."""
    places = list(dict.fromkeys(Path(path).resolve() for path in paths))
    if not places:
        raise OptionError("no run directory was given. Give at least one.")
    return [_read(path, name) for path, name in zip(places, _names(places), strict=True)]


def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def records(value: Any) -> list[dict[str, Any]]:
    """Return the mappings in a list; other values have none."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def number(record: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a record; None if it is missing or cannot be drawn."""
    return drawable(record.get(key))


def drawable(value: Any) -> float | None:
    """Return a number that can be drawn, 0.0 for tiny ones; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) < 1e-100:
        return 0.0
    return value if abs(value) < 1e100 else None


def numbers(value: Any) -> dict[str, float]:
    """Return the numbers in a mapping; other values have none."""
    known = {name: number(mapping(value), name) for name in mapping(value)}
    return {name: entry for name, entry in known.items() if entry is not None}


def ranks_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the rank of each layer in a record."""
    return numbers(record.get("ranks"))


def _names(paths: Sequence[Path]) -> list[str]:
    """Name each run by its directory, with the parents that make the names unique."""
    names: list[str] = []
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _read(path: Path, name: str) -> ReportedRun:
    config = path / "config.yaml"
    if not config.is_file():
        raise CheckpointError(f"{path} is not a run directory: {_why_not_a_run(path)}")
    require_no_link_out(path)
    try:
        settings = settings_in(config)
    except OptionError as error:
        raise CheckpointError(f"{error} Restore it.") from error
    return ReportedRun(
        name=name,
        config=settings,
        environment=_read_json(path / "environment.json"),
        epochs=_read_epochs(path / "metrics.jsonl"),
        result=_read_json(path / "result.json"),
        frontier=_read_json(path / "frontier.json"),
    )


def _why_not_a_run(path: Path) -> str:
    if not path.is_dir():
        siblings = [entry.name for entry in path.parent.glob("*/")]
        return f"there is no such directory.{suggest(path.name, siblings)}"
    runs = sorted(str(config.parent) for config in path.glob("*/config.yaml"))
    if runs:
        return f"it contains runs. Give these: {listed(runs)}."
    return "it has no config.yaml. Give a directory that `lod train` has written."


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file counts as an empty one."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = read_json_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Restore it, or remove it to report without it.") from error
    return content


def _read_epochs(path: Path) -> list[EpochRecord]:
    if not path.is_file():
        return []
    # a resumed run may have written an epoch twice: the later record is valid
    by_number = {record.epoch: record for record in _records(path)}
    return [by_number[number] for number in sorted(by_number)]


def _records(path: Path) -> Iterator[EpochRecord]:
    try:
        lines = read_limited(path).split(b"\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, dict)
        except ValueError as error:
            if place == len(lines):  # no line end: the run was killed while it wrote
                return
            raise CheckpointError(
                f"{path}, line {place} is damaged ({error}). Repair or remove that line."
            ) from error
        yield EpochRecord.from_dict({**record, "epoch": number(record, "epoch") or place})
