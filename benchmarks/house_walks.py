"""How far does one call go? Files, functions, calls, crossings between files and depth, counted.

`house.py --walks` shows them. Functions of the library alone count; a crossing is a call from one
of its files into another. The model is Linear(64, 48), ReLU, Linear(48, 10).
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from same_losses_runs import compress
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod

SOURCE = str(Path(lod.__file__).parent) + os.sep
COMMANDS = {
    "lod --help": ["--help"],
    "lod recipes": ["recipes"],
    "lod summary digits": ["summary", "digits"],
    "lod train digits": ["train", "digits", "--set", "epochs=1", "--out", "run", "--quiet"],
}
"""Commands of which the imported modules are counted."""


class Walk:
    """Counts what is called in a `with` block."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.calls = self.crossings = self.deepest = 0
        self._inside: list[FrameType] = []

    def __enter__(self) -> Walk:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return
        if event == "call":
            self.calls += 1
            self.functions.add(frame.f_code)
            caller = self._inside[-1].f_code.co_filename if self._inside else None
            self.crossings += caller is not None and caller != frame.f_code.co_filename
            self._inside.append(frame)
            self.deepest = max(self.deepest, len(self._inside))
        elif event == "return" and self._inside and self._inside[-1] is frame:
            self._inside.pop()

    def counts(self) -> dict[str, int]:
        return {
            "files": len({code.co_filename for code in self.functions}),
            "functions": len(self.functions),
            "calls": self.calls,
            "crossings": self.crossings,
            "deepest": self.deepest,
        }


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def _batches(count: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 64, generator=drawn), torch.randint(10, (32,), generator=drawn))
        for _ in range(count)
    ]


def _step(model: nn.Module, train: Any, optimizer: Any, *, penalty: bool = False) -> None:
    (x, y), *_ = _batches(1)
    with train.step():
        loss = F.cross_entropy(model(x), y)
        (loss + train.penalty_loss() if penalty else loss).backward()
    optimizer.step()
    optimizer.zero_grad()


def walks() -> dict[str, dict[str, int]]:
    """Take all walks, the shortest first."""
    found: dict[str, dict[str, int]] = {}
    done: dict[str, Any] = {}

    def take(name: str, call: Callable[[], Any]) -> Any:
        with Walk() as walk:
            done[name] = call()
        found[name] = walk.counts()
        return done[name]

    x = torch.randn(32, 64)
    with _quiet() as folder:
        _import_all()  # so that no walk counts what happens once in a process
        model = take("decompose", lambda: lod.decompose(_model()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        train = take(
            "LoD(model, optimizer, penalty=λ)", lambda: lod.LoD(model, optimizer, penalty=0.01)
        )
        _step(model, train, optimizer, penalty=True)
        take("one step of LoD, not the first", lambda: _step(model, train, optimizer, penalty=True))
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.u[:, -3:], layer.v[-3:] = 0.0, 0.0
        lost = take("end_epoch that removes ranks", train.end_epoch)
        assert all(lost.values()), lost
        file = folder / "model.safetensors"
        take("save", lambda: lod.save(model, file))
        loaded = take("load(ranks=0.5)", lambda: lod.load(file, into=_model(), ranks=0.5))
        small = take("extract", lambda: lod.extract(loaded))
        take("export to .pt2", lambda: lod.export(small, folder / "small.pt2", example=x[:1]))

        dense, batches = _model(), _batches(4)
        take("compress", lambda: compress(dense, batches, correct=True, steps=0))
        arguments = ["train", "digits", "--set", "budget.params=25%", "--set", "epochs=3"]
        take(
            "lod train digits, 3 epochs", lambda: _program([*arguments, "--out", "run", "--quiet"])
        )
    return found


def _import_all() -> None:
    for module in pkgutil.walk_packages(lod.__path__, "maestro_lod."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError, SystemExit):  # an extra that is not installed
                importlib.import_module(module.name)


def _program(arguments: list[str]) -> None:
    before, sys.argv = sys.path[:], ["lod", *arguments]
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; the program may remove it
    with suppress(SystemExit):
        runpy.run_module("maestro_lod", run_name="__main__")
    sys.path[:] = before
    assert Path("run/result.json").exists()


@contextmanager
def _quiet() -> Iterator[Path]:
    """Work in a folder that goes afterwards, without a word."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as made, (Path(made) / "log.txt").open("w") as log:
        os.chdir(made)
        os.environ["LOD_CACHE"] = str(Path(made) / "cache")
        try:
            with warnings.catch_warnings(), redirect_stdout(log), redirect_stderr(log):
                warnings.simplefilter("ignore")
                yield Path(made)
        finally:
            os.chdir(here)


def imported() -> dict[str, int]:
    """Count the library's modules that each command imports, in a process of its own."""
    code = (
        "import atexit, runpy, sys; "
        "ours = lambda: sum(name.split('.')[0] == 'maestro_lod' for name in sys.modules); "
        "atexit.register(lambda: open('count', 'w').write(str(ours()))); "
        "runpy.run_module('maestro_lod', run_name='__main__')"
    )
    found = {}
    environment = {**os.environ, "PYTHONPATH": str(Path(SOURCE).parent)}
    for name, arguments in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-c", code, *arguments], cwd=folder, check=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=environment | {"LOD_CACHE": f"{folder}/cache"},
            )  # fmt: skip
            found[name] = json.loads((Path(folder) / "count").read_text())
    return found
