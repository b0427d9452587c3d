"""Models in safetensors files without pickle: one file with every size, or with one.

`save` stores both factors rank-major, (rank, …), so the first ranks of a layer are the first bytes
of its tensors, and a smaller model is read without the rest. `save_plain` stores an extracted
model. The header lists the layers that differ from the dense model; tensors that share memory are
stored once. `load` reads both.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.errors import CheckpointError, LayerError, OptionError, listed, suggest
from maestro_lod.files.json_files import parse_json
from maestro_lod.files.shard_files import fill_shards, write_by_the_first
from maestro_lod.files.tensor_file import (
    TensorFile,
    distinct,
    in_written_order,
    opened_file,
    write_tensors,
)
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import (
    Model,
    Ranks,
    low_rank_layers,
    match_ranks,
    require_low_rank,
    resolve,
    unwrapped,
)
from maestro_lod.model.checkpoint_header import (
    PLAIN,
    CheckpointHeader,
    elastic_metadata,
    plain_metadata,
    read_header,
    with_parameters,
)
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.limits import LIMITS
from maestro_lod.model.replace import copy_on_meta
from maestro_lod.model.structure import (
    restructure,
    uninitialized,
)


def save(
    model: nn.Module, path: str | os.PathLike[str], *, frontier: Frontier | None = None
) -> None:
    """Write a low-rank model to one safetensors file that holds every size; atomic.

    All processes of a sharded model must call this; the first one writes.

    Args:
        model: A decomposed model.
        path: The file to write.
        frontier: The model's frontier: with it in the file, `load` can choose a size by its cost.

    Raises:
        CheckpointError: If the ranks of a layer are not ordered yet.
        LayerError: If there is no low-rank layer.

    Example:
        >>> model = lod.decompose(nn.Sequential(nn.Linear(64, 32)))
        >>> lod.save(model, "model.safetensors")
    """
    model = unwrapped(model)
    layers = require_ordered(model)
    tensors, aliases = distinct(model.state_dict())
    for name in layers:
        if (key := f"{name}.u".lstrip(".")) in tensors:
            tensors[key] = tensors[key].transpose(0, 1)
    metadata = elastic_metadata(model, aliases)
    if frontier is not None:
        metadata["frontier"] = frontier.to_json()
    write = functools.partial(write_tensors, tensors, metadata, Path(path))
    if (group := shard_group(model)) is None:
        write()
    else:
        write_by_the_first(tensors, in_written_order(tensors), write, Path(path), group)


def require_ordered(model: nn.Module) -> dict[str, LowRank]:
    """Return the low-rank layers of a model, or refuse a model whose ranks have no order yet."""
    layers = require_low_rank(model)
    if unordered := [name for name, layer in layers.items() if layer.identity_factor is not None]:
        raise CheckpointError(
            f"{listed(unordered)} are still trained as dense weights: their ranks have no order "
            "yet, which a file of every size needs. Continue the training until the ranks are "
            "ordered. To resume later, save model.state_dict() and the state_dict() of the "
            "training."
        )
    return layers


def save_plain(model: nn.Module, path: Path) -> None:
    """Write an extracted model: its tensors, and the list of its factored layers; atomic."""
    tensors, aliases = distinct(model.state_dict())
    write_tensors(tensors, plain_metadata(model, aliases), path)


def plain_state(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a plain file, shared ones under each of their names."""
    with opened_file(path) as file:
        config = parse_json(file.metadata["config"], {"aliases": {str: str}})
        state = {key: file.read(key) for key in file.shapes}
    return state | {alias: state[first] for alias, first in config["aliases"].items()}


def verify(path: str | os.PathLike[str]) -> bool:
    """Read a whole file and compare it with the digests in its header.

    Args:
        path: A file that `save` or `export` wrote.

    Returns:
        True if every byte is as written; False if the file is complete but has no digests, as
        files of early versions.

    Raises:
        CheckpointError: If the file is damaged.

    Example:
        >>> lod.save(lod.decompose(nn.Sequential(nn.Linear(64, 32))), "model.safetensors")
        >>> lod.verify("model.safetensors")
        True
    """
    with opened_file(Path(path)) as file:
        for key in file.shapes:
            file.read(key)
        return file.proven


def load(
    path: str | os.PathLike[str],
    *,
    into: Model,
    ranks: Ranks | None = None,
    verify: bool = True,
    **limits: float,
) -> Model:
    """Load a file into a model, in place, reading only the ranks that are needed.

    If anything does not fit, the model is left unchanged.

    Args:
        path: A file that `save` or `export` wrote.
        into: The model that was saved, decomposed or still dense: its layers become low-rank,
            dense, factored or pivoted as in the file.
        ranks: Ranks as for `decompose`, of a file with every size; layers that are not named get
            all.
        verify: Whether to compare what is read with its digests.
        **limits: Limits as for `Frontier.pick` (`max_params=0.2`, `max_macs=…`) instead of ranks:
            the best size within them, if the file was saved with a frontier.

    Returns:
        The model; for a bare layer, its replacement.

    Raises:
        CheckpointError: If the file is damaged, or holds another model.
        OptionError: If both ranks and limits are given, or no size is within the limits.

    Example:
        >>> lod.save(lod.decompose(nn.Sequential(nn.Linear(64, 32))), "model.safetensors")
        >>> small = lod.load("model.safetensors", into=nn.Sequential(nn.Linear(64, 32)), ranks=8)
    """
    path = Path(path)
    with opened_file(path, verify=verify) as file:
        if file.metadata.get("format") == PLAIN and (ranks is not None or limits):
            raise OptionError(f"{path} holds one size. Call load without ranks and limits.")
        if limits:
            ranks = _ranks_within(file.metadata, path, ranks, limits)
        header = read_header(file, path, unwrapped(into))
        loaded = _load(header, file, path, unwrapped(into), ranks)
        return into if loaded is unwrapped(into) else cast("Model", loaded)


def _ranks_within(
    metadata: Mapping[str, str], path: Path, ranks: Ranks | None, limits: dict[str, float]
) -> dict[str, int]:
    """Return the ranks of the best size within limits, by the frontier in the file."""
    for limit in limits:
        if limit not in LIMITS:
            raise OptionError(f"load has no option {limit!r}.{suggest(limit, LIMITS)}")
    if ranks is not None:
        raise OptionError(f"load got ranks= and limits ({listed(limits)}). Give one of them.")
    text = metadata.get("frontier")
    if text is None:
        raise CheckpointError(
            f"{path} has no frontier for choosing a size. Give ranks=, or save it with one: "
            "save(model, path, frontier=frontier(model, …))."
        )
    return Frontier.from_json(text, path).pick(**limits)


def _load(
    header: CheckpointHeader, file: TensorFile, path: Path, into: nn.Module, ranks: Ranks | None
) -> nn.Module:
    if any(t.is_meta for t in (*into.parameters(), *into.buffers())):
        raise CheckpointError(
            f"{path} cannot be loaded into a model on the meta device, which has no values. Call "
            "model.to_empty(device=…) first."
        )
    if shard_group(into) is not None:
        _load_shards(header, file, path, into, ranks)
        return into
    # a rehearsal on a meta copy runs torch's checks before the model is changed
    rehearsal = copy_on_meta(into)
    try:
        rehearsal = restructure(rehearsal, header.structure, fill=uninitialized)
    except LayerError as error:
        raise CheckpointError(f"{path} is of another model: {error}") from None
    stored = header.ranks
    full = {name: (stored[name], m.full_rank) for name, m in low_rank_layers(rehearsal).items()}
    chosen = stored | (resolve(ranks, full) if ranks is not None else {})
    state = _state(header, file, chosen)
    _require_fit(rehearsal, header, state, path)
    model = restructure(into, header.structure, fill=uninitialized)
    match_ranks(model, state)
    model.load_state_dict(_with_versions(state, model))
    for name, layer in low_rank_layers(model).items():
        layer.dense_only |= name in header.dense_only
    if header.types is not None:
        for alias, first in header.aliases.items():
            _tie(model, alias, first)
    return model


def _load_shards(
    header: CheckpointHeader, file: TensorFile, path: Path, into: nn.Module, ranks: Ranks | None
) -> None:
    """Load into a model that is sharded over processes, which all call this."""
    stored, layers = header.ranks, low_rank_layers(into)
    full = {name: (rank, layers[name].full_rank) for name, rank in stored.items() if name in layers}
    chosen = stored | (resolve(ranks, full) if ranks is not None else {})
    aliases = header.aliases
    factors = {f"{n}.{f}".lstrip("."): (chosen[n], f) for n in chosen for f in "uv"}

    def read(key: str, rows: range | None) -> Tensor:
        key = aliases.get(key, key)
        rank, factor = factors.get(key, (None, ""))
        value = file.read(key, rank if rows is None else rows)
        return value.transpose(0, 1) if factor == "u" else value

    shapes = {key: [*shape] for key, shape in file.shapes.items()}
    for key, (rank, factor) in factors.items():
        if key in shapes:
            shapes[key][0] = rank
            if factor == "u":
                shapes[key][:2] = reversed(shapes[key][:2])
    shapes |= {alias: shapes[key] for alias, key in aliases.items()}
    fill_shards(into, chosen, shapes, read, path)


def _state(
    header: CheckpointHeader, file: TensorFile, ranks: Mapping[str, int]
) -> dict[str, Tensor]:
    """Read the tensors of a file; of low-rank layers only these ranks."""
    rows = {f"{n}.{f}".lstrip("."): ranks[n] for n in ranks for f in "uv"}
    state = {}
    for key in file.shapes:
        value = file.read(key, rows.get(key))
        is_u = key in rows and key.rpartition(".")[2] == "u"
        state[key] = value.transpose(0, 1) if is_u else value
    return state | {alias: state[key] for alias, key in header.aliases.items()}


def _with_versions(state: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Add the versions of the modules' states, which some modules check when they load."""
    versioned = OrderedDict(state)
    versioned._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    return versioned


def _require_fit(
    rehearsal: nn.Module, header: CheckpointHeader, state: Mapping[str, Tensor], path: Path
) -> None:
    """Raise CheckpointError if tensors, shapes, types or ties differ from those of the model."""
    if header.types is not None:
        _require_same_types(rehearsal, header, state, path)
    _require_precision(rehearsal, state, path)
    try:
        empty = {key: value.to("meta") for key, value in state.items()}
        match_ranks(rehearsal, empty)
        rehearsal.load_state_dict(_with_versions(empty, rehearsal))
    except RuntimeError as error:
        raise CheckpointError(f"{path} is of another model. {error}") from None


def _require_precision(rehearsal: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError if the model's dtypes would round the stored numbers."""
    for key, value in rehearsal.state_dict().items():
        stored = state[key].dtype if key in state and isinstance(value, Tensor) else None
        if stored is not None and torch.promote_types(stored, value.dtype) != value.dtype:
            raise CheckpointError(
                f"{path} holds {key} as {stored}, which the model's {value.dtype} would round. "
                f"Load it into a model of {stored}, then convert the model: model.to(…)."
            )


def _require_same_types(
    rehearsal: nn.Module, header: CheckpointHeader, state: Mapping[str, Tensor], path: Path
) -> None:
    assert header.types is not None
    types = {name: type(module).__name__ for name, module in with_parameters(rehearsal)}
    if unknown := [name for name in header.types if name not in types]:
        raise CheckpointError(
            f"{path} is of another model: {type(rehearsal).__name__} does not have its "
            f"{listed(unknown)}.{suggest(unknown[0], types)} Load it into the model that was saved."
        )
    for name, kind in types.items():
        stored = header.types.get(name, "missing")
        if stored != kind:
            raise CheckpointError(
                f"{path} is of another model: {name or 'the model itself'} is a {kind} in the "
                f"model and {stored if stored == 'missing' else f'a {stored}'} in the file. Load "
                "it into the model that was saved."
            )
    first = dict[int, str]()
    for key, value in rehearsal.state_dict(keep_vars=True).items():
        if key in state and isinstance(value, Tensor) and state[key].dtype != value.dtype:
            raise CheckpointError(
                f"{path} holds {key} as {state[key].dtype}, the model as {value.dtype}. Convert "
                f"the model first: model.to({state[key].dtype})."
            )
        other = first.setdefault(id(value), key)
        if header.aliases.get(key, key) != header.aliases.get(other, other):
            raise CheckpointError(
                f"{path} is of another model: {other} and {key} are tied in the model, but not in "
                "the file. Load it into the model that was saved."
            )


def _tie(model: nn.Module, alias: str, first: str) -> None:
    """Replace one parameter or buffer with another."""
    owner, _, name = first.rpartition(".")
    tensor: Any = getattr(model.get_submodule(owner), name)
    owner, _, name = alias.rpartition(".")
    setattr(model.get_submodule(owner), name, tensor)
