"""Digests by blocks of rows, which verify the first rows of a tensor without reading the rest.

The length of a block grows with its offset, so that the blocks with the first rows are at most a
sixteenth, or a page of 4 KiB, longer than the rows. Blocks have a CRC-32, which is three times as
fast as SHA-256: it detects one or two flipped bits and any damage within 32 bits; other damage
remains undetected in one block of four billion. The header, which contains the digests, has a
SHA-256 of twelve bytes. Neither is a signature: an attacker could write new digests.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_SHORTEST, _LONGEST, _SHARE = 2**12, 2**20, 16


@dataclass(frozen=True)
class Digest:
    """A digest of bytes as text with `length` characters."""

    name: str
    """The key of the text in a header that holds the digests of all blocks."""
    length: int
    compute: Callable[[Any], str]

    def compute_blocks(self, data: memoryview, ends: list[int]) -> str:
        """Return the concatenated digests of the blocks with these ends."""
        return "".join(self.compute(data[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def _crc32(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


def _sha256(data: Any) -> str:
    digest = hashlib.sha256(data, usedforsecurity=False).digest()
    return base64.b64encode(digest[:12]).decode()


CRC32 = Digest("crc32", 8, _crc32)
SHA256 = Digest("digests", 16, _sha256)
"""The digest of headers, and of blocks in files of early versions."""


def block_ends(shape: Sequence[int], size: int) -> list[int]:
    """Return the offsets at which the blocks of a tensor end, each at the end of a row.

    Rows are along the first dimension; `size` is the number of bytes of all rows.
    """
    ends: list[int] = []
    end, row_bytes = 0, size // max(shape[0], 1) if len(shape) else size
    while end < size:
        length = min(max(end // _SHARE, _SHORTEST), _LONGEST)
        end = min(end + max(length // row_bytes, 1) * row_bytes, size)
        ends.append(end)
    return ends


def in_pieces(ends: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Group blocks into reads of some size; yield the begin of each and its ends relative to it."""
    begin, piece = 0, list[int]()
    for end in ends:
        piece.append(end - begin)
        if piece[-1] >= _LONGEST or end == ends[-1]:
            yield begin, piece
            begin, piece = end, []


# -- values in memory ------------------------------------------------------------------------------


def compute_digest(value: Any) -> str:
    """Return a SHA-256 digest of nested values: tensors, models, mappings, sequences, plain data.

    A model contributes its types of modules, parameters and buffers, a function its name, any other
    object its type and attributes. The digest is the same in every process and on every device.
    """
    digest = hashlib.sha256()
    _update(digest, value, set())
    return digest.hexdigest()


def _update(digest: Any, value: Any, outer: set[int]) -> None:
    """Add a value to a digest; `outer` has the ids of the objects that contain it."""
    if isinstance(value, Tensor):
        _update_by_tensor(digest, value)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        _update_by_text(digest, f"{type(value).__name__} {value!r}")
    elif (name := getattr(value, "__qualname__", None)) is not None:  # a function or class
        _update_by_text(digest, f"{value.__module__}.{name}")
    elif hasattr(value, "tobytes"):  # a numpy array
        _update_by_text(digest, f"{value.dtype} {value.shape}")
        _update_by_bytes(digest, value.tobytes())
    elif id(value) in outer:
        _update_by_text(digest, "part of itself")
    else:
        parts = _parts(value)
        _update_by_text(digest, f"{type(value).__qualname__} {len(parts)}")
        for part in parts:
            _update(digest, part, outer | {id(value)})


def _parts(value: Any) -> list[Any]:
    """Return the parts of an object."""
    if isinstance(value, nn.Module):
        kinds = {name: type(module).__qualname__ for name, module in value.named_modules()}
        return [kinds, dict(value.named_parameters()), dict(value.named_buffers())]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, Sequence):
        return list(value)
    return [vars(value) if hasattr(value, "__dict__") else str(value)]


def _update_by_text(digest: Any, text: str) -> None:
    _update_by_bytes(digest, text.encode(errors="surrogatepass"))


def _update_by_bytes(digest: Any, data: bytes) -> None:
    digest.update(f"{len(data)} ".encode() + data)


def _update_by_tensor(digest: Any, tensor: Tensor) -> None:
    _update_by_text(digest, f"{tensor.dtype} {[*tensor.shape]} {tensor.layout}")
    if not tensor.is_meta:
        dense = tensor.detach().cpu().to_dense() if tensor.is_sparse else tensor.detach().cpu()
        digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().data)
