"""Measure the verification of a file of half a gigabyte, relative to reading its bytes.

python benchmarks/verification.py

For the whole file, half and a tenth of its ranks, from memory (cached) and from the disk (cold):
processor seconds and wall-clock seconds to read as `load` does, without and with verification, and
of one plain read of those bytes, into fresh memory as `load` needs it. The least of all rounds, in
turning order: what others do, and which memory the system hands out, only adds (a page that a
virtual machine has given back costs several times as much as one that it still has).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from maestro_lod.files.tensor_file import opened_file, write_tensors

LAYERS, RANKS, WIDTH = 20, 1280, 2560
SHARES = {"whole": 1.0, "half of the ranks": 0.5, "a tenth of the ranks": 0.1}


def factors() -> dict[str, Tensor]:
    """Return factors as a file holds them, rank by rank, of about 500 MB."""
    torch.manual_seed(0)
    shape = (RANKS, WIDTH)
    return {f"{n}.{factor}": torch.randn(shape) for n in range(LAYERS) for factor in "uv"}


def read(path: Path, rows: int, *, verify: bool) -> list[Tensor]:
    """Read as `load` does, and keep what was read."""
    with opened_file(path, verify=verify) as file:
        return [file.read(key, rows) for key in file.shapes]


def read_plainly(path: Path, rows: int, place: memoryview | None = None) -> list[bytearray]:
    """Read the same bytes, as fast as Python can: into fresh memory, or into a place that is there.

    Fresh memory is what whoever loads a model needs; to get it from the system takes most of it.
    """
    start, kept = path.stat().st_size - LAYERS * 2 * RANKS * WIDTH * 4, []
    with path.open("rb", buffering=0) as file:
        for number in range(LAYERS * 2):
            file.seek(start + number * RANKS * WIDTH * 4)
            into = bytearray(rows * WIDTH * 4) if place is None else place[: rows * WIDTH * 4]
            assert file.readinto(into) == len(into)
            kept += [into] if isinstance(into, bytearray) else []
    return kept


def forget(path: Path) -> None:
    """Let the system drop what it keeps of a file in memory."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the processor's and the clock's seconds of something, not of giving memory back."""
    busy, begin = time.process_time(), time.perf_counter()
    kept = work()
    taken = time.process_time() - busy, time.perf_counter() - begin
    del kept
    return taken


def measure(path: Path, rounds: int, wheres: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    place = memoryview(bytearray(RANKS * WIDTH * 4))
    for number in range(rounds):
        path.read_bytes()  # what is cold in one round is to be cached in the next
        for where in wheres:
            for name, share in SHARES.items():
                rows = round(share * RANKS)
                works: dict[str, Callable[[], object]] = {
                    "into memory at hand": lambda rows=rows: read_plainly(path, rows, place),
                    "plain read": lambda rows=rows: read_plainly(path, rows),
                    "not verified": lambda rows=rows: read(path, rows, verify=False),
                    "verified": lambda rows=rows: read(path, rows, verify=True),
                }
                kinds, turn = [*works], number % len(works)
                for kind in kinds[turn:] + kinds[:turn]:
                    if where == "cold":
                        forget(path)
                    found = times.setdefault(f"{name}, {where}", {}).setdefault(kind, [])
                    found.append(seconds(works[kind]))
    return {name: in_short(kinds) for name, kinds in times.items()}


def in_short(kinds: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Return the least of the rounds, and what verifying adds as a share of a plain read."""
    answer: dict[str, dict[str, float]] = {}
    for at, unit in enumerate(("cpu", "wall")):
        least = {kind: min(taken[at] for taken in found) for kind, found in kinds.items()}
        for kind, taken in least.items():
            answer.setdefault(kind, {})[unit] = float(f"{taken:.3g}")
        added = (least["verified"] - least["not verified"]) / least["plain read"]
        answer.setdefault("added over a plain read", {})[unit] = round(added, 2)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--from", nargs="*", default=["cached", "cold"], dest="wheres")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may be memory
        path = Path(folder) / "model.safetensors"
        write_tensors(factors(), {}, path)
        answer = measure(path, options.rounds, options.wheres)
        size = path.stat().st_size
    for name, row in answer.items():
        print(f"{name:28}", row)
    from interleaved import (
        write,
    )  # only now: it lets the process keep memory, which is then not fresh

    write("verification", {"bytes": size, "seconds": answer})


if __name__ == "__main__":
    main()
