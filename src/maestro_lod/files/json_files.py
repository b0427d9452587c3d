"""JSON files from elsewhere: read within limits, and checked against a shape.

Only regular files of limited size and nesting are read. A shape is a type (`dict`, `int | None`;
true and false are not numbers), `[shape]` for a list, `{str: shape}` for an object with any keys, a
mapping of the required keys (a key that ends with "?" is optional), or a tuple `(shape, None)` for
a value that may be null.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, get_args

from maestro_lod.errors import CheckpointError

Shape: TypeAlias = "type | UnionType | list[Shape] | Mapping[Any, Shape] | tuple[Shape, None]"

LARGEST, DEEPEST = 2**27, 100
"""The largest file in bytes, and the deepest nesting of lists and objects."""

_KINDS = {
    dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a whole number",
    float: "a number", type(None): "null",
}  # fmt: skip


def read_json_file(path: str | os.PathLike[str], shape: Shape = dict) -> Any:
    """Return the content of a JSON file; raise CheckpointError if it does not have this shape."""
    try:
        return parse_json(read_limited(Path(path)), shape)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist. Check the path.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}). Check its permissions."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}). Write it again.") from None


def read_limited(path: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file up to a size, since devices and pipes may not end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > largest:
            raise ValueError(f"{status.st_size:,} bytes are too many: {largest:,} at most")
        return file.read(largest)


def parse_json(text: str | bytes, shape: Shape | None = None) -> Any:
    """Return the content of JSON text; raise ValueError for any fault, including its depth."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    require_depth(value)
    if shape is not None:
        require_shape(value, shape)
    return value


def require_depth(value: Any) -> None:
    """Raise ValueError for lists and mappings that are nested too deeply or contain themselves."""
    level = [value]
    for _ in range(DEEPEST):
        level = list({id(part): part for outer in level for part in _parts(outer)}.values())
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _parts(value: Any) -> list[Any]:
    parts = [*value.values()] if isinstance(value, dict) else value
    return [p for p in parts if isinstance(p, dict | list)] if isinstance(parts, list) else []


def require_shape(value: Any, shape: Shape, place: str = "") -> None:
    """Raise ValueError, with the key, for a value of another shape; its depth must be checked."""
    if isinstance(shape, tuple):
        if value is None:
            return
        shape = shape[0]
    kind = list if isinstance(shape, list) else dict if isinstance(shape, Mapping) else shape
    kinds = {*get_args(kind)} or {kind}
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    if not fits:
        expected = " or ".join(_KINDS[kind] for kind in _KINDS if kind in kinds)
        actual = _KINDS.get(type(value), type(value).__name__)
        raise ValueError(f"{place or 'the content'} is {actual} instead of {expected}")
    if isinstance(shape, list):
        for number, part in enumerate(value):
            require_shape(part, shape[0], f"{place}[{number}]")
    elif isinstance(shape, Mapping) and str in shape:
        for key, part in value.items():
            require_shape(part, shape[str], f"{place}.{key:.40}".lstrip("."))
    elif isinstance(shape, Mapping):
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name in value:
                require_shape(value[name], inner, f"{place}.{name}".lstrip("."))
            elif name == key:
                raise ValueError(f"{place or 'the content'} has no {name!r}")
