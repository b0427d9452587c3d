"""What a layer costs in time on one machine: dense beside factored, at a few ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from maestro_lod.errors import CheckpointError, LayerError, listed, suggest
from maestro_lod.layers.lowrank import PlainForm
from maestro_lod.layers.ranks import Ranks, resolve
from maestro_lod.text import Table, Tabular

MOST_NOISE = 0.05
"""A measurement that scatters more than this does not excuse a layer that is slower by more."""


@dataclass(frozen=True)
class RankTiming:
    """The factored form at one rank, relative to the dense form of the same layer."""

    rank: int
    ratio: float
    """Time of the factored form over that of the dense form: the median over the rounds."""
    noise: float
    """How far that median may be off: the interquartile range of the rounds over √rounds."""


@dataclass(frozen=True)
class LayerLatency:
    """One low-rank layer: seconds of its dense form in one forward, and the factored ones."""

    rank: int
    full_rank: int
    break_even: int
    """The largest rank at which the factors have no more weights than the dense form; 0 if there
    is no factored form. Above it nothing is measured: dense has less of everything."""
    dense: float
    points: tuple[RankTiming, ...]
    """By rank, ascending; empty if the layer did not run or has no factored form."""

    def at(self, rank: int) -> RankTiming:
        """Return the factored form at a rank up to break-even, interpolated between points.

        Below the smallest measured rank its time is taken, which is an upper bound.
        """
        rank = max(rank, 1)  # one rank of zeros stands in for none
        below = [point for point in self.points if point.rank <= rank]
        above = [point for point in self.points if point.rank >= rank]
        if not self.points:  # it did not run, so no form is slower
            return RankTiming(rank, 1.0, 0.0)
        if not below or not above:
            nearest_point = above[0] if above else below[-1]
            return RankTiming(rank, nearest_point.ratio, nearest_point.noise)
        low, high = below[-1], above[0]
        share = (rank - low.rank) / max(high.rank - low.rank, 1)
        ratio = low.ratio + share * (high.ratio - low.ratio)
        return RankTiming(rank, ratio, max(low.noise, high.noise))

    def choose(self, rank: int) -> PlainForm:
        """Return the faster form; within the noise the one with fewer weights, factored."""
        if rank > self.break_even:
            return "dense"
        point = self.at(rank)
        return "factored" if point.ratio <= 1 + min(point.noise, MOST_NOISE) else "dense"

    def seconds(self, rank: int, form: PlainForm | None = None) -> float:
        """Return the time at a rank, of the chosen form or of another one."""
        factored = (form or self.choose(rank)) == "factored"
        return self.dense * (self.at(rank).ratio if factored else 1.0)


@dataclass(frozen=True)
class Latency(Tabular):
    """What was measured, and how. Give it to `fuse` or `extract` as `by=`."""

    dense: float
    """Seconds of one forward of the whole model with every layer dense."""
    layers: dict[str, LayerLatency]
    batch: int
    """The leading dimension of the example: the batch size that all of this is true for."""
    rounds: int
    threads: int
    dtype: str
    device: str
    torch: str

    def choose(self, name: str, rank: int) -> PlainForm:
        """Return the form of a layer that is not slower than its dense form at this rank."""
        if name not in self.layers:
            raise LayerError(
                f"{name or '(the model itself)'} was not measured.{suggest(name, self.layers)} "
                f"Measured: {listed(self.layers)}. Call latency on the model that you extract."
            )
        return self.layers[name].choose(rank)

    def predict(
        self, ranks: Ranks | None = None, *, forms: Mapping[str, PlainForm] | None = None
    ) -> float:
        """Return the seconds that the model extracted at these ranks should take; above 0.

        Each layer has the form that was chosen by this, or that of `forms`. The dense model as a
        whole was measured; what its layers gain is added up.
        """
        limits = {name: (layer.rank, layer.full_rank) for name, layer in self.layers.items()}
        chosen = {name: layer.rank for name, layer in self.layers.items()}
        chosen |= resolve(ranks, limits) if ranks is not None else {}
        gained = sum(
            layer.dense - layer.seconds(chosen[name], (forms or {}).get(name))
            for name, layer in self.layers.items()
        )
        alone = sum(layer.dense for layer in self.layers.values())
        # noise may make the layers alone slower than the whole, which cannot gain more than it has
        return self.dense - gained * min(1.0, self.dense / alone if alone else 1.0)

    @property
    def method(self) -> str:
        """How it was measured, in one line."""
        return (
            f"batch {self.batch}, {self.threads} threads, {self.dtype}, {self.device}, torch "
            f"{self.torch}; medians of {self.rounds} interleaved rounds in inference mode"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Latency:
        """Return what `to_dict` was given; refuse data of another shape."""
        try:
            layers = {
                str(name): LayerLatency(
                    **{**layer, "points": tuple(RankTiming(**point) for point in layer["points"])}
                )
                for name, layer in data["layers"].items()
            }
            return cls(**{**data, "layers": layers})
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"this is no measured latency ({error!r}).") from error

    def table(self) -> Table:
        """Return each layer, dense and factored, and the whole model."""
        rows = []
        for name, layer in self.layers.items():
            ranks = range(1, min(layer.rank, layer.break_even) + 1)
            pays = [rank for rank in ranks if layer.choose(rank) == "factored"]
            cells = "  ".join(
                f"{p.rank}: {p.ratio:.2f}{'≈' if abs(p.ratio - 1) <= p.noise else ''}"
                for p in layer.points
            )
            faster = f"up to {max(pays)}" if pays else "never"
            rows.append(
                (name or "(the model itself)", f"{layer.rank}/{layer.full_rank}",
                 _shown(layer.dense), cells, faster)
            )  # fmt: skip
        rows.append(("dense model", "", _shown(self.dense), "", ""))
        rows.append(("extracted", "", _shown(self.predict()), "", "predicted"))
        header = ("layer", "rank", "dense", "factored at rank, × dense", "factored pays")
        return Table(header, rows, (1, 2), f"{self.method}; ≈ within the noise")


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
