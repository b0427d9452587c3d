"""Training state of any nesting in one safetensors file, without pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maestro_lod.errors import CheckpointError
from maestro_lod.files.json_files import parse_json, require_depth
from maestro_lod.files.tensor_file import opened_file, write_tensors

_FORMAT = "maestro-lod training state 1"


def save_state(state: Any, path: str | os.PathLike[str]) -> None:
    """Write the state of a training to one safetensors file; atomic, no pickle.

    Tensors are stored as tensors, all other values as JSON in the header.

    Args:
        state: Nested mappings, lists, tuples, numbers, text, None and tensors.
        path: The file to write.

    Raises:
        CheckpointError: If a value has another type, or the file cannot be written.

    Example:
        >>> lod.save_state({"epoch": 3, "weights": [torch.zeros(2)]}, "state.safetensors")
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            name, order = str(len(tensors)), _order_in_memory(value)
            tensors[name] = value.detach().permute(order)
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
        text = " ".join(str(value).split())[:80]
        raise CheckpointError(
            f"a {kind} cannot be saved without pickle: {text}. Convert it to numbers or tensors."
        )

    try:
        written = plain(state)
        require_depth(written)
        metadata = {"format": _FORMAT, "state": json.dumps(written)}
    except (RecursionError, ValueError) as error:  # the second: a number of thousands of digits
        raise CheckpointError(
            f"the state for {path} cannot be written ({error}). Make it smaller."
        ) from None
    write_tensors(tensors, metadata, Path(path))


def _order_in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost.

    Fused optimizers step through their state in memory order, so the state of a channels-last
    weight must be restored in channels-last order.
    """
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def load_state(path: str | os.PathLike[str], *, verify: bool = True) -> Any:
    """Read a file that `save_state` wrote.

    Args:
        path: The file.
        verify: Whether to compare its content with its digests.

    Returns:
        The state; tuples become lists.

    Raises:
        CheckpointError: If the file is missing, damaged, or of another kind.

    Example:
        >>> lod.save_state({"epoch": 3}, "state.safetensors")
        >>> lod.load_state("state.safetensors")
        {'epoch': 3}
    """
    path = Path(path)
    with opened_file(path, verify=verify) as file:
        metadata = file.metadata
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(f"{path} was not written by save_state. Choose another file.")

        def read(value: Any) -> Any:
            if isinstance(value, list):
                return [read(part) for part in value]
            if not isinstance(value, dict):
                return value
            if "tensor" in value:
                order = value["order"]
                if sorted(order) != [*range(len(order))]:
                    raise ValueError(f"{order} does not order the dimensions")
                place = sorted(range(len(order)), key=order.__getitem__)  # its inverse
                return file.read(value["tensor"]).permute(place)
            return {key: read(part) for key, part in value["mapping"]}

        try:
            return read(parse_json(metadata["state"]))
        except (LookupError, ValueError, TypeError, RuntimeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error}). Use another copy.") from error
