"""Structures: the form of each layer by name, and `restructure`, which changes it.

A structure lists the differences from the dense model. Decomposing, fusing, extracting, loading and
rebuilding pass the structure that they want and a function that makes factors of a dense layer;
only this file decides which layers are exchanged, unpacked and repacked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from torch import nn

from maestro_lod.errors import LayerError, listed
from maestro_lod.layers.embedding import SharedHead
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.plain import switch_off_fast_paths
from maestro_lod.layers.ranks import low_rank_layers, unwrapped
from maestro_lod.layers.registry import low_rank_type, unpacked_type
from maestro_lod.layers.uses import module_role
from maestro_lod.model.replace import (
    copy_without_hooks,
    last_plain_layer,
    own_memory,
    transfer_attributes,
)


class Form(NamedTuple):
    """The form of one layer."""

    kind: Literal["low-rank", "factored", "pivoted", "dense", "unpacked", "shared"]
    rank: int | None = None
    """The rank of a low-rank, factored or pivoted layer, or the rank of a dense weight."""
    embedding: str | None = None
    """The embedding whose factors a shared head uses."""


Structure: TypeAlias = dict[str, Form]
"""The layers that differ from the dense model, by name. "dense" means a layer of torch, also where
the model's dense layer is another library's."""

UNPACKED = Form("unpacked")
_WITH_RANKS = ("low-rank", "factored", "pivoted")

Fill: TypeAlias = Callable[[str, nn.Module, int], LowRank]
"""Makes a low-rank layer from the name of a dense layer, the layer and a rank."""


def read_structure(model: nn.Module) -> Structure:
    """Read the structure of a low-rank model."""
    model = unwrapped(model)
    modules = dict(model.named_modules())
    name_of = {id(layer): name for name, layer in low_rank_layers(model).items()}
    structure: Structure = {}
    for name, module in modules.items():
        role, layer = module_role(module), cast("Any", module)
        if role == "low-rank":
            structure[name] = Form("low-rank", layer.rank)
        elif role == "unpacked":
            structure[name] = UNPACKED
        elif role == "shared":
            if id(layer.embedding) not in name_of:
                raise LayerError(
                    f"{name} shares the factors of an embedding that is not part of this "
                    f"{type(model).__name__}. Use the model that contains both."
                )
            structure[name] = Form("shared", embedding=name_of[id(layer.embedding)])
    return structure


def drop_unneeded_unpacking(structure: Structure) -> Structure:
    """Return a structure without unpacked layers whose parts are all dense."""
    holders = {
        name.rpartition(".")[0] for name, form in structure.items() if form.kind in _WITH_RANKS
    }
    return {n: form for n, form in structure.items() if form != UNPACKED or n in holders}


def svd(name: str, dense: nn.Module, rank: int) -> LowRank:
    """Fill the factors with the leading singular directions of the dense weight."""
    kind = low_rank_type(type(dense))
    assert kind is not None
    return kind.from_dense(dense, rank)


def uninitialized(name: str, dense: nn.Module, rank: int) -> LowRank:
    """Leave the factors undefined, for loading or for counting."""
    kind = low_rank_type(type(dense))
    assert kind is not None
    return kind.from_dense_shape(dense, rank)


def restructure(model: nn.Module, target: Structure, *, fill: Fill) -> nn.Module:
    """Change a model to a structure, in place; return it, or the replacement of a bare layer.

    All new layers are made before any is exchanged, so that an error leaves the model unchanged.
    """
    model = unwrapped(model)
    exchanged = _exchanged(model, target, fill)
    for exchange in exchanged:
        transfer_attributes(exchange.old, exchange.new, added_by=exchange.source)
    new = {id(exchange.old): exchange.new for exchange in exchanged}
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in new:
                parent._modules[key] = new[id(child)]
    changed = new.get(id(model), model)
    switch_off_fast_paths(changed, target)
    return changed


def restructured_copy(model: nn.Module, target: Structure) -> nn.Module:
    """Return a deep copy of a model with this structure and without hooks."""
    model = unwrapped(model)
    memo: dict[int, Any] = {}
    exchanged = _exchanged(model, target, uninitialized)
    for old, new, _ in exchanged:
        memo[id(old)] = new
        bias = old._parameters.get("bias")
        if bias is not None:  # a bias that layers share stays shared
            last_plain_layer(new).bias = memo.setdefault(id(bias), last_plain_layer(new).bias)
    return copy_without_hooks(model, memo, [exchange.old for exchange in exchanged])


class _Exchange(NamedTuple):
    old: nn.Module
    new: nn.Module
    source: nn.Module
    """The layer that lists the user attributes of the old one."""


@dataclass
class _Exchanges:
    """The layers to exchange in a model, collected step by step."""

    modules: dict[str, nn.Module]
    target: Structure
    fill: Fill

    def __post_init__(self) -> None:
        self.by_id: dict[int, _Exchange] = {}

    def put(self, old: nn.Module, new: nn.Module, source: nn.Module | None = None) -> None:
        self.by_id[id(old)] = _Exchange(old, new, source or old)

    def now(self, module: nn.Module) -> nn.Module:
        """Return the module that will replace a module, or itself."""
        return self.by_id[id(module)].new if id(module) in self.by_id else module

    def unpack_layers(self) -> dict[str, nn.Module]:
        """Unpack layers with several weights into modules on the same memory."""
        unpacked = {}
        for name, form in self.target.items():
            module = self.modules.get(name)
            kind = unpacked_type(type(module)) if form == UNPACKED else None
            if kind is not None:
                unpacked[name] = kind(self.modules[name])
                for key, part in unpacked[name].named_children():
                    self.modules[f"{name}.{key}".lstrip(".")] = part
        return unpacked

    def change_layer(self, name: str, module: Any) -> None:
        """Make a layer low-rank, factored or dense."""
        form = self.target.get(name)
        if module_role(module) == "low-rank":
            if form is None:
                self.put(module, module.dense())
            elif form.kind in ("factored", "pivoted", "dense"):
                self.put(module, module.to_torch(form.kind, form.rank))
            return
        if form is None or low_rank_type(type(module)) is None:
            return
        if form.kind == "low-rank":
            self.put(module, self.fill(name, module, form.rank or 0))
        elif form.kind == "pivoted":
            layer = self.fill(name, module, form.rank or 1)
            transfer_attributes(module, layer)
            self.put(module, _empty_pivoted(layer, form.rank), source=layer)
        elif form.kind == "factored" or (form.kind == "dense" and not _is_of_torch(module)):
            layer = self.fill(name, module, form.rank or 1)
            transfer_attributes(module, layer)
            plain = layer.to_torch(form.kind, form.rank)
            self.put(module, plain, source=layer)

    def change_head(self, name: str, module: Any) -> None:
        """Make an output head share the factors of its embedding, or separate it again."""
        form = self.target.get(name)
        target, now = form is not None and form.kind == "shared", module_role(module) == "shared"
        if form is not None and target and not now:
            factors: Any = self.now(self.modules[form.embedding or ""])
            self.put(module, SharedHead(factors, module._parameters.get("bias")))
        elif now and not target:
            embedding = self.now(module.embedding)
            same = embedding is module.embedding
            self.put(module, module.to_torch(module.embedding.dense() if same else embedding))

    def repack_layer(self, name: str, module: Any) -> None:
        """Repack an unpacked layer to torch's layer, if all its parts are dense."""
        parts = {key: self.now(part) for key, part in module.named_children()}
        if name not in self.target and (repacked := module.repacked(parts)) is not None:
            self.put(module, repacked)


def _exchanged(model: nn.Module, target: Structure, fill: Fill) -> list[_Exchange]:
    """Make all replacements for a structure, without changing the model."""
    before = dict(model.named_modules())
    exchanges = _Exchanges(dict(before), target, fill)
    unpacked = exchanges.unpack_layers()
    _require_possible(exchanges.modules, target)
    for name, module in exchanges.modules.items():
        exchanges.change_layer(name, module)
    for name, module in before.items():
        exchanges.change_head(name, module)
    for name, layer in unpacked.items():
        parts = dict(layer.named_children())
        for key, part in parts.items():
            made = exchanges.by_id.pop(id(part), None)
            own_memory(
                part, ("weight", "bias") if made is None else ("bias",)
            )  # the parts are views
            if made is not None:
                transfer_attributes(part, made.new, added_by=made.source)
                layer._modules[key] = made.new
        exchanges.put(before[name], layer)
    for name, module in before.items():
        if module_role(module) == "unpacked":
            exchanges.repack_layer(name, module)
    return list(exchanges.by_id.values())


def _require_possible(modules: Mapping[str, nn.Module], target: Structure) -> None:
    """Raise LayerError if the model cannot have the structure."""
    for name, form in target.items():
        module = modules.get(name)
        kind, role = low_rank_type(type(module)), module_role(module)
        possible = {
            "low-rank": kind is not None or role == "low-rank",
            "factored": kind is not None or role == "low-rank",
            "pivoted": (kind is not None and kind.pivots is not None) or role == "low-rank",
            "dense": module is not None,
            "unpacked": unpacked_type(type(module)) is not None or role == "unpacked",
            "shared": (isinstance(module, SharedHead.replaces) or role == "shared")
            and target.get(form.embedding or "", UNPACKED).kind == "low-rank",
        }
        if not possible[form.kind]:
            state = "has none" if module is None else f"has a {type(module).__name__}"
            layers = [n for n, f in target.items() if f.kind in _WITH_RANKS]
            raise LayerError(
                f"its layer {name!r} is {form.kind}, but the model {state} of this name. Use the "
                f"dense model of its low-rank layers: {listed(layers)}."
            )


def _empty_pivoted(layer: LowRank, rank: int | None) -> nn.Module:
    """Return a pivoted layer with undefined values, for loading: it has no rows to choose from."""
    device = layer.u.device
    return layer.to("meta").to_torch("pivoted", rank).to_empty(device=device)


def _is_of_torch(layer: nn.Module) -> bool:
    return type(layer).__module__.partition(".")[0] == "torch" or type(layer).__module__.startswith(
        __package__
    )
