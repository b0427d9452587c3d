"""Compare the speed of two commits: steps, layers and searches, in interleaved rounds.

    python benchmarks/against.py REVISION [--rounds 15] [--only step|layers|frontier]

Each version runs in a process of its own, on one thread, and they take turns. The measure is
the CPU time of the process, which other work on the machine changes little; the ratio of each pair
of rounds is taken, and of those the median and the middle half.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod

Work = Callable[[], object]


# -- what is measured, in words that both versions understand ------------------------------------


def model_named(name: str) -> nn.Module:
    """Build a model of the program, wherever this version keeps them."""
    places = ("cli.models.lenet", "baselines.models", "app.models", "tasks.models")
    for place in places:
        try:
            build = getattr(importlib.import_module(f"maestro_lod.{place}"), name)
        except (ModuleNotFoundError, AttributeError):
            continue
        torch.manual_seed(0)
        model: nn.Module = build()
        return model
    raise SystemExit(f"there is no model {name} in this version")


def step(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Work:
    """A training step with penalty, at a share of the ranks."""
    model = lod.decompose(model, ranks=share if share < 1.0 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)
    train = lod.LoD(model, optimizer, penalty=64e-6)

    def work() -> None:
        with train.step():
            (F.cross_entropy(model(x), y) + train.penalty_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def steps() -> dict[str, Work]:
    digits, colours = torch.randn(128, 1, 28, 28), torch.randn(16, 3, 32, 32)
    targets = torch.randint(10, (128,))
    return {
        **{
            f"LeNet, batch 128, {share:.0%} of the ranks": repeated(
                step(model_named("LeNet"), digits, targets, share), 10
            )
            for share in (1.0, 0.3)
        },
        **{
            f"ResNet-18, batch 16, {share:.0%} of the ranks": step(
                model_named("resnet18"), colours, targets[:16], share
            )
            for share in (1.0, 0.15)
        },
    }


def layers() -> dict[str, Work]:
    """Forward and backward of each kind of layer, at full and at a quarter of the rank."""
    sys.path.insert(0, str(Path(lod.__file__).parents[2] / "benchmarks"))  # of its version
    kinds = importlib.import_module("layers").KINDS
    found: dict[str, Work] = {}
    for kind, (build, inputs) in kinds.items():
        for share in (1.0, 0.25):
            torch.manual_seed(0)
            model, x = lod.decompose(build(), ranks=share if share < 1.0 else None), inputs()
            found[f"{kind}, {share:.0%} of the rank"] = repeated(lambda m=model, x=x: back(m, x), 3)
    return found


def back(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    output.sum().backward()


def searches() -> dict[str, Work]:
    """A whole search over a LeNet with random weights, which is as long as over any other."""
    x, y = torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
    model = lod.decompose(model_named("LeNet"))
    return {
        f"LeNet, {method}": lambda method=method: lod.frontier(
            model, lambda m: F.cross_entropy(m(x), y), method=method, example=x[:1]
        )
        for method in ("look-ahead", "greedy")
    }


def repeated(work: Work, times: int) -> Work:
    def several() -> None:
        for _ in range(times):
            work()

    return several


QUESTIONS = {"step": steps, "layers": layers, "frontier": searches}


# -- two processes that take turns -----------------------------------------------------------------


def serve(question: str) -> None:
    """Do what each line asks for by name, and answer with the CPU seconds that it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    variants = QUESTIONS[question]()
    print(json.dumps(list(variants)), flush=True)
    for line in sys.stdin:
        began = time.process_time()
        variants[line.strip()]()
        print(time.process_time() - began, flush=True)


class Version:
    """One version of the library, in a process of its own."""

    def __init__(self, source: Path, question: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", question],
            env={**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = json.loads(self._answer())

    def seconds(self, name: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a version stopped; its error is above.")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Give a checkout of a revision that is gone afterwards."""
    with tempfile.TemporaryDirectory() as place:
        where = Path(place) / "source"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", where, revision], check=True)
        try:
            yield where
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", where], check=True)


def compared(question: str, old: Path, new: Path, rounds: int) -> dict[str, Any]:
    """Return each variant's time now over its time then, of those that both versions have."""
    versions = [Version(old, question), Version(new, question)]
    answer = {}
    for name in filter(versions[0].names.__contains__, versions[1].names):
        ratios = []
        for i in range(-1, rounds):  # the first is for warming up
            order = versions if i % 2 else versions[::-1]
            seconds = {version: version.seconds(name) for version in order}
            if i >= 0:
                ratios.append(seconds[versions[1]] / seconds[versions[0]])
        low, middle, high = statistics.quantiles(ratios, n=4)
        answer[name] = {"ratio": middle, "middle half": [low, high]}
        print(f"  {name:44s} {middle:6.3f}  ({low:.3f} to {high:.3f})", flush=True)
    for version in versions:
        version.close()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=QUESTIONS)
    parser.add_argument("--serve", choices=QUESTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    answer: dict[str, Any] = {"revision": options.revision}
    with checkout(options.revision) as old:
        for question in [options.only] if options.only else QUESTIONS:
            print(f"{question}: CPU time over that at {options.revision}")
            new = Path(__file__).resolve().parents[1]
            answer[question] = compared(question, old, new, options.rounds)
    importlib.import_module("interleaved").write("against", answer)


if __name__ == "__main__":
    main()
