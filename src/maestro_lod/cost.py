"""What a model costs: parameters and MACs, dense and low-rank, at inference and over training.

MACs are the multiply-accumulates of weights: no bias, norm, activation, pooling or attention
product. They are counted by torch's own flop counter on a copy on the meta device, in which every
low-rank layer is dense, so that no arithmetic is done and nothing is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from maestro_lod.errors import LayerError, OptionError
from maestro_lod.layers import LOW_RANK_TYPE, LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.surgery import copy_on_meta, replace_modules
from maestro_lod.table import table

Example: TypeAlias = "Tensor | tuple[Any, ...] | Mapping[str, Any] | Call"
"""An input of the model: one tensor, a tuple of arguments, or keyword arguments. Only its shapes
and dtypes matter."""

# Products with a weight; products of two activations are bmm or attention.
_WEIGHT_OPS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution}


@dataclass(frozen=True)
class LayerCost:
    """One layer with a weight matrix, or everything else (kind "other")."""

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    full_rank: int | None
    params: int
    macs: int
    dense_params: int
    dense_macs: int
    form: str
    """What `fuse` and `extract` choose for the layer: "dense" or "factored"."""


@dataclass(frozen=True)
class Summary:
    """The cost of a model: as it stands, after `fuse`, and of its dense form."""

    layers: tuple[LayerCost, ...]
    params: int
    macs: int
    fused_params: int
    fused_macs: int
    dense_params: int
    dense_macs: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            (
                row.name or row.kind,
                row.kind,
                "×".join(map(str, row.shape)),
                "" if row.rank is None else f"{row.rank}/{row.full_rank}",
                f"{row.params:,}",
                f"{row.macs:,}",
                row.form,
            )
            for row in self.layers
        ]
        for name, params, macs in (
            ("total", self.params, self.macs),
            ("after fuse", self.fused_params, self.fused_macs),
            ("dense", self.dense_params, self.dense_macs),
        ):
            of_params, of_macs = params / max(self.dense_params, 1), macs / max(self.dense_macs, 1)
            share = f"{of_params:.2f}×, {of_macs:.2f}×"
            rows.append((name, "", "", "", f"{params:,}", f"{macs:,}", share))
        header = ("layer", "kind", "weight", "rank", "params", "MACs", "fuse")
        return table(header, rows, right=(3, 4, 5))


def summary(model: nn.Module, example: Example) -> Summary:
    """Count parameters and MACs of a model and its layers, on an example input; changes nothing.

    MACs are those of the whole example, so give it batch size 1 for MACs per sample.
    """
    macs = dense_macs(model, example)
    rows = list(_rows(model, macs))
    params = count_params(model)
    named = sum(row.params for row in rows)
    if params > named:
        rest = params - named
        rows.append(LayerCost("", "other", (), None, None, rest, 0, rest, 0, "dense"))
    low_rank = [row for row in rows if row.rank is not None]
    to_dense = [row for row in low_rank if row.form == "dense"]
    return Summary(
        layers=tuple(rows),
        params=params,
        macs=macs.total - sum(row.dense_macs - row.macs for row in low_rank),
        fused_params=params - sum(row.params - row.dense_params for row in to_dense),
        fused_macs=macs.total
        - sum(row.dense_macs - row.macs for row in low_rank if row.form == "factored"),
        dense_params=params - sum(row.params - row.dense_params for row in low_rank),
        dense_macs=macs.total,
    )


def _rows(model: nn.Module, macs: DenseMacs) -> Iterator[LayerCost]:
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        count, dense = sum(p.numel() for p in own), macs.layers.get(name, 0)
        if isinstance(module, LowRank):
            positions, factors = dense // module.dense_weights, module.weights()
            yield LayerCost(
                name, module.kind, tuple(module.weight_shape), module.rank, module.full_rank,
                count, positions * factors, count - factors + module.dense_weights, dense,
                "dense" if module.dense_is_cheaper() else "factored",
            )  # fmt: skip
        elif any(p.ndim > 1 for p in own):
            shape = tuple(max(own, key=lambda p: p.numel()).shape)
            kind = type(module).__name__
            yield LayerCost(name, kind, shape, None, None, count, dense, count, dense, "dense")


def count_params(model: nn.Module) -> int:
    """Count the scalars in all parameters; shared ones once."""
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class DenseMacs:
    """MACs of a model's dense form on one input: in total, and by the module that does them."""

    total: int
    layers: dict[str, int]


def dense_macs(model: nn.Module, example: Example) -> DenseMacs:
    """Count the MACs of the model's dense form, without doing any arithmetic."""
    call = call_on_meta(example)
    try:
        return _counted_macs(_dense_twin_on_meta(model), call)
    except Exception as error:
        raise LayerError(
            f"MACs cannot be counted: {type(model).__name__} could not be copied to the meta "
            f"device and run there on this example ({type(error).__name__}: {error})."
        ) from error


def _counted_macs(twin: nn.Module, call: Call) -> DenseMacs:
    counter = FlopCounterMode(display=False)
    layers: dict[str, int] = {}
    batched: list[int] = []  # weights applied by a batched product, which looks like attention's

    def watch(name: str, module: nn.Module) -> None:
        started: list[tuple[int, int]] = []

        def enter(*_: Any) -> None:
            started.append(_macs_so_far(counter))

        def leave(*_: Any) -> None:
            weights, everything = (
                now - then for now, then in zip(_macs_so_far(counter), started.pop(), strict=True)
            )
            plain = type(module) in LOW_RANK_TYPE  # every product in it is with its weight
            layers[name] = layers.get(name, 0) + (everything if plain else weights)
            batched.append(everything - weights if plain else 0)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    for name, module in twin.named_modules():
        if any(p is not None and p.ndim > 1 for p in module._parameters.values()):
            watch(name, module)
    with torch.no_grad(), _no_attention_fast_path(), counter:
        twin(*call.args, **call.kwargs)
    return DenseMacs(_macs_so_far(counter)[0] + sum(batched), layers)


def _macs_so_far(counter: FlopCounterMode) -> tuple[int, int]:
    """Return the MACs of products with weights, and of all products."""
    flops = counter.flop_counts["Global"]
    return sum(n for op, n in flops.items() if op in _WEIGHT_OPS) // 2, sum(flops.values()) // 2


def _dense_twin_on_meta(model: nn.Module) -> nn.Module:
    twin = copy_on_meta(model).eval()
    dense = {id(layer): layer.dense() for layer in low_rank_layers(twin).values()}
    return replace_modules(twin, dense)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_on_meta(example: Example) -> Call:
    """Turn an example into a call with tensors on the meta device: shapes and dtypes alone."""
    if isinstance(example, Tensor):
        call = Call((example,), {})
    elif isinstance(example, tuple):
        call = Call(example, {})
    elif isinstance(example, Mapping):
        call = Call((), dict(example))
    elif isinstance(example, Call):
        call = example
    else:
        raise OptionError(
            f"example is a {type(example).__name__}. Give a tensor, a tuple of arguments or a "
            "mapping of keyword arguments."
        )
    args, kwargs = tree_map_only(
        Tensor, lambda t: torch.empty_like(t, device="meta"), (call.args, call.kwargs)
    )
    return Call(args, kwargs)


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    """Make torch's transformer layers call their sublayers, whose MACs are then seen."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@dataclass(frozen=True)
class EpochCost:
    """One epoch of training: the ranks in force, and the cost of a step relative to dense."""

    ranks: dict[str, int]
    params: int
    """Parameters held in memory."""
    macs: float | None
    """Expected forward MACs of a sampled step, by the paper's convention: always factored."""
    executed_macs: float | None
    """The same as really executed, each layer factored or composed, whichever it chose."""


@dataclass
class Ledger:
    """The cost of training beside that of training the dense model, epoch by epoch.

    Counted as in the paper: parameters held in memory at the current ranks, and the expected
    forward MACs of the sampled network. The factor for the backward is the same on both sides.
    MACs are None until an example of the model's input is known.
    """

    dense_params: int
    dense_macs: int | None = None
    positions: dict[str, int] = field(default_factory=dict)
    """At how many positions each low-rank layer applies its weight to the example."""
    epochs: list[EpochCost] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, example: Example | None = None) -> Ledger:
        """Open a ledger for a low-rank model."""
        layers = low_rank_layers(model)
        factored = sum(layer.weights() - layer.dense_weights for layer in layers.values())
        ledger = cls(dense_params=count_params(model) - factored)
        if example is not None:
            ledger.measure(model, example)
        return ledger

    def measure(self, model: nn.Module, example: Example) -> None:
        """Learn where the layers work, from an example of the model's input."""
        macs = dense_macs(model, example)
        layers = low_rank_layers(model)
        self.dense_macs = macs.total
        self.positions = {
            name: macs.layers.get(name, 0) // layer.dense_weights for name, layer in layers.items()
        }

    def epoch_cost(
        self, model: nn.Module, sampled: Mapping[str, float], *, full_pass: bool = False
    ) -> EpochCost:
        """Return the cost of an epoch at the model's current ranks; append it to `epochs` to book.

        `sampled` says with which probability a step truncates each layer, to a rank that is
        uniform over those it has.
        """
        layers = low_rank_layers(model)
        return EpochCost(
            ranks={name: layer.rank for name, layer in layers.items()},
            params=count_params(model),
            macs=self._expected(layers, sampled, full_pass, lambda m, p, r: p * m.weights(r)),
            executed_macs=self._expected(layers, sampled, full_pass, LowRank.executed_macs),
        )

    def _expected(
        self,
        layers: Mapping[str, LowRank],
        sampled: Mapping[str, float],
        full_pass: bool,
        macs: Callable[[LowRank, int, int], int],
    ) -> float | None:
        if self.dense_macs is None:
            return None
        total = float(self.dense_macs)
        for name, layer in layers.items():
            positions, rank = self.positions[name], layer.rank
            full = macs(layer, positions, rank)
            total += full * (2 if full_pass else 1) - positions * layer.dense_weights
            if probability := sampled.get(name, 0.0):
                mean = sum(macs(layer, positions, b) for b in range(1, rank + 1)) / rank
                total -= probability * (full - mean)
        return total

    @property
    def relative_params(self) -> float | None:
        """Mean parameters in memory over the epochs so far, relative to dense training."""
        return self._mean([epoch.params for epoch in self.epochs], self.dense_params)

    @property
    def relative_macs(self) -> float | None:
        """Mean MACs per step over the epochs so far, relative to dense training."""
        return self._mean([epoch.macs for epoch in self.epochs], self.dense_macs)

    @property
    def relative_executed_macs(self) -> float | None:
        """Like `relative_macs`, for the MACs that were really executed."""
        return self._mean([epoch.executed_macs for epoch in self.epochs], self.dense_macs)

    @staticmethod
    def _mean(costs: list[int] | list[float | None], dense: int | None) -> float | None:
        known = [cost for cost in costs if cost is not None]
        if not dense or not known or len(known) < len(costs):
            return None
        return sum(known) / len(known) / dense

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ledger."""
        self.dense_params, self.dense_macs = state["dense_params"], state["dense_macs"]
        self.positions = dict(state["positions"])
        self.epochs = [EpochCost(**epoch) for epoch in state["epochs"]]
