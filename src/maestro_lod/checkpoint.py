"""One file, every size: safetensors with the factors in rank order, no pickle.

Both factors are stored rank-major, (rank, …), so the first ranks of a layer are the first bytes of
its tensors, and a smaller model is read without touching the rest. The header says which layers
are low-rank; tensors that share memory are stored once.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from maestro_lod.errors import CheckpointError, listed
from maestro_lod.layers import LOW_RANK_TYPE, LowRank
from maestro_lod.layers.ranks import Ranks, low_rank_layers, require_low_rank, resolve
from maestro_lod.surgery import copy_on_meta, hand_over, replace_modules

_FORMAT, _VERSION = "maestro-lod", 1


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a low-rank model to one safetensors file that holds every size; atomic."""
    layers = require_low_rank(model)
    rank_major = {f"{name}.u".lstrip(".") for name in layers}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{key} is extra state of type {type(value).__name__}, which safetensors cannot "
                "hold. Save it separately."
            )
        where = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and where in first:
            aliases[key] = first[where]
            continue
        first[where] = key
        tensors[key] = (value.transpose(0, 1) if key in rank_major else value).contiguous()
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "ranks": json.dumps({name: layer.rank for name, layer in layers.items()}),
        "aliases": json.dumps(aliases),
    }
    _write_atomically(tensors, metadata, Path(path))


def _write_atomically(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write beside the target and rename: readers see the old file or the new one, never half."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise CheckpointError(f"cannot write to {path.parent} ({error}).") from error
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb") as written:  # noqa: PTH123
            os.fsync(written.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path} ({error}).") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def load(path: str | os.PathLike[str], *, into: nn.Module, ranks: Ranks | None = None) -> nn.Module:
    """Load a file into a model, in place, reading only the ranks asked for; returns the model.

    `into` is the model that was saved, decomposed or still dense: layers become low-rank or dense
    as the file says. Layers that `ranks` does not name get all ranks of the file. If anything does
    not fit, the model is left as it was.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            return _load(file, path, into, ranks)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file ({error}).") from error


def _load(file: Any, path: Path, into: nn.Module, ranks: Ranks | None) -> nn.Module:
    stored, aliases = _header(file, path)
    # a rehearsal on a copy without memory: torch's own checks, and nothing half-loaded
    rehearsal = _restructure(copy_on_meta(into), stored, path)
    full = {name: (stored[name], m.full_rank) for name, m in low_rank_layers(rehearsal).items()}
    chosen = stored | (resolve(ranks, full) if ranks is not None else {})
    state: dict[str, Tensor] = {}
    for key in file.keys():  # noqa: SIM118
        name, _, last = key.rpartition(".")
        if name in chosen and last in ("u", "v"):
            part = file.get_slice(key)[: chosen[name]]
            state[key] = part.transpose(0, 1) if last == "u" else part
        else:
            state[key] = file.get_tensor(key)
    state |= {alias: state[key] for alias, key in aliases.items()}
    try:
        rehearsal.load_state_dict({key: value.to("meta") for key, value in state.items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path} is of another model. {error}") from None
    model = _restructure(into, stored, path)
    model.load_state_dict(state)
    return model


def _header(file: Any, path: Path) -> tuple[dict[str, int], dict[str, str]]:
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
    return json.loads(metadata["ranks"]), json.loads(metadata["aliases"])


def _restructure(model: nn.Module, stored: Mapping[str, int], path: Path) -> nn.Module:
    """Make layers low-rank where the file has them so (contents undefined), the others dense."""
    new: dict[int, nn.Module] = {}
    modules = dict(model.named_modules())
    for name in stored:
        module = modules.get(name)
        if isinstance(module, LowRank):
            continue
        if module is None or type(module) not in LOW_RANK_TYPE:
            what = "is missing" if module is None else f"is a {type(module).__name__}"
            raise CheckpointError(
                f"{path} is of another model: it has a low-rank layer {name!r}, which {what} here. "
                f"Layers of the file: {listed(stored)}."
            )
        new[id(module)] = LOW_RANK_TYPE[type(module)].like(module, 0)
        hand_over(module, new[id(module)])
    for name, layer in low_rank_layers(model).items():
        if name not in stored:
            new[id(layer)] = layer.dense()
            hand_over(layer, new[id(layer)])
    return replace_modules(model, new)
