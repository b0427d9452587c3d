"""Extracted models as safetensors: plain tensors, and in the header how to rebuild the model.

Nothing but names, types and ranks is needed for that: the dense model is the user's own code, and
the file says which of its layers are two, at which rank. No pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from maestro_lod.errors import CheckpointError, listed, nearest
from maestro_lod.layers import Attention, LowRankTransposedLinear, low_rank_type
from maestro_lod.layers.attention import PARTS
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.surgery import (
    Form,
    copy_on_meta,
    hand_over,
    hand_over_added,
    hand_over_hooks,
    own_memory,
    plain_form,
    replace_modules,
    switch_off_fast_paths,
)

_FORMAT, _VERSION = "maestro-lod plain", 1


@dataclass(frozen=True)
class _Config:
    """What the header says about the model."""

    layers: dict[str, str]
    """The type of every module that holds parameters, by name."""
    factored: dict[str, int]
    """The pairs of layers that are one in the dense model, and their ranks."""
    aliases: dict[str, str]
    """Tensors that are the same as another one, which alone is stored."""


def write(model: nn.Module, path: Path) -> None:
    """Write the state of a plain model, shared tensors once, and how to rebuild it."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{key} is extra state of type {type(value).__name__}, which safetensors cannot "
                "hold. Save it separately."
            )
        if id(value) in first:
            aliases[key] = first[id(value)]
        else:
            first[id(value)] = key
            tensors[key] = value.detach().clone().contiguous()  # safetensors refuses views
    config = {"layers": _types(model), "factored": _factored(model), "aliases": aliases}
    metadata = {"format": _FORMAT, "version": str(_VERSION), "config": json.dumps(config)}
    try:
        save_file(tensors, path, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path.name} ({error}).") from error


def _types(model: nn.Module) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in model.named_modules() if _has_own(m)}


def _has_own(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _factored(model: nn.Module) -> dict[str, int]:
    """Return the pairs of layers that `extract` may have made of one, with their ranks."""
    ranks = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Sequential or len(module) != 2:
            continue
        first, second = module
        kinds = low_rank_type(first), low_rank_type(second)
        if None not in kinds and getattr(first, "bias", None) is None:
            width = getattr(second, "in_features", None) or getattr(second, "in_channels", None)
            if width:
                ranks[name] = width // getattr(second, "groups", 1)
    return ranks


def read_state(path: Path) -> dict[str, Tensor]:
    """Return all tensors of an exported file, shared ones under each of their names."""
    _, state = _read(path)
    return state


def _read(path: Path) -> tuple[_Config, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file ({error}).") from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} was not written by export. Files of lod.save are read by lod.load, other ones "
            "by safetensors.torch.load_file."
        )
    try:
        if int(metadata["version"]) > _VERSION:
            raise CheckpointError(
                f"{path} has format version {metadata['version']}, this library reads up to "
                f"{_VERSION}. Update maestro-lod."
            )
        config = _Config(**json.loads(metadata["config"]))
        if not all(type(rank) is int and rank > 0 for rank in config.factored.values()):
            raise ValueError("a rank is no whole number above zero")
        state |= {alias: state[first] for alias, first in config.aliases.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of {path} is damaged ({error!r}).") from error
    return config, state


def rebuild(path: str | os.PathLike[str], *, into: nn.Module) -> nn.Module:
    """Make the dense model `into` the one of an exported safetensors file, in place; returns it.

    `into` is the dense model that was decomposed, with any weights. Its layers become two where the
    file says so, and all parameters and buffers are loaded, strictly. If anything does not fit, the
    model is left as it was.
    """
    path = Path(path)
    config, state = _read(path)
    if low_rank_layers(into):
        raise CheckpointError(
            f"{type(into).__name__} is decomposed. Rebuild {path} into the dense model."
        )
    if any(t.is_meta for t in (*into.parameters(), *into.buffers())):
        raise CheckpointError(
            f"{path} cannot be loaded into a model on the meta device, which has no memory. Call "
            "model.to_empty(device=…) first."
        )
    # a rehearsal on a copy without memory: all checks, and nothing half-changed
    rehearsal = _restructured(copy_on_meta(into), config, path)
    _require_fit(rehearsal, config, state, path)
    model = _restructured(into, config, path)
    model.load_state_dict(state)
    for alias, first in config.aliases.items():
        _tie(model, alias, first)
    return model


def _restructured(model: nn.Module, config: _Config, path: Path) -> nn.Module:
    """Give a dense model the layers of the file, in place, contents undefined."""
    opened: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        parts = {f"{name}.{part}".lstrip(".") for part in PARTS}
        if type(module) is nn.MultiheadAttention and parts & config.factored.keys():
            opened[id(module)] = attention = Attention(module)
            own_memory(attention, {})
            hand_over(module, attention)
    model = replace_modules(model, opened)

    low_rank: dict[int, nn.Module] = {}
    plain: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        kind, here = low_rank_type(module), type(module).__name__
        there = config.layers.get(name, "missing")
        form: Form = "dense"
        if kind is not None and name in config.factored:
            form, rank = "factored", config.factored[name]
        elif kind is LowRankTransposedLinear and there == "Linear":
            rank = 1  # of no consequence
        elif _has_own(module) and there != here:
            raise CheckpointError(
                f"{path} is of another model: {name or 'the model itself'} is a {here} here and "
                f"{there if there == 'missing' else f'a {there}'} there."
            )
        else:
            continue
        low_rank[id(module)] = layer = kind.like(module, rank)
        hand_over(module, layer)
        plain[id(layer)] = plain_form(layer, rank, form)
        hand_over_added(layer, plain[id(layer)])
        hand_over_hooks(module, plain[id(layer)])
    model = replace_modules(model, low_rank)
    switch_off_fast_paths(model)  # which looks for low-rank layers
    model = replace_modules(model, plain)
    if unknown := [name for name in config.layers if name not in dict(model.named_modules())]:
        raise CheckpointError(
            f"{path} is of another model: it has {listed(unknown)}, which "
            f"{type(model).__name__} has not.{nearest(unknown[0], dict(model.named_modules()))}"
        )
    return model


def _require_fit(
    model: nn.Module, config: _Config, state: Mapping[str, Tensor], path: Path
) -> None:
    """Refuse a file with other tensors, shapes, types or ties than a model on the meta device."""
    own = model.state_dict(keep_vars=True)
    for key, value in own.items():
        if key in state and isinstance(value, Tensor) and state[key].dtype != value.dtype:
            raise CheckpointError(
                f"{path} holds {key} as {state[key].dtype}, the model as {value.dtype}. Convert "
                f"the model first: model.to({state[key].dtype})."
            )
    try:
        model.load_state_dict({key: value.to("meta") for key, value in state.items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path} is of another model. {error}") from None
    first: dict[int, str] = {}
    for key, value in own.items():
        other = first.setdefault(id(value), key)
        if config.aliases.get(key, key) != config.aliases.get(other, other):
            raise CheckpointError(
                f"{path} is of another model: {other} and {key} are tied here and not there."
            )


def _tie(model: nn.Module, alias: str, first: str) -> None:
    """Let one parameter or buffer be another."""
    owner, _, name = first.rpartition(".")
    tensor: Any = getattr(model.get_submodule(owner), name)
    owner, _, name = alias.rpartition(".")
    setattr(model.get_submodule(owner), name, tensor)
