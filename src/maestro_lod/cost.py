"""What a model costs: parameters and MACs, dense and low-rank, at inference and over training.

MACs are the multiply-accumulates of weights: no bias, norm, activation, pooling or attention
product. They are counted by torch's own flop counter on a copy on the meta device, in which every
low-rank layer is dense, so that no arithmetic is done and nothing is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from maestro_lod.errors import LayerError, OptionError
from maestro_lod.layers import LowRank, Matrix, Recurrent, SharedHead, low_rank_type
from maestro_lod.layers.ranks import low_rank_layers, unwrapped
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
    """What `fuse` chooses for the layer: "dense" or "factored"."""
    fused_macs: int
    """In that form; torch's recurrent layers multiply their factors out first."""


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
    model = unwrapped(model)
    macs = dense_macs(model, example)
    rows = list(_rows(model, macs))
    params = count_params(model)
    named = sum(row.params for row in rows)
    if params > named:
        rest = params - named
        rows.append(LayerCost("", "other", (), None, None, rest, 0, rest, 0, "dense", 0))
    low_rank = [row for row in rows if row.rank is not None]
    to_dense = [row for row in low_rank if row.form == "dense"]
    return Summary(
        layers=tuple(rows),
        params=params,
        macs=macs.total - sum(row.dense_macs - row.macs for row in low_rank),
        fused_params=params - sum(row.params - row.dense_params for row in to_dense),
        fused_macs=macs.total - sum(row.dense_macs - row.fused_macs for row in low_rank),
        dense_params=params - sum(row.params - row.dense_params for row in low_rank),
        dense_macs=macs.total,
    )


def _rows(model: nn.Module, macs: DenseMacs) -> Iterator[LayerCost]:
    seen: set[nn.Parameter] = set()  # shared ones count where they come first
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        count = sum(p.numel() for p in own if p not in seen)
        if isinstance(module, SharedHead) or any(p.ndim > 1 for p in own):
            seen |= set(own)
        if isinstance(module, SharedHead):  # its factors are the embedding's parameters
            positions, layer = macs.positions[name], module.embedding
            yield LayerCost(
                name, "SharedHead", tuple(layer.weight_shape), layer.rank, layer.full_rank, count,
                module.macs(positions), count, module.dense_macs(positions),
                layer.fused_form(), module.fused_macs(positions),
            )  # fmt: skip
        elif isinstance(module, LowRank):
            positions, factors = macs.positions[name], module.weights()
            yield LayerCost(
                name, module.kind, tuple(module.weight_shape), module.rank, module.full_rank,
                count, module.macs(positions), count - factors + module.dense_weights,
                module.dense_macs(positions),
                module.fused_form(), module.fused_macs(positions),
            )  # fmt: skip
        elif any(p.ndim > 1 for p in own):
            shape = tuple(max(own, key=lambda p: p.numel()).shape)
            kind, dense = type(module).__name__, macs.layers.get(name, 0)
            yield LayerCost(
                name, kind, shape, None, None, count, dense, count, dense, "dense", dense
            )


Costed: TypeAlias = LowRank | SharedHead


def costed_layers(model: nn.Module) -> dict[str, Costed]:
    """Return everything that multiplies by factors: low-rank layers, heads that share theirs."""
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRank | SharedHead)}


def by_factors(model: nn.Module) -> dict[str, dict[str, Costed]]:
    """Return for each low-rank layer all that multiplies by its factors: itself, a shared head."""
    name_of = {id(layer): name for name, layer in low_rank_layers(model).items()}
    parts: dict[str, dict[str, Costed]] = {name: {} for name in name_of.values()}
    for name, layer in costed_layers(model).items():
        owner = layer.embedding if isinstance(layer, SharedHead) else layer
        if id(owner) in name_of:  # an embedding may be outside of the part of a model given here
            parts[name_of[id(owner)]][name] = layer
    return parts


def count_params(model: nn.Module) -> int:
    """Count the scalars in all parameters; shared ones once."""
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class DenseMacs:
    """MACs of a model's dense form on one input."""

    total: int
    layers: dict[str, int]
    """By the module that owns the weight matrices, for the layers that are dense anyway."""
    positions: dict[str, int]
    """At how many positions each low-rank layer applies its weight."""


def dense_macs(model: nn.Module, example: Example) -> DenseMacs:
    """Count the MACs of the model's dense form, without doing any arithmetic."""
    call = as_call(example)
    try:
        try:
            return _counted_macs(copy_on_meta(model).eval(), call.on_meta())
        except Exception:
            # what the forward makes itself, such as a first state, may have to be there too; but
            # then a model cannot look at constants of its own
            with torch.device("meta"):
                return _counted_macs(copy_on_meta(model).eval(), call.on_meta())
    except Exception as error:
        raise LayerError(
            f"MACs cannot be counted: {type(model).__name__} could not be copied to the meta "
            f"device and run there on this example ({type(error).__name__}: {error})."
        ) from error


def _counted_macs(twin: nn.Module, call: Call) -> DenseMacs:
    """Count on a copy that lies on the meta device; its low-rank layers are made dense."""
    twin, positions = _dense_with_positions(twin)
    counter = FlopCounterMode(display=False)
    layers: dict[str, int] = {}
    batched: list[int] = []  # weights applied by a batched product, which looks like attention's
    inner = [0]  # for each watched module that is running: the MACs of those inside it

    def watch(name: str, module: nn.Module) -> None:
        started: list[tuple[int, int]] = []

        def enter(*_: Any) -> None:
            started.append(_macs_so_far(counter))
            inner.append(0)

        def leave(*_: Any) -> None:
            weights, everything = (
                now - then for now, then in zip(_macs_so_far(counter), started.pop(), strict=True)
            )
            plain = low_rank_type(module) is not None  # every product in it is with its weight
            macs = everything if plain else weights
            layers[name] = layers.get(name, 0) + macs - inner.pop()
            inner[-1] += macs
            batched.append(everything - weights if plain else 0)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def watch_recurrent(prefix: str, module: Recurrent) -> None:  # it does not call its weights
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            steps = module.positions_of(args[0] if args else kwargs["input"])
            for key, part in module.named_children():
                if isinstance(part, Matrix):
                    name = f"{prefix}.{key}".lstrip(".")
                    layers[name] = layers.get(name, 0) + steps * part.weight.numel()

        module.register_forward_pre_hook(enter, with_kwargs=True)

    for name, module in twin.named_modules():
        if isinstance(module, Recurrent):
            watch_recurrent(name, module)
        elif any(p is not None and p.ndim > 1 for p in module._parameters.values()):
            watch(name, module)
    # fake tensors tell a model not to look at values, which transformers would do for its masks;
    # torch itself does look at the lengths of packed sequences
    fake = None if call.is_packed else FakeTensorMode(allow_non_fake_inputs=True)
    call = call if fake is None else call.changed(fake.from_tensor)
    with torch.no_grad(), _no_attention_fast_path(), fake or nullcontext(), counter:
        twin(*call.args, **call.kwargs)
    return DenseMacs(_macs_so_far(counter)[0] + sum(batched), layers, positions)


def _dense_with_positions(twin: nn.Module) -> tuple[nn.Module, dict[str, int]]:
    """Make a model dense, in place, and let it count where its low-rank layers were applied."""
    positions = dict.fromkeys(costed_layers(twin), 0)
    dense = {id(layer): layer.dense() for layer in low_rank_layers(twin).values()}

    def locate(name: str, caller: nn.Module, count: Callable[[Any], int]) -> None:
        def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            positions[name] += count(args[0] if args else next(iter(kwargs.values())))

        caller.register_forward_pre_hook(add, with_kwargs=True)

    for name, module in twin.named_modules():
        parent = twin.get_submodule(name.rpartition(".")[0])
        if isinstance(module, SharedHead):
            dense[id(module)] = module.plain(dense[id(module.embedding)])
            locate(name, dense[id(module)], module.positions_of)
        elif isinstance(module, LowRank) and isinstance(parent, Recurrent):
            locate(name, parent, parent.positions_of)
        elif isinstance(module, LowRank):
            locate(name, dense[id(module)], module.positions_of)
    return replace_modules(twin, dense), positions


def _macs_so_far(counter: FlopCounterMode) -> tuple[int, int]:
    """Return the MACs of products with weights, and of all products."""
    flops = counter.flop_counts["Global"]
    return sum(n for op, n in flops.items() if op in _WEIGHT_OPS) // 2, sum(flops.values()) // 2


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on_meta(self) -> Call:
        """Return the call with tensors on the meta device: shapes and dtypes alone."""
        return self.changed(lambda tensor: torch.empty_like(tensor, device="meta"))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Return the call with its tensors changed; of packed sequences only their data."""

        def of_one(value: Any) -> Any:
            if _is_packed(value):  # the lengths in it say what is computed
                return value._replace(data=change(value.data))
            return change(value) if isinstance(value, Tensor) else value

        args, kwargs = tree_map(of_one, (self.args, self.kwargs), is_leaf=_is_packed)
        return Call(args, kwargs)

    @property
    def is_packed(self) -> bool:
        """Whether there are packed sequences among the arguments."""
        return any(map(_is_packed, tree_leaves((self.args, self.kwargs), is_leaf=_is_packed)))


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def as_call(example: Example) -> Call:
    """Return the call that an example stands for, with its values."""
    if isinstance(example, Tensor | PackedSequence):
        return Call((example,), {})
    if isinstance(example, tuple):
        return Call(example, {})
    if isinstance(example, Mapping):
        return Call((), dict(example))
    if isinstance(example, Call):
        return example
    raise OptionError(
        f"example is a {type(example).__name__}. Give a tensor, a tuple of arguments or a mapping "
        "of keyword arguments."
    )


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
        self.dense_macs, self.positions = macs.total, macs.positions

    def epoch_cost(
        self, model: nn.Module, chances: Mapping[str, Sequence[float]], *, full_pass: bool = False
    ) -> EpochCost:
        """Return the cost of an epoch at the model's current ranks; append it to `epochs` to book.

        `chances` says how likely each layer is at rank 1, 2, … in a step; layers that are not in
        it always are at their own.
        """
        layers = low_rank_layers(model)
        return EpochCost(
            ranks={name: layer.rank for name, layer in layers.items()},
            params=count_params(model),
            macs=self._expected(model, chances, full_pass, lambda m, p, r: m.macs(p, r)),
            executed_macs=self._expected(
                model, chances, full_pass, lambda m, p, r: m.executed_macs(p, r)
            ),
        )

    def deployed(self, model: nn.Module) -> tuple[int, int | None]:
        """Return params and MACs of the model as `fuse` would leave it: dense where cheaper."""
        params, macs = count_params(model), self.dense_macs
        for layer in low_rank_layers(model).values():
            params += layer.fused_weights() - layer.weights()
        if macs is not None:
            for name, costed in costed_layers(model).items():
                positions = self.positions[name]
                macs += costed.fused_macs(positions) - costed.dense_macs(positions)
        return params, macs

    def _expected(
        self,
        model: nn.Module,
        chances: Mapping[str, Sequence[float]],
        full_pass: bool,
        macs: Callable[[Costed, int, int], int],
    ) -> float | None:
        if self.dense_macs is None:
            return None
        sampled = full = float(self.dense_macs)
        for owner, parts in by_factors(model).items():  # a shared head is drawn with its embedding
            for name, layer in parts.items():
                positions, dense = self.positions[name], layer.dense_macs(self.positions[name])
                whole = macs(layer, positions, layer.rank)
                full += whole - dense
                sampled += whole - dense
                for b, chance in enumerate(chances.get(owner, ()), 1):
                    sampled += chance * (macs(layer, positions, b) - whole)
        return sampled + full if full_pass else sampled

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
