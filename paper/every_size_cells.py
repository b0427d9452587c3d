"""Cells of the comparison of sizes: what a line reaches at each size, trained once and stored.

    python -m paper.every_size_cells lenet:elastic mlp:budget:0 --runs DIR

trains lines of tasks, for all seeds or for one. Points are stored in DIR/cells, a file for each
line and seed; what is there is not trained again, and `python -m paper every-size` reads it.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.cli.trained import Trained
from maestro_lod.errors import OptionError
from maestro_lod.files.state import load_state
from maestro_lod.model.cost import cost_of
from maestro_lod.model.surgery import extract
from maestro_lod.train.consolidation import comparison_for
from maestro_lod.train.dense import Dense
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.evaluate import evaluate, evaluation_loss
from maestro_lod.train.fit import fit
from maestro_lod.train.schedule import milestones
from paper.scale import Scale, Setting, row

Point = dict[str, float]
Points = dict[str, Point | None]
"""By size, "whole" or a share of dense; None where no model of the size is possible."""
SHARES = (0.5, 0.33, 0.25, 0.15, 0.1)
LONGER = 1.4
"""Epochs of both phases of an elastic run, relative to those of the recipe."""


@dataclass(frozen=True)
class Task:
    """What is trained."""

    title: str
    recipe: str
    seeds: tuple[int, ...] = (0,)
    changes: dict[str, Setting] = field(default_factory=dict)
    """Settings of the recipe that are others here."""


TASKS = {
    "lenet": Task("LeNet, 6,000 images of MNIST", "paper/lenet.yaml", (0, 1, 2)),
    "mlp": Task("MLP, 6,000 images of MNIST", "paper/mlp.yaml", (0, 1, 2)),
    "lstm": Task("LSTM, digits by rows", "paper/lstm.yaml", (0, 1, 2)),
    "resnet": Task("ResNet, 5,000 images of CIFAR-10", "paper/resnet.yaml"),
    "transformer": Task("Transformer, characters of Multi30k", "paper/transformer.yaml"),
    "vit": Task("ViT, 6,000 images of MNIST", "paper/vit.yaml"),
    "lenet-whole": Task(
        "LeNet, MNIST", "paper/lenet.yaml", changes={"data__limit": 60_000}
    ),
    "resnet-whole": Task(
        "ResNet, CIFAR-10", "paper/resnet.yaml", changes={"data__limit": 50_000}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cells:
    """The cells of one task and seed."""

    scale: Scale
    task: str
    seed: int

    def file(self, line: str) -> Path:
        """Return the file that stores the points of a line."""
        return self.scale.runs / "cells" / f"{self.task},{line},{self.seed}.json"

    def stored(self, line: str) -> Points:
        """Return the points of a line that are known."""
        file = self.file(line)
        found: Points = json.loads(file.read_text()) if file.exists() else {}
        return found

    def points(self, line: str) -> Points:
        """Return the points of a line, trained now where they are not known."""
        if line not in LINES:
            raise SystemExit(f"no line {line!r}. Lines: {' '.join(LINES)}.")
        found = self.stored(line)
        if "whole" in LINES[line] and "whole" not in found:
            found = self._of_one_run(line)
            self._store(line, found)
        for share in LINES[line]:
            if share != "whole" and share not in found and line in _PER_SIZE:
                try:
                    found[share] = _PER_SIZE[line](self, share)
                except OptionError:  # below the least that there is
                    found[share] = None
                self._store(line, found)
        return found

    def _store(self, line: str, points: Points) -> None:
        self.file(line).parent.mkdir(parents=True, exist_ok=True)
        self.file(line).write_text(json.dumps(points, indent=1))

    # -- trainings -----------------------------------------------------------------------------

    def trained(self, **changes: Setting) -> Run:
        """Return the finished run of the recipe with changes."""
        task = TASKS[self.task]
        return self.scale.trained(task.recipe, **{**task.changes, **changes, "seed": self.seed})

    def _of_one_run(self, line: str) -> Points:
        if line == "dense":
            return {"whole": row(self.trained(method="dense"))}
        if line == "long":
            return {"whole": row(self.trained(method="dense", **self._longer()))}
        cost = "macs" if line.endswith("macs") else "params"
        run = self.trained(elastic=0.1, elastic_cost=cost)
        return {"whole": row(run), **_cut(run)}

    def _longer(self) -> dict[str, Setting]:
        """Return the settings of a training in the epochs of both phases."""
        if self.scale.smoke:
            return {}
        recipe = load_recipe(TASKS[self.task].recipe)
        epochs = round(LONGER * recipe.epochs)
        return {"epochs": epochs, "schedule__epochs": str(_later(recipe.schedule))}

    def _budget(self, share: str) -> Point:
        return row(self.trained(budget__params=share))

    def _narrower(self, share: str) -> Point:
        return row(self.trained(method="narrow", size=share, size_in="params"))

    def _distilled(self, share: str) -> Point:
        """Train a narrower model under the dense one, in the epochs of both phases.

        Its loss is half the target's, half the dense model's.
        """
        task = TASKS[self.task]
        settings = {**task.changes, "method": "narrow", "size": share, "seed": self.seed}
        written = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        recipe = load_recipe(task.recipe, [*written, "threads=1"])
        setup = Setup.of(recipe)
        teacher, _ = self.trained(method="dense").trained()
        points: Any = recipe.schedule
        progress = fit(
            setup.model, setup.data.train, optimizer=setup.optimizer,
            epochs=1 if self.scale.smoke else round(LONGER * recipe.epochs),
            method=_Distilled(teacher, setup.loss), loss=setup.loss, seed=recipe.seed,
            schedule=milestones(_later(points), len(setup.data.train), points.factor),
        )  # fmt: skip
        assert setup.data.test is not None
        reached = evaluate(setup.model, setup.data.test, evaluation_loss(setup.loss))
        cost = cost_of(setup.model, setup.data.example)
        seconds = sum(record.seconds or 0.0 for record in progress.history)
        return {**reached, "params": cost.params, "macs": cost.macs or 0, "seconds": seconds}


_SIZES = tuple(map(str, SHARES))
LINES: dict[str, tuple[str, ...]] = {
    "elastic": ("whole", *_SIZES),
    "elastic-macs": ("whole", *_SIZES),
    "dense": ("whole",),
    "long": ("whole",),
    "budget": _SIZES,
    "narrower": _SIZES,
    "distilled": _SIZES,
}
"""What is trained, and the points of each."""
_PER_SIZE: dict[str, Callable[[Cells, str], Point]] = {
    "budget": Cells._budget,
    "narrower": Cells._narrower,
    "distilled": Cells._distilled,
}


class _Distilled(Dense):
    """Trains a model as it is, half on targets and half on what a teacher says."""

    def __init__(self, teacher: nn.Module, loss: Any) -> None:
        super().__init__()
        self._teacher = copy.deepcopy(teacher).eval().requires_grad_(False)
        if comparison_for(loss) is None:
            raise OptionError(f"the loss {loss!r} does not compare outputs. Give it a soft().")

    def backward(
        self,
        forward: Callable[..., Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Tensor:
        assert soft_loss is not None
        with torch.no_grad():
            wanted = forward(self._teacher)
        output = forward()
        value = (loss(output) + soft_loss(output, wanted)) / 2
        (value * weight).backward()  # type: ignore[no-untyped-call]
        return value.detach() * weight


def _later(schedule: Any) -> list[int]:
    """Return the milestones of a schedule in the epochs of both phases."""
    return [round(LONGER * epoch) for epoch in schedule.epochs]


def _cut(run: Run) -> Points:
    """Return what a finished elastic run reaches at each size, by its own ranks for it."""
    setup, state, trained = Setup.of(run.recipe), load_state(run.checkpoint), Trained.of(run)
    setup.model.load_state_dict(state["model"])
    method = setup.method
    assert isinstance(method, Elastic)
    method.load_state_dict(state["method"])
    reached: Points = {}
    for share in SHARES:
        try:
            ranks = method.ranks_at(share)
        except OptionError:  # below the least that there is
            reached[str(share)] = None
            continue
        plain = extract(trained.model, ranks, by=method.cost)
        cost = cost_of(plain, trained.data.example)
        costs = {"params": cost.params, "macs": cost.macs or 0}
        reached[str(share)] = {**trained.tested(plain), **costs}
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", nargs="+", help="TASK:LINE or TASK:LINE:SEED")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="training runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for asked in options.lines:
        task, line, *seeds = asked.split(":")
        if task not in TASKS:
            parser.error(f"no task {task!r}. Tasks: {' '.join(TASKS)}.")
        for seed in map(int, seeds) if seeds else TASKS[task].seeds:
            points = Cells(Scale(options.runs), task, seed).points(line)
            shown = {
                size: None if point is None else round(100 * point["accuracy"], 2)
                for size, point in points.items()
            }
            print(task, line, seed, shown, flush=True)


if __name__ == "__main__":
    main()
