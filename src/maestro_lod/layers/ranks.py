"""Mappings from layer names to ranks: read, resolve and apply them."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from maestro_lod.errors import LayerError, RankError, listed, suggest
from maestro_lod.layers.active import activate_block
from maestro_lod.layers.lowrank import LowRank

Ranks = int | float | Mapping[str, int | float]
"""Ranks in the user's form: one value for all layers, or values by layer name or glob pattern.

An int is a rank, a float in (0, 1) a share of the full rank.
"""

Model = TypeVar("Model", bound=nn.Module)
"""The class of a model, which functions that return the model preserve."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without wrappers of torch.compile and DDP, which would change all names."""
    if not isinstance(model, nn.Module):
        raise LayerError(f"a model is an nn.Module, not a {type(model).__name__}.")
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
            continue
        # in the dict, since a __getattr__ of the model may look into what it wraps
        children = model._modules  # a scripted model has another type without get()
        inner = children["_orig_mod"] if "_orig_mod" in children else None  # noqa: SIM401
        if inner is None:
            return model
        model = inner


def low_rank_layers(model: nn.Module) -> dict[str, LowRank]:
    """Return the low-rank layers of a model by dotted name, each once."""
    return {name: m for name, m in unwrapped(model).named_modules() if isinstance(m, LowRank)}


def ranks(model: nn.Module) -> dict[str, int]:
    """Return the stored rank of every low-rank layer.

    Args:
        model: A decomposed model; wrappers of `torch.compile` and DDP are looked through.

    Returns:
        The rank of each low-rank layer by its dotted name; empty if there is none.

    Example:
        >>> lod.ranks(lod.decompose(nn.Sequential(nn.Linear(64, 32))))
        {'0': 32}
    """
    return {name: layer.rank for name, layer in low_rank_layers(model).items()}


def require_low_rank(model: nn.Module) -> dict[str, LowRank]:
    """Return the low-rank layers; raise LayerError if the model has none."""
    layers = low_rank_layers(model)
    if not layers:
        raise LayerError(
            f"{type(model).__name__} has no low-rank layer. Call decompose(model) first."
        )
    return layers


def require_all_active(model: nn.Module, operation: str) -> None:
    """Raise RankError if a layer runs at fewer ranks than it stores, for operations on all."""
    fewer = [n for n, m in low_rank_layers(model).items() if m.active_rank < m.rank]
    if fewer:
        raise RankError(
            f"{operation} uses the stored ranks, but {listed(fewer)} run at fewer. Leave at_ranks, "
            "or call set_ranks(model, None), first."
        )


def matches(name: str, pattern: str) -> bool:
    """Return whether a glob pattern names this layer or a module that contains it."""
    parts = name.split(".")
    prefixes = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    return pattern in prefixes or any(fnmatchcase(prefix, pattern) for prefix in prefixes)


def resolve(ranks: Ranks, layers: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Resolve ranks to a rank per layer; `layers` maps name -> (limit, full rank).

    Layers without an entry in a mapping are left out. Ranks for all layers are cut to the limit of
    each layer; a rank for one layer by name must be within its limit.
    """
    if not isinstance(ranks, Mapping):
        return {
            name: min(_one_rank(ranks, f"every layer ({name})", full, None), limit)
            for name, (limit, full) in layers.items()
        }
    chosen: dict[str, int] = {}
    for key, value in ranks.items():
        if not isinstance(key, str):
            raise LayerError(
                f"ranks has the key {key!r}, which is not text. Layers: {listed(layers)}."
            )
        named = [key] if key in layers else [name for name in layers if matches(name, key)]
        if not named:
            raise LayerError(
                f"ranks names {key!r}, which is not a low-rank layer.{suggest(key, layers)} "
                f"Layers: {listed(layers)}."
            )
        for name in named:
            limit, full = layers[name]
            rank = _one_rank(value, name, full, limit if key == name else None)
            if key == name or name not in ranks:  # an exact name wins over a pattern
                chosen[name] = min(rank, limit)
    return chosen


def _limits(layers: Mapping[str, LowRank]) -> dict[str, tuple[int, int]]:
    return {name: (layer.rank, layer.full_rank) for name, layer in layers.items()}


def _one_rank(value: object, name: str, full: int, limit: int | None) -> int:
    """Check one rank or ratio; `limit` is the largest allowed rank, None if larger ones are cut."""
    item = f"rank {value!r} for {name or 'the model itself'}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RankError(f"{item} is neither a whole number nor a ratio in (0, 1).")
    if isinstance(value, numbers.Integral):
        rank = int(value)
        if rank < 0:
            raise RankError(f"{item} is negative. Give 0 to {full if limit is None else limit}.")
        if limit is not None and rank > limit:
            raise RankError(
                f"{item} is larger than the rank of the layer: {limit} (full rank {full})."
            )
        return rank
    if not 0.0 < float(value) < 1.0:
        raise RankError(f"{item}: a float is a share of the full rank and lies in (0, 1).")
    return max(1, round(float(value) * full))


def resolve_for(model: nn.Module, ranks: Ranks | None) -> dict[str, int]:
    """Resolve ranks against a low-rank model; layers that are not named keep their stored rank."""
    layers = require_low_rank(model)
    chosen = {name: layer.rank for name, layer in layers.items()}
    if ranks is not None:
        chosen |= resolve(ranks, _limits(layers))
    return chosen


def match_ranks(model: nn.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Resize the low-rank layers to the ranks that they have in a state, in place.

    The contents of resized factors are undefined until the state is loaded. `load_state_dict`
    resizes too, but warns where it removes ranks; call this first to remove them without a
    warning.

    Args:
        model: A decomposed model.
        state: A `state_dict` of the same model at any ranks.
        prefix: The prefix of the names in `state`.

    Example:
        >>> model = lod.decompose(nn.Sequential(nn.Linear(64, 32)))
        >>> lod.match_ranks(model, {"0.u": torch.zeros(32, 8), "0.v": torch.zeros(8, 64)})
        >>> lod.ranks(model)
        {'0': 8}
    """
    for name, layer in low_rank_layers(model).items():
        rank = layer.rank_in(state, prefix + (f"{name}." if name else ""))
        if rank is not None and rank != layer.rank:
            layer.resize(rank)


@contextmanager
def at_ranks(model: Model, ranks: Ranks) -> Iterator[Model]:
    """Run the submodel at these ranks inside the `with` block, without a copy.

    The block must cover the backward too: activation checkpointing runs the forward again. The
    ranks belong to the running context: other threads and asyncio tasks keep their own, and a
    thread that is started inside the block begins outside of it. `torch.compile` keeps one size
    at a time: two such blocks in two threads raise an error.

    Args:
        model: A decomposed model.
        ranks: Ranks as for `decompose`; a share is one of the full rank, whatever is stored. Layers
            that are not named are unchanged.

    Yields:
        The model.

    Raises:
        RankError: If a layer cannot have the rank.
        LayerError: If the model has no low-rank layer, or a name matches none.

    Example:
        >>> model = lod.decompose(nn.Sequential(nn.Linear(64, 32)))
        >>> with lod.at_ranks(model, 0.25):
        ...     output = model(torch.randn(2, 64))
    """
    layers = require_low_rank(model)
    chosen = resolve(ranks, _limits(layers))
    with activated({layers[name]: rank for name, rank in chosen.items()}):
        yield model


def set_ranks(model: nn.Module, ranks: Ranks | None) -> None:
    """Run the submodel at these ranks from now on, in place and without a copy.

    Nothing is computed or moved, so a server can change its size between two requests. This is a
    property of the model: it holds in all threads, but not inside of `at_ranks`, and copies and
    pickles keep it.

    Args:
        model: A decomposed model.
        ranks: Ranks as for `decompose`; layers that are not named use all their ranks. None: all
            ranks.

    Raises:
        RankError: If a layer cannot have the rank.
        LayerError: If the model has no low-rank layer, or a name matches none.

    Example:
        >>> model = lod.decompose(nn.Sequential(nn.Linear(64, 32)))
        >>> lod.set_ranks(model, 0.25)
    """
    layers = require_low_rank(model)
    chosen = {} if ranks is None else resolve(ranks, _limits(layers))
    for name, layer in layers.items():
        layer.activate(chosen.get(name))


@contextmanager
def activated(active: Mapping[LowRank, int]) -> Iterator[None]:
    """Run layers at these ranks inside the `with` block, in the running context only."""
    for layer, rank in active.items():
        layer.require_active(rank)
    block = dict(active)
    with ExitStack() as leaving, activate_block(block):
        for layer in block:
            layer.enter(block)
            leaving.callback(layer.leave, block)
        yield
