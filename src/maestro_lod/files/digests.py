"""Digests that let a reader prove the first rows of a tensor without reading the rest.

A tensor's rows are digested in blocks that grow with what comes before them, so that the blocks
which hold the first rows are hardly longer than the rows: at most a sixteenth, or a page of 4 KiB.
Blocks have a CRC-32, three times as fast as SHA-256 and on any processor: one or two flipped bits,
or any damage within 32 bits, always change it, and of other damage one block in four billion would
pass. The header, which holds them and is short, has a SHA-256, of which twelve bytes are kept.
Neither is a signature: whoever wants to deceive could write new digests.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_SHORTEST, _LONGEST, _SHARE = 2**12, 2**20, 16


@dataclass(frozen=True)
class Digest:
    """A way to digest bytes, as a text of so many characters."""

    name: str
    """Of the text in a header that holds the digests of all blocks."""
    length: int
    of: Callable[[Any], str]

    def of_blocks(self, data: memoryview, ends: list[int]) -> str:
        """Return the digests of the blocks that end there, one after the other."""
        return "".join(self.of(data[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def _crc32(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


def _sha256(data: Any) -> str:
    found = hashlib.sha256(data, usedforsecurity=False).digest()
    return base64.b64encode(found[:12]).decode()


CRC32 = Digest("crc32", 8, _crc32)
SHA256 = Digest("digests", 16, _sha256)
"""Of headers, and of the blocks in files from before they had a CRC-32."""


def block_ends(shape: Sequence[int], size: int) -> list[int]:
    """Return the bytes at which the blocks of a tensor end, each at the end of a row.

    Its rows are along the first dimension; all of them are `size` bytes.
    """
    ends: list[int] = []
    end, row_bytes = 0, size // max(shape[0], 1) if len(shape) else size
    while end < size:
        length = min(max(end // _SHARE, _SHORTEST), _LONGEST)
        end = min(end + max(length // row_bytes, 1) * row_bytes, size)
        ends.append(end)
    return ends


def in_pieces(ends: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Put blocks together until they are worth a read; yields begins, and ends relative to them."""
    begin, piece = 0, list[int]()
    for end in ends:
        piece.append(end - begin)
        if piece[-1] >= _LONGEST or end == ends[-1]:
            yield begin, piece
            begin, piece = end, []
