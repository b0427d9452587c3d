"""Frontier: the sizes of one model and their costs, to choose from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, overload

from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.atomic import replacing, writing
from maestro_lod.files.json_files import Shape, parse_json, read_json_file, require_shape
from maestro_lod.model.inputs import require_number
from maestro_lod.model.limits import Limit, Size, make_limit, require_limits
from maestro_lod.model.plot import svg
from maestro_lod.text import Table, Tabular

_FORMAT = "maestro-lod frontier 1"
_POINT: Shape = {
    "ranks": {str: int}, "loss": float, "accuracy": float | None, "params": int,
    "macs": int | None, "bytes": int, "latency?": float | None,
}  # fmt: skip
_SHAPE: Shape = {"points": [_POINT], "dense": _POINT, "method": str, "cost": str}


@dataclass(frozen=True)
class Frontier(Tabular, Sequence[Size]):
    """The sizes of one model, from its stored ranks down, and the costs of its dense form.

    `dense` has the costs of the dense model, and loss and accuracy of the one at its stored ranks.
    `cost` is the cost that the search saved: "macs" or "params".
    """

    points: tuple[Size, ...]
    dense: Size
    method: str
    cost: str

    def __len__(self) -> int:
        return len(self.points)

    @overload
    def __getitem__(self, index: int) -> Size: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Size, ...]: ...
    def __getitem__(self, index: int | slice) -> Size | tuple[Size, ...]:
        return self.points[index]

    # -- choosing ------------------------------------------------------------------------------

    def pick(
        self,
        *,
        max_params: float | None = None,
        max_macs: float | None = None,
        max_bytes: float | None = None,
        max_latency: float | None = None,
        min_accuracy: float | None = None,
    ) -> dict[str, int]:
        """Return the ranks of the best size within all limits, for `extract` or `load`.

        The best size has the smallest loss, since accuracies on a few thousand samples differ by
        chance; with `min_accuracy` alone it is the cheapest one that reaches it.

        Args:
            max_params: The most parameters: an int is a count, a float in (0, 1] a share of the
                dense model's.
            max_macs: The most MACs, in the same way.
            max_bytes: The most bytes, in the same way.
            max_latency: The longest forward in seconds, after `with_latency`.
            min_accuracy: The least accuracy, between 0 and 1.

        Returns:
            The rank of each low-rank layer.

        Raises:
            OptionError: If no size is within the limits, or a limit is invalid.

        Example:
            >>> small = lod.extract(model, frontier.pick(max_macs=0.25))
        """
        return dict(
            self.point(
                max_params=max_params,
                max_macs=max_macs,
                max_bytes=max_bytes,
                max_latency=max_latency,
                min_accuracy=min_accuracy,
            ).ranks
        )

    def point(self, **limits: float | None) -> Size:
        """Return the best size within all limits; arguments as for `pick`."""
        within = self.within(limits)
        if not within:
            raise OptionError(self.why_none(limits))
        return within[0]

    def within(self, limits: Mapping[str, float | None]) -> list[Size]:
        """Return the sizes within all limits, best first; `limits` has arguments of `pick`."""
        checked = self._limits(limits)
        within = [p for p in self.points if all(limit.excess(p) <= 0.0 for limit in checked)]
        if [limit.key for limit in checked] == ["accuracy"]:
            return sorted(within, key=lambda p: (self._cost(p), p.loss))
        return sorted(within, key=lambda p: (p.loss, self._cost(p)))

    def why_none(self, limits: Mapping[str, float | None], *, together: bool = False) -> str:
        """Return a message with the limits that no size meets and the nearest size's values."""
        checked = self._limits(limits)

        def values(point: Size, keys: Sequence[str]) -> str:
            return ", ".join(f"{key} {self._text(point, key)}" for key in keys)

        for limit in checked if len(checked) == 1 or not together else ():
            near = min(self.points, key=limit.excess)
            if limit.excess(near) > 0.0:
                return (
                    f"no submodel meets {limit.text}: the nearest has {values(near, [limit.key])}."
                )
        near = min(self.points, key=lambda p: max(limit.excess(p) for limit in checked))
        texts = " and ".join(limit.text for limit in checked)
        return (
            f"no submodel meets {texts} together: the nearest has "
            f"{values(near, [limit.key for limit in checked])}."
        )

    def _limits(self, limits: Mapping[str, float | None]) -> list[Limit]:
        require_limits(limits)
        return [
            make_limit(key, value, self.points, self.dense)
            for key, value in limits.items()
            if value is not None
        ]

    def _text(self, point: Size, key: str) -> str:
        value, dense = getattr(point, key), getattr(self.dense, key)
        if value is None:
            return "–"
        if key == "latency":
            return f"{1e3 * value:.3g} ms"
        if key in ("accuracy", "loss"):
            return f"{value:.4f}"
        return f"{value:,} ({value / max(1, dense):.2f}×)"

    def _cost(self, point: Size) -> int:
        cost: int = getattr(point, self.cost)
        return cost

    @property
    def best(self) -> Frontier:
        """The sizes on the frontier: each smaller one has a larger loss."""
        best: list[Size] = []
        for point in sorted(self.points, key=lambda p: (self._cost(p), p.loss)):
            if not best or point.loss < best[-1].loss:
                best.append(point)
        return replace(self, points=tuple(reversed(best)))

    # -- latency, files, pictures --------------------------------------------------------------

    def with_latency(self, predict: Callable[[Mapping[str, int]], float], dense: float) -> Frontier:
        """Return a copy whose sizes have latencies, in seconds, predicted from their ranks."""

        def seconds(value: object, what: str) -> float:
            latency = require_number(value, what)
            if not 0.0 < latency < math.inf:
                raise OptionError(
                    f"{what} returned a latency of {latency!r} seconds. Return a positive number."
                )
            return latency

        points = [replace(p, latency=seconds(predict(p.ranks), "predict")) for p in self.points]
        reference = replace(self.dense, latency=seconds(dense, "dense"))
        return replace(self, points=tuple(points), dense=reference)

    def to_json(self) -> str:
        """Return the frontier as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the frontier as JSON."""
        _write(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Frontier:
        """Read a file that `save` wrote; raise CheckpointError for any other."""
        return cls._from_record(read_json_file(path), path)

    @classmethod
    def from_json(cls, text: str, path: str | os.PathLike[str]) -> Frontier:
        """Parse the text of `to_json`; `path` is its source, for error messages."""
        try:
            record = parse_json(text, dict)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}). Use another copy.") from error
        return cls._from_record(record, path)

    @classmethod
    def _from_record(cls, record: Mapping[str, Any], path: str | os.PathLike[str]) -> Frontier:
        try:
            require_shape(record, {"format": str})
            if record["format"] != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {record['format']!r}, but this library reads {_FORMAT!r}. "
                    "Save the frontier again."
                )
            require_shape(record, _SHAPE)
            points = tuple(_read_point(point) for point in record["points"])
            loaded = cls(points, _read_point(record["dense"]), record["method"], record["cost"])
            if not points:
                raise ValueError("there are no points")
            if loaded.cost not in ("macs", "params"):
                raise ValueError(f"cost {loaded.cost!r} is not known")
            if any(getattr(p, loaded.cost) is None for p in (*points, loaded.dense)):
                raise ValueError(f"there are no {loaded.cost}")
            return loaded
        except (ValueError, TypeError) as error:  # the second: a key that no point has
            raise CheckpointError(f"{path} is damaged ({error}). Use another copy.") from error

    def plot(
        self, path: str | os.PathLike[str], *, others: Mapping[str, Frontier] | None = None
    ) -> None:
        """Write an SVG chart of accuracy or loss over cost, with other frontiers by name."""
        frontiers = {self.method: self, **(others or {})}
        up = "accuracy"
        if any(point.accuracy is None for f in frontiers.values() for point in f):
            up = "loss"
        curves = {
            name: [(self._cost(p) / max(1, self._cost(f.dense)), getattr(p, up)) for p in f.best]
            for name, f in frontiers.items()
        }
        across = f"{'MACs' if self.cost == 'macs' else self.cost}, dense = 1"
        _write(Path(path), svg(curves, title=f"{up} of submodels", across=across, up=up))

    def table(self) -> Table:
        """Return a table of the best submodels, thinned to twenty."""
        best = self.best.points
        stride = max(1, math.ceil(len(best) / 20))
        keys = ["params", "macs", "bytes", "latency", "loss", "accuracy"]
        keys = [key for key in keys if getattr(self.dense, key) is not None]
        rows = [
            (name, *(self._text(point, key) for key in keys))
            for name, point in [("dense", self.dense), *(("", p) for p in best[::stride])]
        ]
        header = ("", *(key.replace("macs", "MACs") for key in keys))
        return Table(header, rows, right=range(1, len(header)))


def _read_point(record: Mapping[str, Any]) -> Size:
    """Parse a size and check every field, since a damaged one could build a wrong model."""
    point = Size(**record)
    counts = [point.params, point.bytes, *point.ranks.values()]
    counts += [] if point.macs is None else [point.macs]
    numbers_ = [v for v in (point.loss, point.accuracy, point.latency) if v is not None]
    if min(counts) < 0 or not all(map(math.isfinite, numbers_)):
        raise ValueError(f"invalid frontier point: {record}")
    return point


def _write(path: Path, text: str) -> None:
    with replacing(path) as place, writing(path):
        place.write_text(text, encoding="utf-8")
