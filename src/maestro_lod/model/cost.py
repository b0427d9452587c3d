"""Costs: parameters, MACs and bytes of a model in each of its forms.

The cost of a size is that of its extracted model: `better_forms` chooses the plain form of each
layer for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args, overload

from torch import nn

from maestro_lod.errors import OptionError, listed
from maestro_lod.layers.lowrank import LowRank, PlainForm
from maestro_lod.layers.ranks import low_rank_layers, require_low_rank, unwrapped
from maestro_lod.layers.uses import FactorUse, factor_uses
from maestro_lod.model.inputs import Example
from maestro_lod.model.macs import DenseMacs, dense_macs
from maestro_lod.text import Table, Tabular

Macs = TypeVar("Macs", bound="int | None")
"""A count of MACs, or None without an example input."""


class Chooser(Protocol):
    """A chooser of the better form of a layer at a rank; `latency` returns one."""

    def choose(self, name: str, rank: int) -> PlainForm:
        """Return the better form of the layer of this name at this rank."""


By: TypeAlias = Literal["params", "macs"] | Mapping[str, PlainForm] | Chooser
"""The criterion for the form of each layer; a mapping names the forms."""


def better_forms(
    model: nn.Module, ranks: Mapping[str, int], by: By = "params", *, copied: bool = True
) -> dict[str, PlainForm]:
    """Return the better form of each low-rank layer at these ranks.

    By "params" this is the smallest form, the order of the rows of a pivoted layer included; by
    "macs" the one with the fewest MACs, if equal the smallest. Scalars that plain layers store
    twice count twice. Layers that are not `copied` to plain ones keep their factors or become
    dense.
    """
    if by not in ("params", "macs") and not isinstance(by, Mapping) and not hasattr(by, "choose"):
        raise OptionError(
            f"by={by!r} is not known. Choose 'params' or 'macs', or give measured times: "
            "by=lod.latency(model, example)."
        )
    layers = _deployed_layers(model)
    if isinstance(by, str):
        return {n: layers[n].better_form(rank, by, copied) for n, rank in ranks.items()}
    if isinstance(by, Mapping):
        _require_forms(by, {name: layers[name].layer.forms(rank) for name, rank in ranks.items()})
    choose = (lambda name, _: by[name]) if isinstance(by, Mapping) else by.choose
    return {
        name: "dense" if layers[name].layer.dense_only else choose(name, rank)
        for name, rank in ranks.items()
    }


def _require_forms(
    by: Mapping[str, PlainForm], possible: Mapping[str, tuple[PlainForm, ...]]
) -> None:
    """Raise OptionError unless a mapping names a form for every layer that the layer can have."""
    if missing := [name for name in possible if by.get(name) not in get_args(PlainForm)]:
        raise OptionError(
            f"by= lacks a form for {listed(missing)}. Add one of {listed(get_args(PlainForm))}."
        )
    if wrong := [n for n, forms in possible.items() if by[n] == "pivoted" and by[n] not in forms]:
        raise OptionError(
            f"by= asks for the pivoted form of {listed(wrong)}, whose kinds or ranks do not allow "
            "it. Give 'dense' or 'factored'."
        )


@dataclass(frozen=True)
class Cost:
    """The cost of a deployed model or layer; MACs are None if they were not counted."""

    params: int
    macs: int | None
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        macs = None if self.macs is None or other.macs is None else self.macs + other.macs
        return Cost(self.params + other.params, macs, self.bytes + other.bytes)

    def __sub__(self, other: Cost) -> Cost:
        macs = None if self.macs is None or other.macs is None else self.macs - other.macs
        return Cost(self.params - other.params, macs, self.bytes - other.bytes)


class Costs:
    """The costs of a low-rank model at any ranks, as extracted by `extract`.

    If its layers are not `copied` to plain ones, the costs are those after `fuse`.
    """

    def __init__(self, model: nn.Module, macs: DenseMacs | None, *, copied: bool = True) -> None:
        model = unwrapped(model)
        self._copied = copied
        self._layers = _deployed_layers(model)
        self._positions = None if macs is None else macs.positions
        self._known: dict[tuple[str, int, PlainForm | None], Cost] = {}
        dense = [self.layer(name, 0, "dense") for name in self._layers]
        factors = [each.layer for each in self._layers.values()]
        size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        self.rest = Cost(
            params=count_params(model) - sum(layer.weights() for layer in factors),
            macs=None if macs is None else macs.total - sum(cost.macs or 0 for cost in dense),
            bytes=size - sum(layer.weights() * layer.u.element_size() for layer in factors),
        )
        """The cost of everything except the low-rank layers."""
        self.dense = sum(dense, self.rest)
        """The cost of the dense model."""

    def layer(self, name: str, rank: int, form: PlainForm | None = None) -> Cost:
        """Return the cost of a layer at a rank, in a form or in the smallest one."""
        key = name, rank, form
        if key not in self._known:
            each = self._layers[name]
            form = form or each.better_form(rank, copied=self._copied)
            params = each.params(form, rank, self._copied)
            macs = None if self._positions is None else each.macs(form, rank, self._positions)
            self._known[key] = Cost(params, macs, each.bytes(form, rank, self._copied))
        return self._known[key]

    def at(self, ranks: Mapping[str, int], forms: Mapping[str, PlainForm] | None = None) -> Cost:
        """Return the cost of the model at these ranks, in these forms or in those of `extract`."""
        forms = forms or {}
        layers = (self.layer(name, rank, forms.get(name)) for name, rank in ranks.items())
        return sum(layers, self.rest)


@dataclass(frozen=True)
class _DeployedLayer:
    """A low-rank layer with all uses of its factors."""

    layer: LowRank
    uses: tuple[FactorUse, ...]

    def better_form(self, rank: int, by: str = "params", copied: bool = True) -> PlainForm:
        def price(form: PlainForm) -> tuple[int, int]:
            macs = self.macs(form, rank, {use.name: 1 for use in self.uses})
            return (macs if by == "macs" else 0), self.bytes(form, rank, copied)

        possible = self.layer.forms(rank)
        in_order: tuple[PlainForm, ...] = ("factored", "dense", "pivoted")  # if prices are equal
        return min((form for form in in_order[: 3 if copied else 2] if form in possible), key=price)

    def params(self, form: PlainForm, rank: int, copied: bool) -> int:
        return self.layer.plain_weights(form, rank) + self._again(form, rank, copied)

    def bytes(self, form: PlainForm, rank: int, copied: bool) -> int:
        again = self._again(form, rank, copied) * self.layer.u.element_size()
        return self.layer.plain_bytes(form, rank) + again

    def _again(self, form: PlainForm, rank: int, copied: bool) -> int:
        heads = [use.head for use in self.uses if use.head] if copied else []
        return sum(head.copied_weights(form, rank) for head in heads)

    def macs(self, form: PlainForm, rank: int, positions: Mapping[str, int]) -> int:
        return sum(use.costs.plain_macs(form, positions[use.name], rank) for use in self.uses)


def _deployed_layers(model: nn.Module) -> dict[str, _DeployedLayer]:
    uses: dict[str, list[FactorUse]] = {name: [] for name in require_low_rank(model)}
    for use in factor_uses(unwrapped(model)):
        uses[use.owner].append(use)
    layers = low_rank_layers(model)
    return {name: _DeployedLayer(layers[name], tuple(own)) for name, own in uses.items()}


def count_params(model: nn.Module) -> int:
    """Count the scalars in all parameters; shared ones once."""
    return sum(p.numel() for p in model.parameters())


def cost_of(plain: nn.Module, example: Example) -> Cost:
    """Return the cost of a plain model, counted on the model itself."""
    counted = summary(plain, example)
    size = sum(t.nbytes for t in (*plain.parameters(), *plain.buffers()))
    return Cost(counted.params, counted.macs, size)


def count_bits(model: nn.Module, params: int | None = None) -> int:
    """Count the bits of all parameters, scaled to `params` parameters if given."""
    bits = sum(8 * p.nbytes for p in model.parameters())
    return bits if params is None else bits * params // max(count_params(model), 1)


@dataclass(frozen=True)
class LayerCost(Generic[Macs]):
    """One layer with a weight matrix, or everything else (kind "other")."""

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    full_rank: int | None
    params: int
    macs: Macs
    dense_params: int
    dense_macs: Macs
    form: str
    """The form that `extract` chooses: "dense", "factored" or "pivoted"."""
    fused_params: int
    fused_macs: Macs
    """MACs in that form; torch's recurrent layers multiply their factors first."""


@dataclass(frozen=True)
class Summary(Tabular, Generic[Macs]):
    """The cost of a model: in its current form, fused (here: extracted), and dense.

    MACs are None without an example input.
    """

    layers: tuple[LayerCost[Macs], ...]
    params: int
    macs: Macs
    fused_params: int
    fused_macs: Macs
    dense_params: int
    dense_macs: Macs

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """Return a row per layer, and the totals."""
        rows = [
            (
                row.name or row.kind,
                row.kind,
                "×".join(map(str, row.shape)),
                "" if row.rank is None else f"{row.rank}/{row.full_rank}",
                f"{row.params:,}",
                *_macs_cell(row.macs),
                row.form,
            )
            for row in self.layers
        ]
        for name, params, macs in (
            ("total", self.params, self.macs),
            ("extracted", self.fused_params, self.fused_macs),
            ("dense", self.dense_params, self.dense_macs),
        ):
            share = f"{params / max(self.dense_params, 1):.2f}×"
            if macs is not None:
                share += f", {macs / max(self.dense_macs or 0, 1):.2f}×"
            rows.append((name, "", "", "", f"{params:,}", *_macs_cell(macs), share))
        counts = ("params",) if self.macs is None else ("params", "MACs")
        header = ("layer", "kind", "weight", "rank", *counts, "form")
        return Table(header, rows, right=tuple(range(3, 4 + len(counts))))


def _macs_cell(macs: int | None) -> tuple[str, ...]:
    return () if macs is None else (f"{macs:,}",)


@overload
def summary(model: nn.Module) -> Summary[None]: ...


@overload
def summary(model: nn.Module, example: Example) -> Summary[int]: ...


def summary(model: nn.Module, example: Example | None = None) -> Summary[Any]:
    """Count the parameters and MACs of a model and its layers; changes nothing.

    Args:
        model: A dense or decomposed model.
        example: An input, a tuple of arguments or a mapping of keyword arguments, for counting
            MACs. They are those of the whole example: use batch size 1 for MACs per sample.

    Returns:
        The summary: data, and a table when printed. Without an example its MACs are None.

    Raises:
        LayerError: If the model does not run on the example.
        OptionError: If the example is not an input.

    Example:
        >>> lod.summary(nn.Linear(64, 32), torch.zeros(1, 64)).macs
        2048
    """
    model = unwrapped(model)
    if example is None:
        return _without_macs(_summary(model, DenseMacs(0, {}, defaultdict(int))))
    return _summary(model, dense_macs(model, example))


def _without_macs(counted: Summary[Any]) -> Summary[None]:
    none: Any = dict.fromkeys(("macs", "fused_macs", "dense_macs"))
    return replace(counted, layers=tuple(replace(row, **none) for row in counted.layers), **none)


def _summary(model: nn.Module, macs: DenseMacs) -> Summary[int]:
    rows = list(_rows(model, macs))
    rest = count_params(model) - sum(row.params for row in rows)
    if rest > 0:
        rows.append(LayerCost("", "other", (), None, None, rest, 0, rest, 0, "dense", rest, 0))
    changed = macs.total - sum(
        row.dense_macs for row in rows
    )  # MACs of modules that are not listed
    return Summary(
        layers=tuple(rows),
        params=sum(row.params for row in rows),
        macs=changed + sum(row.macs for row in rows),
        fused_params=sum(row.fused_params for row in rows),
        fused_macs=changed + sum(row.fused_macs for row in rows),
        dense_params=sum(row.dense_params for row in rows),
        dense_macs=macs.total,
    )


def _rows(model: nn.Module, macs: DenseMacs) -> Iterator[LayerCost[int]]:
    layers = _deployed_layers(model) if low_rank_layers(model) else {}
    uses = {use.name: use for each in layers.values() for use in each.uses}
    seen: set[nn.Parameter] = set()  # shared ones count at their first place
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        count = sum(p.numel() for p in own if p not in seen)
        if name in uses:
            seen |= set(own)
            yield _low_rank_row(name, uses[name], layers[uses[name].owner], macs, count)
        elif any(p.ndim > 1 for p in own):
            seen |= set(own)
            shape = tuple(max(own, key=lambda p: p.numel()).shape)
            kind, dense = type(module).__name__, macs.layers.get(name, 0)
            yield LayerCost(
                name, kind, shape, None, None, count, dense, count, dense, "dense", count, dense
            )


def _low_rank_row(
    name: str, use: FactorUse, each: _DeployedLayer, macs: DenseMacs, params: int
) -> LayerCost[int]:
    layer, positions = each.layer, macs.positions[name]
    form = each.better_form(layer.rank)
    # the factors of a shared head are parameters of the embedding
    others = params if use.head else params - layer.weights()
    dense = 0 if use.head else layer.dense_weights
    if use.head:
        deployed = use.head.copied_weights(form, layer.rank)
    else:
        deployed = layer.plain_weights(form, layer.rank)
    return LayerCost(
        name, use.kind, tuple(layer.weight_shape), layer.rank, layer.full_rank,
        params, use.costs.macs(positions), others + dense, use.costs.dense_macs(positions),
        form, others + deployed, use.costs.plain_macs(form, positions, layer.rank),
    )  # fmt: skip
