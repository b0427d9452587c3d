"""Digests that let a reader prove the first rows of a tensor without reading the rest.

A tensor's rows are digested in blocks that grow with what comes before them, so that the blocks
which hold the first rows are hardly longer than the rows: at most a sixteenth, or a page of 4 KiB.
SHA-256, because processors have instructions for it: it takes about as long as a read from memory,
where BLAKE2 takes three times that. Twelve bytes of it tell any damage apart; whoever wants to
deceive could write new digests anyway.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

LENGTH = 16
"""Of a digest as text."""
_SHORTEST, _LONGEST, _SHARE = 2**12, 2**20, 16


def digest(*parts: Any) -> str:
    """Return the digest of bytes, one part after the other."""
    state = hashlib.sha256(usedforsecurity=False)
    for part in parts:
        state.update(part)
    return base64.b64encode(state.digest()[:12]).decode()


def block_ends(rows: int, row_bytes: int) -> list[int]:
    """Return the bytes at which the blocks of so many rows end, each at the end of a row."""
    ends: list[int] = []
    end, size = 0, rows * row_bytes
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


def digests(data: memoryview, ends: list[int]) -> str:
    """Return the digests of the blocks that end there, one after the other."""
    return "".join(digest(data[a:b]) for a, b in zip([0, *ends], ends, strict=False))
