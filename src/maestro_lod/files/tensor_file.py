"""Safetensors files: atomic writes, partial reads, verification.

Any safetensors reader can read them. Two texts in the header are additions: `crc32` has the digests
of the blocks of all tensors in the order of the file (see `digests`), and `digest`, which is first,
that of the rest of the header. So `digest` verifies the header, and the header each block. The same
tensors and texts give the same bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from maestro_lod.distributed.shards import gathered, local_part
from maestro_lod.errors import CheckpointError
from maestro_lod.files.atomic import open_regular, replacing, writing
from maestro_lod.files.digests import CRC32, SHA256, Digest, block_ends, in_pieces

_DTYPE = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""torch's dtypes by their names in safetensors."""
_NAME = {dtype: name for name, dtype in _DTYPE.items()}

_BEFORE_DIGEST = b'{"__metadata__":{"digest":"'


def distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a state dict, shared ones once, and the other names of these."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{key} is extra state of type {type(value).__name__}, which safetensors cannot "
                "hold. Save it separately."
            )
        _require_storable(key, value)
        where = (local_part(value).data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and where in first:
            aliases[key] = first[where]
        else:
            first[where] = key
            tensors[key] = value
    return tensors, aliases


def _require_storable(key: str, value: Tensor) -> None:
    if value.is_meta:
        raise CheckpointError(
            f"{key} is on the meta device and has no values. Load or initialize the model first."
        )
    if value.dtype not in _NAME:
        raise CheckpointError(
            f"{key} is of {value.dtype}, which safetensors cannot hold. Convert it first."
        )


# -- writing -----------------------------------------------------------------------------------


def write_tensors(tensors: Mapping[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write tensors and texts to a file, atomically; equal content gives equal bytes."""
    for key, value in tensors.items():
        _require_storable(key, value)
    with replacing(path) as place, writing(path):
        save_file(tensors, place, metadata)


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a file: the tensors first, behind room for the header, which gets their digests."""
    order = in_written_order(tensors)
    entries: dict[str, dict[str, Any]] = {}
    count = end = 0
    for key in order:
        value, begin = tensors[key], end
        end += value.nbytes
        offsets = {"data_offsets": [begin, end]}
        entries[key] = {"dtype": _NAME[value.dtype], "shape": list(value.shape), **offsets}
        count += len(block_ends(value.shape, value.nbytes))

    def header(proofs: str) -> bytes:
        texts = {"digest": "-" * SHA256.length, CRC32.name: proofs, **metadata}
        text = json.dumps({"__metadata__": texts, **entries}, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % 8)

    length = len(header("-" * CRC32.length * count))
    with path.open("wb") as file:
        file.seek(8 + length)
        proofs = [_write(tensors[key], file) for key in order]
        file.seek(0)
        file.write(_proven(struct.pack("<Q", length), header("".join(proofs))))


def in_written_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order of the file.

    Wide dtypes come first, as in other writers, so that all tensors are aligned.
    """
    return sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))


def _write(value: Tensor, file: BinaryIO) -> str:
    """Write the bytes of a tensor and return their digests."""
    if not value.numel():
        return ""
    packed = gathered(value).detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = memoryview((ctypes.c_char * packed.nbytes).from_address(packed.data_ptr())).cast("B")
    file.write(data)
    return CRC32.compute_blocks(data, block_ends(packed.shape, packed.nbytes))


def _proven(length: bytes, header: bytes) -> bytes:
    """Return the start of a file, with the digest of its header."""
    rest = header[len(_BEFORE_DIGEST) + SHA256.length :]
    return length + _BEFORE_DIGEST + SHA256.compute(length + rest).encode() + rest


# -- reading -----------------------------------------------------------------------------------


@contextmanager
def opened_file(path: Path, *, verify: bool = True) -> Iterator[TensorFile]:
    """Open a file for reading; raise CheckpointError for any fault of it inside the block."""
    try:
        with open_regular(path) as file:
            yield TensorFile.open(file, path, verify)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist. Check the path.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({error}). Use another copy."
        ) from error


class _Damage(OSError):
    """Content that is not a valid safetensors file, or differs from its digests."""


@dataclass(frozen=True)
class _Entry:
    """The header's entry of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def parse(cls, key: str, entry: Any, path: Path) -> _Entry:
        """Parse an entry; raise ValueError if its shape does not fit its size."""
        if entry["dtype"] not in _DTYPE:
            raise CheckpointError(
                f"{key} in {path} is of an unknown type: {entry['dtype']}. Convert it to another."
            )
        dtype, shape = _DTYPE[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        if not whole or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the size of {key} does not fit its shape")
        return cls(dtype, shape, begin, end)

    @property
    def ends(self) -> list[int]:
        return block_ends(self.shape, self.end - self.begin)


@dataclass(frozen=True)
class TensorFile:
    """An open safetensors file: its texts, and its tensors on demand."""

    metadata: dict[str, str]
    """All texts except the digests."""
    proven: bool
    """Whether the file has digests; files of early versions have none."""
    _entries: dict[str, _Entry]
    _proofs: tuple[Digest, str] | None
    """The kind and the texts of the digests to compare with."""
    _file: BinaryIO
    _start: int

    @classmethod
    def open(cls, file: BinaryIO, path: Path, verify: bool) -> TensorFile:
        """Read the header of a file, with plain reads, since a memory map loads whole pages."""
        try:
            size = os.fstat(file.fileno()).st_size
            packed = _read(file, 8)
            (length,) = struct.unpack("<Q", packed)
            if length > size - 8:
                raise ValueError("the file ends within its header")
            raw = bytes(_read(file, length))
            header: dict[str, Any] = json.loads(raw, object_pairs_hook=_without_repetition)
            metadata = header.pop("__metadata__", {})
            if not all(isinstance(text, str) for text in metadata.values()):
                raise ValueError("the metadata has values that are not text")
            kinds = [kind for kind in (CRC32, SHA256) if kind.name in metadata]
            digests = [(kind, metadata.pop(kind.name)) for kind in kinds]
            proven = metadata.pop("digest", None) is not None or bool(digests)
            as_written = len(digests) == 1 and _proven(bytes(packed), raw) == packed + raw
            if verify and proven and not as_written:
                raise ValueError("the header differs from its digest")
            entries = {key: _Entry.parse(key, entry, path) for key, entry in header.items()}
            _require_gapless(entries, size - 8 - length)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Damage(str(error) or repr(error)) from error
        proofs = digests[0] if verify and digests else None
        return cls(metadata, proven, entries, proofs, file, 8 + length)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: entry.shape for key, entry in self._entries.items()}

    def read(self, key: str, rows: int | range | None = None) -> Tensor:
        """Read a tensor, its first rows or a range of rows, and verify them."""
        entry = self._entries[key]
        shape = entry.shape
        if rows is not None:
            rows = rows if isinstance(rows, range) else range(min(rows, shape[0]))
            shape = (len(rows), *shape[1:])
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=entry.dtype)
        size = count * entry.dtype.itemsize
        begin = 0 if rows is None else rows.start * (size // len(rows))
        if self._proofs is None:
            self._file.seek(self._start + entry.begin + begin)
            raw, ahead = _read(self._file, size), 0
        else:
            raw, ahead = self._read_proven(key, begin, begin + size)
        return torch.frombuffer(raw, dtype=entry.dtype, count=count, offset=ahead).view(shape)

    def _read_proven(self, key: str, begin: int, end: int) -> tuple[bytearray, int]:
        """Read and verify the blocks with these bytes; return them and the offset of the bytes."""
        assert self._proofs is not None
        kind, proofs = self._proofs
        blocks = [*zip([0, *self._entries[key].ends], self._entries[key].ends, strict=False)]
        first = next(i for i, (_, stop) in enumerate(blocks) if stop > begin)
        start = blocks[first][0]
        needed = [stop - start for before, stop in blocks[first:] if before < end]
        raw = bytearray(needed[-1])
        whole, digests = memoryview(raw), ""
        self._file.seek(self._start + self._entries[key].begin + start)
        for at, ends in in_pieces(needed):  # small enough for the processor's cache
            piece = whole[at : at + ends[-1]]
            _fill(piece, self._file)
            digests += kind.compute_blocks(piece, ends)
        at = (self._first_proof[key] + first) * kind.length
        if digests != proofs[at : at + len(digests)]:
            raise _Damage(f"the bytes of {key} differ from their digests")
        return raw, begin - start

    @cached_property
    def _first_proof(self) -> dict[str, int]:
        """The index of the first digest of each tensor, in the order of the data."""
        order = sorted(self._entries, key=lambda key: self._entries[key].begin)
        counts = (len(self._entries[key].ends) for key in order)
        return dict(zip(order, itertools.accumulate(counts, initial=0), strict=False))


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(header := dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return header


def _require_gapless(entries: Mapping[str, _Entry], size: int) -> None:
    """Raise ValueError for tensors that overlap or leave bytes of the file unused."""
    spans = sorted((entry.begin, entry.end) for entry in entries.values())
    ends = [0, *(end for _, end in spans)]
    if [begin for begin, _ in spans] != ends[:-1] or ends[-1] != size:
        raise ValueError("the tensors do not fill the file")


def _read(file: BinaryIO, size: int) -> bytearray:
    raw = bytearray(size)
    _fill(memoryview(raw), file)
    return raw


def _fill(buffer: memoryview, file: Any) -> None:
    """Read until the buffer is full, which takes several reads beyond 2 GiB."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise _Damage("the file ends too early")
        buffer = buffer[count:]
