"""One file, every size: safetensors with the factors in rank order, no pickle.

Both factors are stored rank-major, (rank, …), so the first ranks of a layer are the first bytes of
its tensors, and a smaller model is read without touching the rest. The header says which layers
are low-rank; tensors that share memory are stored once.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from maestro_lod.deploy.points import Frontier
from maestro_lod.errors import CheckpointError, OptionError, listed, nearest
from maestro_lod.files import blaming, replacing
from maestro_lod.layers import (
    OPENED_TYPE,
    Attention,
    LowRank,
    LowRankConvTranspose,
    Recurrent,
    SharedHead,
    low_rank_type,
)
from maestro_lod.layers.ranks import Ranks, low_rank_layers, require_low_rank, resolve, unwrapped
from maestro_lod.surgery import (
    copy_on_meta,
    hand_over,
    own_memory,
    replace_modules,
    switch_off_fast_paths,
)

_FORMAT, _VERSION = "maestro-lod", 1
_STATE_FORMAT = "maestro-lod training state 1"


def save(
    model: nn.Module, path: str | os.PathLike[str], *, frontier: Frontier | None = None
) -> None:
    """Write a low-rank model to one safetensors file that holds every size; atomic.

    With its frontier in the file, `load` can choose a size by what it may cost.
    """
    model = unwrapped(model)
    layers = require_low_rank(model)
    rank_major = {f"{name}.u".lstrip(".") for name in layers}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{key} is extra state of type {type(value).__name__}, which safetensors cannot "
                "hold. Save it separately."
            )
        if value.is_meta:
            raise CheckpointError(f"{key} is on the meta device: there is nothing to save.")
        if value.dtype not in _DTYPE.values():
            raise CheckpointError(f"{key} is of {value.dtype}, which the file cannot hold.")
        where = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and where in first:
            aliases[key] = first[where]
            continue
        first[where] = key
        stored = (value.transpose(0, 1) if key in rank_major else value).contiguous()
        memory = stored.untyped_storage().data_ptr()
        tensors[key] = stored.clone() if memory in storages else stored  # safetensors refuses views
        storages.add(memory)
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "ranks": json.dumps({name: layer.rank for name, layer in layers.items()}),
        "opened": json.dumps(_names_of_opened(model)),
        "heads": json.dumps(_names_of_heads(model)),
        "aliases": json.dumps(aliases),
        "dense_only": json.dumps(_names_of_dense_only(model)),
    }
    if frontier is not None:
        metadata["frontier"] = frontier.to_json()
    _write(tensors, metadata, Path(path))


def _write(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    with replacing(path) as place, blaming(path):
        try:
            save_file(tensors, place, metadata=metadata)
        except (SafetensorError, KeyError) as error:  # KeyError: a dtype that it cannot hold
            raise CheckpointError(f"cannot write {path} ({error}).") from error


def save_state(state: Any, path: str | os.PathLike[str]) -> None:
    """Write nested mappings, lists, numbers, text and tensors to one safetensors file; atomic.

    The tensors are stored as such, everything else as JSON in the header: no pickle.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            name, order = str(len(tensors)), _order_in_memory(value)
            packed = value.detach().permute(order)
            tensors[name] = packed.clone(memory_format=torch.contiguous_format)
            return {"tensor": name, "order": order}
        if isinstance(value, Mapping):  # as pairs: JSON has no keys but text
            return {"mapping": [[scalar(key), plain(part)] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        return scalar(value)

    def scalar(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        kind = f"{value.layout} tensor" if isinstance(value, Tensor) else type(value).__name__
        shown = " ".join(str(value).split())[:80]
        raise CheckpointError(f"a {kind} cannot be saved without pickle: {shown}")

    metadata = {"format": _STATE_FORMAT, "state": json.dumps(plain(state))}
    _write(tensors, metadata, Path(path))


def _order_in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost.

    It is stored because fused optimizers step through their state in memory order, so that the
    state of a channels-last weight has to come back channels-last.
    """
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def load_state(path: str | os.PathLike[str]) -> Any:
    """Read what `save_state` wrote; tuples come back as lists."""
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _STATE_FORMAT:
                raise CheckpointError(f"{path} was not written by save_state.")

            def read(value: Any) -> Any:
                if isinstance(value, list):
                    return [read(part) for part in value]
                if not isinstance(value, dict):
                    return value
                if "tensor" in value:
                    order = value["order"]
                    place = sorted(range(len(order)), key=order.__getitem__)  # its inverse
                    return file.get_tensor(value["tensor"]).permute(place)
                return {key: read(part) for key, part in value["mapping"]}

            return read(json.loads(metadata["state"]))
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file ({error}).") from error


def load(
    path: str | os.PathLike[str],
    *,
    into: nn.Module,
    ranks: Ranks | None = None,
    **limits: float,
) -> nn.Module:
    """Load a file into a model, in place, reading only the ranks asked for; returns the model.

    `into` is the model that was saved, decomposed or still dense: layers become low-rank or dense
    as the file says. Layers that `ranks` does not name get all ranks of the file. Instead of ranks,
    limits as for `Frontier.pick` (`max_params=0.2`, `max_macs=…`, …) take the best size within
    them, if the file was saved with a frontier. If anything does not fit, the model is left as it
    was.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            if limits:
                ranks = _ranks_within(file, path, ranks, limits)
            loaded = _load(file, path, unwrapped(into), ranks)
            return into if loaded is unwrapped(into) else loaded
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file ({error}).") from error


def _ranks_within(
    file: Any, path: Path, ranks: Ranks | None, limits: dict[str, float]
) -> dict[str, int]:
    """Return the ranks of the best size within limits, by the frontier in the file."""
    known = inspect.signature(Frontier.pick).parameters
    for limit in limits:
        if limit not in known:
            raise OptionError(f"load has no option {limit!r}.{nearest(limit, known)}")
    if ranks is not None:
        raise OptionError(f"give ranks= or limits ({listed(limits)}), not both.")
    text = (file.metadata() or {}).get("frontier")
    if text is None:
        raise CheckpointError(
            f"{path} holds no frontier to choose a size from. Give ranks=, or save it with one: "
            "save(model, path, frontier=frontier(model, …))."
        )
    return Frontier.from_json(text, path).pick(**limits)


def _load(file: Any, path: Path, into: nn.Module, ranks: Ranks | None) -> nn.Module:
    try:
        structure, aliases = _header(file, path)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of {path} is damaged ({error}).") from error
    if any(t.is_meta for t in (*into.parameters(), *into.buffers())):
        raise CheckpointError(
            f"{path} cannot be loaded into a model on the meta device, which has no memory. Call "
            "model.to_empty(device=…) first."
        )
    # a rehearsal on a copy without memory: torch's own checks, and nothing half-loaded
    rehearsal = _restructured(copy_on_meta(into), structure, path)
    stored = structure.ranks
    full = {name: (stored[name], m.full_rank) for name, m in low_rank_layers(rehearsal).items()}
    chosen = stored | (resolve(ranks, full) if ranks is not None else {})
    state: dict[str, Tensor] = {}
    rows = {f"{n}.{f}".lstrip("."): chosen[n] for n in chosen for f in "uv"}
    for key, value in _read(path, rows, file.metadata()):
        is_u = key.rpartition(".")[0] in chosen and key.rpartition(".")[2] == "u"
        state[key] = value.transpose(0, 1) if is_u else value
    state |= {alias: state[key] for alias, key in aliases.items()}
    try:
        rehearsal.load_state_dict({key: value.to("meta") for key, value in state.items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path} is of another model. {error}") from None
    model = _restructured(into, structure, path)
    model.load_state_dict(state)
    return model


def _read(
    path: Path, rows: Mapping[str, int], metadata: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Read all tensors of a safetensors file, some of them only up to so many rows.

    By plain reads of exactly those bytes: a memory map would bring in whole pages and more.
    `metadata` is what the file is known to say.
    """
    with path.open("rb", buffering=0) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        if header["__metadata__"] != metadata:
            raise CheckpointError(f"{path} was replaced while it was read. Load it again.")
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPE:
                raise CheckpointError(f"{key} in {path} is of an unknown type, {entry['dtype']}.")
            dtype, shape = _DTYPE[entry["dtype"]], list(entry["shape"])
            if key in rows:
                shape[0] = min(shape[0], rows[key])
            raw = bytearray(math.prod(shape) * dtype.itemsize)
            file.seek(8 + length + entry["data_offsets"][0])
            if not _filled(raw, file):
                raise OSError(f"the file ends within {key}")
            yield (
                key,
                torch.frombuffer(raw, dtype=dtype).view(shape)
                if raw
                else torch.empty(shape, dtype=dtype),
            )


def _filled(raw: bytearray, file: Any) -> bool:
    """Read until the buffer is full, which takes several reads beyond 2 GiB; False if it ends."""
    left = memoryview(raw)
    while left and (count := file.readinto(left)):
        left = left[count:]
    return not left


_DTYPE = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""What safetensors calls torch's dtypes."""


@dataclass(frozen=True)
class _Structure:
    """Which modules of the saved model are not what they were in the dense one."""

    ranks: dict[str, int]
    opened: list[str]
    heads: dict[str, str]
    dense_only: list[str]


def _names_of_dense_only(model: nn.Module) -> list[str]:
    """Return the layers that only their dense form can replace, because of how they are called."""
    layers = low_rank_layers(model).items()
    return [n for n, m in layers if isinstance(m, LowRankConvTranspose) and not m.has_factored_form]


def _names_of_opened(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, Attention | Recurrent)]


def _names_of_heads(model: nn.Module) -> dict[str, str]:
    """Return the heads that share an embedding's factors: name of one -> of the other."""
    modules = dict(model.named_modules())
    name_of = {id(module): name for name, module in modules.items()}
    heads = {n: m for n, m in modules.items() if isinstance(m, SharedHead)}
    if outside := [n for n, head in heads.items() if id(head.embedding) not in name_of]:
        raise CheckpointError(
            f"{listed(outside)} shares the factors of an embedding that is not part of this "
            f"{type(model).__name__}. Save the model that holds both."
        )
    return {name: name_of[id(head.embedding)] for name, head in heads.items()}


def _header(file: Any, path: Path) -> tuple[_Structure, dict[str, str]]:
    metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} was not written by maestro_lod.save. Read a plain file of tensors with "
            "safetensors.torch.load_file and load_state_dict."
        )
    if int(metadata["version"]) > _VERSION:
        raise CheckpointError(
            f"{path} has format version {metadata['version']}, this library reads up to "
            f"{_VERSION}. Update maestro-lod."
        )
    ranks, opened, heads, aliases = (
        json.loads(metadata[key]) for key in ("ranks", "opened", "heads", "aliases")
    )
    shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    if not (
        all(type(rank) is int and rank >= 0 for rank in ranks.values())
        and all(first in shapes for first in aliases.values())
        and all(embedding in ranks for embedding in heads.values())
        and all(len(shapes.get(f"{n}.{f}".lstrip("."), (0, 0))) > 1 for n in ranks for f in "uv")
    ):
        raise ValueError("ranks, heads, aliases and factors do not belong together")
    dense_only = json.loads(metadata.get("dense_only", "[]"))
    return _Structure(ranks, list(opened), dict(heads), list(dense_only)), aliases


def _restructured(model: nn.Module, wanted: _Structure, path: Path) -> nn.Module:
    """Give a model the structure of the file, in place; what changes has undefined contents.

    In three steps, each on what the one before left: layers with several weights are opened, layers
    become low-rank or dense, and what has no low-rank part left is closed.
    """
    new: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if name in wanted.opened and type(module) in OPENED_TYPE:
            new[id(module)] = OPENED_TYPE[type(module)](module)
            own_memory(new[id(module)], {})
            hand_over(module, new[id(module)])
    model = replace_modules(model, new)

    modules, new = dict(model.named_modules()), {}
    for name in wanted.ranks:
        module = modules.get(name)
        kind = None if module is None else low_rank_type(module)
        if module is not None and kind is not None:
            new[id(module)] = kind.like(module, 0)
            hand_over(module, new[id(module)])
        elif not isinstance(module, LowRank):
            what = "is missing" if module is None else f"is a {type(module).__name__}"
            raise CheckpointError(
                f"{path} is of another model: it has a low-rank layer {name!r}, which {what} here. "
                f"Layers of the file: {listed(wanted.ranks)}."
            )
    for name, module in modules.items():
        if isinstance(module, LowRank) and name not in wanted.ranks:
            new[id(module)] = module.dense()
            hand_over(module, new[id(module)])
    for name, module in modules.items():
        if isinstance(module, SharedHead) and name not in wanted.heads:
            new[id(module)] = module.plain(new.get(id(module.embedding), module.embedding.dense()))
            hand_over(module, new[id(module)])
        elif name in wanted.heads and not isinstance(module, SharedHead):
            embedding: Any = modules[wanted.heads[name]]
            bias = module._parameters.get("bias")
            new[id(module)] = SharedHead(new.get(id(embedding), embedding), bias)
            hand_over(module, new[id(module)])
    model = replace_modules(model, new)
    for name, layer in low_rank_layers(model).items():
        if isinstance(layer, LowRankConvTranspose) and name in wanted.dense_only:
            layer.called_with_output_size = True

    new = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention | Recurrent) and name not in wanted.opened:
            closed = module.closed(dict(module.named_children()))
            if closed is not None:
                hand_over(module, closed)
                new[id(module)] = closed
    model = replace_modules(model, new)
    switch_off_fast_paths(model)
    return model
