"""Latency of layers on this machine: the dense form, and the other forms at a few ranks.

Fewer parameters are not always faster: two small products move more memory than one, and every call
has a cost. So each layer is measured in all plain forms, on inputs with the shapes of a forward of
the model, and `fuse` and `extract` can choose forms by these times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import CheckpointError, LayerError, OptionError, listed, suggest
from maestro_lod.layers.embedding import SharedHead
from maestro_lod.layers.lowrank import LowRank, PlainForm
from maestro_lod.layers.ranks import Ranks, require_low_rank, resolve, resolve_for, unwrapped
from maestro_lod.layers.uses import FactorUse, factor_uses
from maestro_lod.model.inputs import Example, ModelInputs, drawn, in_mode, model_device
from maestro_lod.model.surgery import extract
from maestro_lod.sizes.timing import ROUNDS, interleaved, ratios, relative, run
from maestro_lod.text import Table, Tabular

_POINTS = 4  # ranks per layer and form: the largest of interest, and halves of it
_WHOLE = "the dense model"  # the keys of timings are this one, and (layer, form, rank)
_NOT_DENSE: tuple[PlainForm, ...] = ("factored", "pivoted")
MOST_NOISE = 0.05
"""The largest relative noise that can make a slower factored form count as equal."""


@dataclass(frozen=True)
class RankTiming:
    """The factored or pivoted form at one rank, relative to the dense form of the same layer."""

    rank: int
    ratio: float
    """Time of this form over that of the dense form: the median over the rounds."""
    noise: float
    """The uncertainty of that median: the interquartile range of the rounds over √rounds."""


@dataclass(frozen=True)
class LayerLatency:
    """The times of one low-rank layer in one forward of the model: dense, and others by rank."""

    rank: int
    full_rank: int
    break_even: int
    """The largest rank at which the factors have no more weights than the dense form; 0 without a
    factored form. Larger ranks are not measured, since dense is better in all respects."""
    dense: float
    points: tuple[RankTiming, ...]
    """Of the factored form by rank, ascending; empty if the layer did not run or has no such form.
    """
    pivoted: tuple[RankTiming, ...] = ()
    """Of the pivoted form, in the same way."""
    pivoted_ranks: tuple[int, int] = (1, 0)
    """The first and the last rank at which the pivoted form is the smallest one."""

    def at(self, rank: int, form: PlainForm = "factored") -> RankTiming:
        """Return the time of a form at a rank where it saves weights, interpolated between points.

        Below the smallest measured rank the time of that rank is used, which is an upper bound.
        """
        rank = max(rank, 1)  # one rank of zeros stands in for none
        if form == "dense":
            return RankTiming(rank, 1.0, 0.0)
        points = self.points if form == "factored" else self.pivoted
        below = [point for point in points if point.rank <= rank]
        above = [point for point in points if point.rank >= rank]
        if not points:  # a layer that did not run is not slower in any form
            return RankTiming(rank, 1.0, 0.0)
        if not below or not above:
            nearest_point = above[0] if above else below[-1]
            return RankTiming(rank, nearest_point.ratio, nearest_point.noise)
        low, high = below[-1], above[0]
        share = (rank - low.rank) / max(high.rank - low.rank, 1)
        ratio = low.ratio + share * (high.ratio - low.ratio)
        return RankTiming(rank, ratio, max(low.noise, high.noise))

    def choose(self, rank: int) -> PlainForm:
        """Return the fastest form that is not larger than dense; within noise the smallest."""
        smallest_first: list[PlainForm] = ["dense"]
        if rank <= self.break_even:
            smallest_first.insert(0, "factored")
        if self.pivoted_ranks[0] <= rank <= self.pivoted_ranks[1]:
            smallest_first.insert(0, "pivoted")
        least = min(self.at(rank, form).ratio for form in smallest_first)

        def is_fast(form: PlainForm) -> bool:
            point = self.at(rank, form)
            return point.ratio <= least * (1 + min(point.noise, MOST_NOISE))

        return next((form for form in smallest_first if is_fast(form)), "dense")

    def seconds(self, rank: int, form: PlainForm | None = None) -> float:
        """Return the time at a rank, in a form or in the chosen one."""
        return self.dense * self.at(rank, form or self.choose(rank)).ratio


@dataclass(frozen=True)
class Latency(Tabular):
    """The result of `latency`, for `fuse` and `extract` as `by=`."""

    dense: float
    """Seconds of one forward of the whole model with every layer dense."""
    layers: dict[str, LayerLatency]
    batch: int
    """The leading dimension of the example: the batch size of the measurement."""
    rounds: int
    threads: int
    dtype: str
    device: str
    torch: str

    def choose(self, name: str, rank: int) -> PlainForm:
        """Return the fastest form of a layer at this rank."""
        if name not in self.layers:
            raise LayerError(
                f"{name or '(the model itself)'} was not measured.{suggest(name, self.layers)} "
                f"Measured: {listed(self.layers)}. Call latency for the model that you extract."
            )
        return self.layers[name].choose(rank)

    def predict(
        self, ranks: Ranks | None = None, *, forms: Mapping[str, PlainForm] | None = None
    ) -> float:
        """Predict the seconds of a forward of the model extracted at these ranks; above 0.

        Each layer has its form in `forms`, or else the chosen one. The prediction is the measured
        time of the dense model, less the gains of its layers.
        """
        limits = {name: (layer.rank, layer.full_rank) for name, layer in self.layers.items()}
        chosen = {name: layer.rank for name, layer in self.layers.items()}
        chosen |= resolve(ranks, limits) if ranks is not None else {}
        gained = sum(
            layer.dense - layer.seconds(chosen[name], (forms or {}).get(name))
            for name, layer in self.layers.items()
        )
        total = sum(layer.dense for layer in self.layers.values())
        # by noise the layers together may be slower than the model, which cannot gain more
        return self.dense - gained * min(1.0, self.dense / total if total else 1.0)

    @property
    def method(self) -> str:
        """The conditions of the measurement, in one line."""
        return (
            f"batch {self.batch}, {self.threads} threads, {self.dtype}, {self.device}, torch "
            f"{self.torch}; medians of {self.rounds} interleaved rounds in inference mode"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Latency:
        """Create a latency from the data of `to_dict`; raise CheckpointError for other data."""
        try:
            layers = {
                str(name): LayerLatency(
                    **{
                        **layer,
                        "points": _timings(layer["points"]),
                        "pivoted": _timings(layer.get("pivoted", ())),
                        "pivoted_ranks": tuple(layer.get("pivoted_ranks", (1, 0))),
                    }
                )
                for name, layer in data["layers"].items()
            }
            return cls(**{**data, "layers": layers})
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the data is not a measured latency ({error!r}). Measure it again."
            ) from error

    def table(self) -> Table:
        """Return a row per layer with its times in each form, and the totals."""
        rows = []
        for name, layer in self.layers.items():
            ranks = range(1, min(layer.rank, max(layer.break_even, layer.pivoted_ranks[1])) + 1)
            pays = [rank for rank in ranks if layer.choose(rank) != "dense"]
            faster = f"up to {max(pays)}" if pays else "never"
            rows.append(
                (name or "(the model itself)", f"{layer.rank}/{layer.full_rank}",
                 _seconds_as_text(layer.dense), _timings_as_text(layer.points),
                 _timings_as_text(layer.pivoted), faster)
            )  # fmt: skip
        rows.append(("dense model", "", _seconds_as_text(self.dense), "", "", ""))
        rows.append(("extracted", "", _seconds_as_text(self.predict()), "", "", "predicted"))
        header = (
            "layer", "rank", "dense", "factored at rank, × dense", "pivoted, × dense", "pays",
        )  # fmt: skip
        return Table(header, rows, (1, 2), f"{self.method}; ≈ within the noise")


def _timings(data: Iterable[Mapping[str, Any]]) -> tuple[RankTiming, ...]:
    return tuple(RankTiming(**point) for point in data)


def _timings_as_text(points: Iterable[RankTiming]) -> str:
    return "  ".join(
        f"{p.rank}: {p.ratio:.2f}{'≈' if abs(p.ratio - 1) <= p.noise else ''}" for p in points
    )


def _seconds_as_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


# -- measuring ---------------------------------------------------------------------------------


def latency(model: nn.Module, example: Example, *, rounds: int = ROUNDS) -> Latency:
    """Measure every low-rank layer in all its forms on this machine; changes nothing.

    The number of threads is torch's. The time of a layer includes all its uses. All forms are in
    memory at once, about six times the dense model, so that each round times all of them shortly
    after each other.

    Args:
        model: A decomposed model.
        example: An input with the batch size to measure at. Only the shapes of floats count;
            integers, such as token ids, are used unchanged.
        rounds: The number of timings of each form.

    Returns:
        The times, for `extract`, `fuse` and `Frontier.with_latency`.

    Raises:
        LayerError: If there is no low-rank layer, or the model does not run on the example.
        OptionError: If `rounds` is below 1, or the example has no batch dimension.

    Example:
        >>> model = lod.decompose(nn.Sequential(nn.Linear(64, 32)))
        >>> latency = lod.latency(model, torch.randn(8, 64), rounds=3)
        >>> small = lod.extract(model, 0.25, by=latency)
    """
    if rounds < 1:
        raise OptionError(f"rounds={rounds!r} must be one or more.")
    layers = require_low_rank(model)
    device = model_device(model)
    call = ModelInputs.from_example(example).drawn(device)
    with in_mode(model, training=False), torch.inference_mode():
        calls = _recorded_calls(model, call)
        dense = all_dense(model)
        variants: dict[Any, Callable[[], object]] = {_WHOLE: lambda: run(dense, call)}
        for name, layer in layers.items():
            if calls[name]:
                inputs = _drawn_inputs(calls[name], device)
                for form, rank in _variants(layer):
                    variants[name, form, rank] = _forward(layer, form, rank, calls[name], inputs)
        times = interleaved(variants, rounds=rounds)
    whole = statistics.median(times[_WHOLE])
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return Latency(
        dense=whole,
        layers={name: _measured(name, layer, times) for name, layer in layers.items()},
        batch=call.batch_size,
        rounds=rounds,
        threads=torch.get_num_threads(),
        dtype=str(floats[0]).removeprefix("torch."),
        device=str(device),
        torch=torch.__version__,
    )


def round_ranks(model: nn.Module, ranks: Ranks | None, *, multiple: int = 8) -> dict[str, int]:
    """Round ranks to multiples of a number, at which kernels are faster.

    Args:
        model: A decomposed model.
        ranks: Ranks as for `extract`.
        multiple: The number. Rank 0, and ranks of layers that have fewer ranks than it, are not
            rounded.

    Returns:
        The rank of each low-rank layer: the nearest multiple that the layer has.

    Raises:
        LayerError: If there is no low-rank layer, or a name matches none.
        RankError: If a layer cannot have the rank.
        OptionError: If `multiple` is below 1.

    Example:
        >>> model = lod.decompose(nn.Sequential(nn.Linear(64, 32)))
        >>> lod.round_ranks(model, 13)
        {'0': 16}
    """
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise OptionError(f"multiple={multiple!r} must be a whole number, one or more.")
    layers = require_low_rank(model)

    def rounded(rank: int, stored: int) -> int:
        if rank == 0 or stored < multiple:
            return rank
        nearest_multiple = math.floor(rank / multiple + 0.5) * multiple
        return min(max(nearest_multiple, multiple), stored // multiple * multiple)

    return {name: rounded(r, layers[name].rank) for name, r in resolve_for(model, ranks).items()}


def all_dense(model: nn.Module) -> nn.Module:
    """Extract a model with every layer dense."""
    return extract(model, by=dict.fromkeys(require_low_rank(model), "dense"))


@dataclass(frozen=True)
class _LayerCall:
    """One call of a layer in the forward, or of a head that shares its factors."""

    head: SharedHead | None
    inputs: tuple[Tensor, ...]
    """Tensors; on the meta device if only their shapes and layouts matter."""


def _recorded_calls(model: nn.Module, call: ModelInputs) -> dict[str, list[_LayerCall]]:
    """Run the model once and record the inputs of each low-rank layer.

    Weights that their layer multiplies by are not called; deployed, they are as fast as dense ones.
    """
    calls: dict[str, list[_LayerCall]] = {name: [] for name in require_low_rank(model)}
    modules = dict(unwrapped(model).named_modules())

    def noting(use: FactorUse) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            layouts = (
                torch.empty_like(x, device="meta") if x.is_floating_point() else x.clone()
                for x in inputs
            )
            calls[use.owner].append(_LayerCall(use.head, tuple(layouts)))

        return note

    handles = [
        modules[use.name].register_forward_pre_hook(noting(use), with_kwargs=True)
        for use in factor_uses(unwrapped(model))
    ]
    try:
        run(model, call)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _break_even(layer: LowRank) -> int:
    return 0 if layer.dense_only else layer.break_even


def _pivoted_ranks(layer: LowRank) -> tuple[int, int]:
    """Return the first and the last rank at which the pivoted form is the smallest one."""

    def is_smallest(rank: int) -> bool:
        return "pivoted" in layer.forms(rank) and all(
            layer.plain_bytes("pivoted", rank) < layer.plain_bytes(form, rank)
            for form in ("dense", "factored")
        )

    smallest = [rank for rank in range(1, layer.full_rank) if is_smallest(rank)]
    return (smallest[0], smallest[-1]) if smallest else (1, 0)


def _grid(layer: LowRank, form: PlainForm) -> list[int]:
    """Return the ranks to measure: the largest that can be faster, and halves of it."""
    least, most = (1, _break_even(layer)) if form == "factored" else _pivoted_ranks(layer)
    top = min(max(layer.rank, 1), most)  # rank 0 becomes one rank of zeros
    return sorted({max(top >> i, least) for i in range(_POINTS)}) if top >= least else []


def _variants(layer: LowRank) -> Iterator[tuple[PlainForm, int]]:
    """Yield the forms and ranks to measure."""
    yield "dense", layer.rank
    for form in _NOT_DENSE:
        for rank in _grid(layer, form):
            yield form, rank


def _drawn_inputs(calls: list[_LayerCall], device: torch.device) -> list[tuple[Tensor, ...]]:
    """Draw inputs for each call; floats of the same shape and layout share their memory."""
    generator = torch.Generator(device).manual_seed(0)
    memory: dict[Any, Tensor] = {}

    def filled(x: Tensor) -> Tensor:
        key = (x.shape, x.stride(), x.dtype) if x.is_meta else id(x)
        if key not in memory:
            memory[key] = drawn(x, device, generator)
        return memory[key]

    return [tuple(map(filled, call.inputs)) for call in calls]


def _forward(
    layer: LowRank,
    form: PlainForm,
    rank: int,
    calls: list[_LayerCall],
    inputs: list[tuple[Tensor, ...]],
) -> Callable[[], None]:
    """Return a function that runs a plain form of a layer as often as one forward of the model."""
    plain = layer.to_torch(form, min(rank, layer.rank))
    heads = {id(call.head): call.head.to_torch(plain) for call in calls if call.head is not None}
    steps = [heads.get(id(call.head), plain) for call in calls]

    def run_all() -> None:
        for step, arguments in zip(steps, inputs, strict=True):
            step(*arguments)

    return run_all


def _measured(name: str, layer: LowRank, times: Mapping[Any, list[float]]) -> LayerLatency:
    """Return the times of a layer, from medians of ratios within rounds."""
    dense, points = 0.0, dict[PlainForm, list[RankTiming]](factored=[], pivoted=[])
    if (name, "dense", layer.rank) in times:
        dense_times = times[name, "dense", layer.rank]
        dense = relative(times, (name, "dense", layer.rank), _WHOLE)[0]
        for form, rank in _variants(layer):
            if form != "dense":
                over_dense = ratios(times[name, form, rank], dense_times)
                timing = RankTiming(rank, statistics.median(over_dense), _scatter(over_dense))
                points[form].append(timing)
    return LayerLatency(
        layer.rank, layer.full_rank, _break_even(layer), dense, tuple(points["factored"]),
        tuple(points["pivoted"]), _pivoted_ranks(layer),
    )  # fmt: skip


def _scatter(values: list[float]) -> float:
    """Return the uncertainty of the median of these values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / math.sqrt(len(values))
