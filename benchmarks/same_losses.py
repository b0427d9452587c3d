"""Verify that a change keeps all numbers: small runs with two commits, compared bit for bit.

    python benchmarks/same_losses.py COMMIT [--only PATTERN …] [--keep DIR]

Each run is done with the library at COMMIT and with the one in the working tree: the loss of every
step, the ranks of every epoch and the tensors of all files have to be identical. Runs named `files`
go on with, load and deploy what the version at COMMIT has written. The exit code is 1 if anything
differs that is not in `EXPECTED`. Budgets and training for every size are not among the runs:
`Elastic` replaces the methods that did them before, with other numbers by intention.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interleaved import write
from same_losses_runs import FILES, RUNS, tensors_of

HERE = Path(__file__).parent
_NOT_CUT = "layers that are not cut stay dense"
_BETTER = "of the weights before and after distillation, the better ones are kept"
EXPECTED: dict[str, str] = {
    "compress": _NOT_CUT,
    "compress, corrected": _NOT_CUT,
    "compress, corrected, distilled": f"{_NOT_CUT}; {_BETTER}",
    "distilled alone": _BETTER,
}
"""Runs that are meant to differ, and why."""


class Outcome(NamedTuple):
    """Result of the comparison of one run."""

    steps: int
    ranks: str
    tensors: int
    difference: str | None


def checked_out(commit: str, directory: Path) -> Path:
    """Return the sources of the library at a commit."""
    packed = subprocess.run(
        ["git", "archive", commit, "src"], cwd=HERE.parent, capture_output=True, check=True
    )
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as tree:
        tree.extractall(directory, filter="data")
    return directory / "src"


def execute(task: str, source: Path, out: Path, files: Path, names: list[str]) -> None:
    """Do runs with the library in a folder, in a process of its own."""
    out.mkdir()
    code = (
        "import json, sys; from pathlib import Path; from same_losses_runs import main, lod; "
        "task, source, out, files, names = sys.argv[1:]; "
        "assert Path(lod.__file__).is_relative_to(source), lod.__file__; "
        "main(task, Path(out), Path(files), json.loads(names))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(source), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "LOD_CACHE": str(out / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-c", code, task, str(source), str(out), str(files)]
    subprocess.run([*command, json.dumps(names)], cwd=out, env=environment, check=True)


def first_difference(one: Any, other: Any, where: str) -> str | None:
    """Return the first place where two nested values differ, and both."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: {sorted(one.keys() ^ other.keys())} in one of them alone"
        pairs = [(one[key], other[key], f"{where}, {key}") for key in one]
    elif isinstance(one, list) and isinstance(other, list):
        pairs = [
            (*both, f"{where} {i + 1}") for i, both in enumerate(zip(one, other, strict=False))
        ]
        if len(one) != len(other):
            pairs.append((len(one), len(other), f"{where}, how many"))
    else:
        return None if repr(one) == repr(other) else f"{where}: {one!r} → {other!r}"
    return next((found for pair in pairs if (found := first_difference(*pair))), None)


def tensor_difference(older: Path, newer: Path) -> str | None:
    """Return the first tensor of two records' files that is not the same, bit for bit."""
    one, other = tensors_of(older), tensors_of(newer)
    shapes = [
        {
            file: {key: [str(t.dtype), *t.shape] for key, t in part.items()}
            for file, part in of.items()
        }
        for of in (one, other)
    ]
    if found := first_difference(*shapes, "files"):
        return found
    for file, part in one.items():
        for key, tensor in part.items():
            there = other[file][key]
            bits = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, there)]
            if not torch.equal(*bits):
                apart = (tensor.double() - there.double()).abs().max().item()
                return f"{file}, {key}: up to {apart:.3g} apart"
    return None


def compared(older: Path, newer: Path) -> Outcome:
    """Compare what two versions have done in one run."""
    for whose, place in (("older", older / "made"), ("older", older), ("newer", newer)):
        if (place / "error.txt").exists():
            text = (place / "error.txt").read_text().strip()
            return Outcome(0, "", 0, f"the {whose} version fails: {text.splitlines()[-1]}")
    one, other = (json.loads((path / "record.json").read_text()) for path in (older, newer))
    found = (
        first_difference(one["losses"], other["losses"], "loss of step")
        or first_difference(one["ranks"], other["ranks"], "ranks, change")
        or first_difference(one["said"], other["said"], "said")
        or tensor_difference(older, newer)
    )
    sums = [sum(ranks.values()) for _, ranks in one["ranks"] if ranks]
    ranks = f"{sums[0]} → {sums[-1]}" if sums else ""
    tensors = sum(map(len, tensors_of(older).values()))
    return Outcome(len(one["losses"]), ranks, tensors, found)


@contextmanager
def folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        shutil.rmtree(keep, ignore_errors=True)
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="of the older version")
    parser.add_argument("--only", action="append", help="patterns of runs; may be repeated")
    parser.add_argument("--keep", type=Path, help="a folder for all that the runs write")
    options = parser.parse_args()
    known = [*RUNS, *FILES]
    names = [n for n in known if any(fnmatch.fnmatch(n, p) for p in options.only or ["*"])]
    if not names:
        parser.error(f"no run fits {options.only}. There are: {', '.join(known)}")
    start, outcomes = time.perf_counter(), dict[str, Outcome]()
    with folder(options.keep) as place:
        sources = {
            "older": checked_out(options.commit, place / "source"),
            "newer": HERE.parent / "src",
        }
        for task, source in sources.items():
            execute(task, source, place / task, place / "files", names)
        for name in names:
            outcomes[name] = compared(place / "older" / name, place / "newer" / name)
    wrong = report(outcomes)
    print(f"{time.perf_counter() - start:.0f} seconds")
    if options.only is None:
        rows = {name: outcome._asdict() for name, outcome in outcomes.items()}
        write("same_losses", {"older": options.commit, "expected": EXPECTED, "runs": rows})
    sys.exit(1 if wrong else 0)


def report(outcomes: dict[str, Outcome]) -> list[str]:
    """Print a table of all runs, and return those that differ without being expected to."""
    print(f"{'run':46s}{'steps':>6s}{'ranks':>14s}{'tensors':>9s}  ")
    for name, (steps, ranks, tensors, difference) in outcomes.items():
        text = "equal"
        if difference is not None:
            text = f"differs, expected: {EXPECTED[name]}" if name in EXPECTED else "DIFFERS"
        print(f"{name:46s}{steps:6d}{ranks:>14s}{tensors:9d}  {text}")
    differ = {n: o.difference for n, o in outcomes.items() if o.difference is not None}
    wrong = [name for name in differ if name not in EXPECTED]
    for name in wrong:
        print(f"\n{name}: {differ[name]}")
    equal = len(outcomes) - len(differ)
    print(
        f"\n{equal} of {len(outcomes)} runs are equal, {len(differ) - len(wrong)} differ as meant"
    )
    return wrong


if __name__ == "__main__":
    main()
