"""What verifying a file of half a gigabyte costs, beside one plain read of the same bytes.

python benchmarks/verification.py

For the whole file, half and a tenth of its ranks, from memory (cached) and from the disk (cold):
processor seconds and wall-clock seconds to read as `load` does, without and with verification, and
of one plain read of those bytes. Minima over rounds, because others may use the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from interleaved import write
from torch import Tensor

from maestro_lod.tensors import opened_file, write_tensors

LAYERS, RANKS, WIDTH = 20, 1280, 2560
SHARES = {"whole": 1.0, "half of the ranks": 0.5, "a tenth of the ranks": 0.1}


def factors() -> dict[str, Tensor]:
    """Return factors as a file holds them, rank by rank, of about 500 MB."""
    torch.manual_seed(0)
    shape = (RANKS, WIDTH)
    return {f"{n}.{factor}": torch.randn(shape) for n in range(LAYERS) for factor in "uv"}


def read(path: Path, rows: int, *, verify: bool) -> None:
    with opened_file(path, verify=verify) as file:
        for key in file.shapes:
            file.read(key, rows)


def read_plainly(path: Path, rows: int) -> None:
    """Read the same bytes once more, as fast as Python can: into memory that is there already."""
    with path.open("rb", buffering=0) as file:
        place = memoryview(bytearray(rows * WIDTH * 4))
        start = path.stat().st_size - LAYERS * 2 * RANKS * WIDTH * 4
        for number in range(LAYERS * 2):
            file.seek(start + number * RANKS * WIDTH * 4)
            assert file.readinto(place) == len(place)


def forget(path: Path) -> None:
    """Let the system drop what it keeps of a file in memory."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """Return the processor's and the clock's seconds of something."""
    busy, begin = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - busy, time.perf_counter() - begin


def measure(path: Path, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for _ in range(rounds):
        for where in ("cached", "cold"):
            for name, share in SHARES.items():
                rows = round(share * RANKS)
                works = {
                    "plain read": lambda rows=rows: read_plainly(path, rows),
                    "not verified": lambda rows=rows: read(path, rows, verify=False),
                    "verified": lambda rows=rows: read(path, rows, verify=True),
                }
                for kind, work in works.items():
                    if where == "cold":
                        forget(path)
                    found = times.setdefault(f"{name}, {where}", {}).setdefault(kind, [])
                    found.append(seconds(work))
    return {
        name: {
            kind: {
                unit: float(f"{min(values):.3g}")
                for unit, values in zip(("cpu", "wall"), zip(*found, strict=True), strict=True)
            }
            for kind, found in kinds.items()
        }
        for name, kinds in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may be memory
        path = Path(folder) / "model.safetensors"
        write_tensors(factors(), {}, path)
        answer = measure(path, options.rounds)
        size = path.stat().st_size
    for name, row in answer.items():
        print(f"{name:28}", row)
    write("verification", {"bytes": size, "seconds": answer})


if __name__ == "__main__":
    main()
