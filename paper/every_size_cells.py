"""Cells of the comparison of sizes: what a line reaches at a size, trained once and kept.

python -m paper.every_size_cells lenet:elastic mlp:budget:0 --runs DIR

measures lines of tasks, of all seeds or of one. What lies in the directory is not trained again.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
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
from maestro_lod.train.evaluate import evaluate, evaluation_loss
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.fit import fit
from maestro_lod.train.schedule import milestones
from paper.scale import Scale, Setting, row

Point = dict[str, float]
SHARES = (0.5, 0.33, 0.25, 0.15, 0.1)
ELASTIC, BUDGET, DISTILLED, LONG = "elastic", "one size", "narrower, distilled", "dense, as long"
LONGER = 1.4
"""Epochs of both phases of an elastic run, relative to those of the recipe."""


@dataclass(frozen=True)
class Task:
    """What is trained, and for which sizes by the lines that need a training for each."""

    recipe: str
    seeds: tuple[int, ...]
    sizes: Mapping[str, tuple[float, ...]]
    """Kind of cost -> shares of dense."""
    changes: dict[str, Setting] = field(default_factory=dict)
    """Settings of the recipe that are others here."""


@dataclass(frozen=True)
class Cells:
    """The cells of one task and seed: trained where they are not kept yet."""

    scale: Scale
    task: Task
    seed: int

    def trained(self, **changes: Setting) -> Run:
        """Return the finished run of the recipe with changes."""
        given = {**self.task.changes, **changes, "seed": self.seed}
        return self.scale.trained(self.task.recipe, **given)

    def elastic(self, kind: str) -> dict[str, Point]:
        """Return what one elastic run reaches whole and cut to each size, without more training."""
        run = self.trained(method="elastic", smallest=0.1, size_cost=kind)
        return _kept(run, f"sizes-{kind}.json", lambda: {"whole": row(run), **_cut(run, kind)})

    def budget(self, kind: str, share: float) -> Point | None:
        """Return what a run for one size reaches; None where ranks cannot reach the size."""
        try:
            return row(self.trained(method="elastic", **{f"budget__{kind}": share}))
        except OptionError:
            return None

    def long(self) -> Point:
        """Return what the dense model reaches in the epochs of both phases."""
        recipe = load_recipe(self.task.recipe)
        points: Any = recipe.schedule
        later = [round(LONGER * epoch) for epoch in points.epochs]
        epochs = round(LONGER * recipe.epochs)
        return row(self.trained(method="dense", epochs=epochs, schedule__epochs=str(later)))

    def narrower(self, kind: str, share: float) -> Point | None:
        """Return what a narrower model reaches; None where no width reaches the size."""
        try:
            return row(self.trained(method="narrow", size=share, size_in=kind))
        except OptionError:
            return None

    def distilled(self, share: float) -> Point | None:
        """Return what a narrower model reaches under the dense one, in the epochs of both phases.

        Its loss is half the target's, half the dense model's.
        """
        dense = self.trained(method="dense")
        name = f"distilled-{share}.json"
        found = _kept(dense, name, lambda: {"point": self._distilled(dense, share)})
        point: Point | None = found["point"]
        return point

    def _distilled(self, dense: Run, share: float) -> Point | None:
        settings = {**self.task.changes, "method": "narrow", "size": share, "seed": self.seed}
        written = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        recipe = load_recipe(self.task.recipe, [*written, "threads=1"])
        try:
            setup = Setup.of(recipe)
        except OptionError:
            return None
        teacher, _ = dense.trained()
        points: Any = recipe.schedule
        steps = len(setup.data.train)
        later = [round(LONGER * epoch) for epoch in points.epochs]
        fit(
            setup.model, setup.data.train, optimizer=setup.optimizer,
            epochs=1 if self.scale.smoke else round(LONGER * recipe.epochs),
            method=_Distilled(teacher, setup.loss), loss=setup.loss, seed=recipe.seed,
            schedule=milestones(later, steps, points.factor),
        )  # fmt: skip
        assert setup.data.test is not None
        reached = evaluate(setup.model, setup.data.test, evaluation_loss(setup.loss))
        cost = cost_of(setup.model, setup.data.example)
        return {**reached, "params": cost.params, "macs": cost.macs or 0}


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


def _kept(run: Run, name: str, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file beside a run holds, made now if it is not there."""
    file = run.directory / name
    if not file.exists():
        file.write_text(json.dumps(made()))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _cut(run: Run, kind: str) -> dict[str, Point]:
    """Return what a finished elastic run reaches at each size, by its own ranks for it."""
    setup, state = Setup.of(run.recipe), load_state(run.checkpoint)
    setup.model.load_state_dict(state["model"])
    method, trained = setup.method, Trained.of(run)
    assert isinstance(method, Elastic)
    method.load_state_dict(state["method"])
    reached = {}
    for share in SHARES:
        try:
            ranks = method.ranks_at(share)
        except OptionError:  # a size below the least that there is
            continue
        plain = extract(trained.model, ranks, by="macs" if kind == "macs" else "params")
        cost = cost_of(plain, trained.data.example)
        costs = {"params": cost.params, "macs": cost.macs or 0}
        reached[str(share)] = {**trained.tested(plain), **costs}
    return reached


EACH = {"params": SHARES}
TASKS = {
    "lenet": Task("paper/lenet.yaml", (0, 1, 2), {**EACH, "macs": (0.5, 0.33, 0.25)}),
    "mlp": Task("paper/mlp.yaml", (0, 1, 2), EACH),
    "lstm": Task("paper/lstm.yaml", (0, 1, 2), EACH),
    "resnet": Task("paper/resnet.yaml", (0,), EACH),
    "transformer": Task("paper/transformer.yaml", (0,), EACH),
    "vit": Task("paper/vit.yaml", (0,), EACH),
    "lenet-whole": Task("paper/lenet.yaml", (0,), EACH, {"data__limit": 60_000}),
    "resnet-whole": Task("paper/resnet.yaml", (0,), EACH, {"data__limit": 50_000}),
}


def _line(cells: Cells, name: str) -> dict[str, Point | None]:
    """Return the points of a line: whole, and at each size that it reaches."""
    if name in ("elastic", "elastic-macs"):
        return {**cells.elastic("macs" if name.endswith("macs") else "params")}
    if name == "dense":
        return {"whole": row(cells.trained(method="dense"))}
    if name == "long":
        return {"whole": cells.long()}
    if name == "budget":
        return {str(share): cells.budget("params", share) for share in SHARES}
    if name == "narrower":
        return {str(share): cells.narrower("params", share) for share in SHARES}
    if name == "distilled":
        return {str(share): cells.distilled(share) for share in SHARES}
    raise SystemExit(f"no line {name!r}. Lines: elastic elastic-macs dense long budget narrower distilled.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="+", help="TASK:LINE or TASK:LINE:SEED")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="training runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for asked in options.lines:
        task, line, *seeds = asked.split(":")
        for seed in map(int, seeds) if seeds else TASKS[task].seeds:
            points = _line(Cells(Scale(options.runs), TASKS[task], seed), line)
            shown = {
                size: None if point is None else round(100 * point["accuracy"], 2)
                for size, point in points.items()
            }
            print(task, line, seed, shown, flush=True)


if __name__ == "__main__":
    main()
