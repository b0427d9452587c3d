"""Wall-clock time and MACs: each epoch of a training at its ranks, relative to dense."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

import maestro_lod as lod
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.train.shrink import cut
from paper import cifar, multi30k
from paper.published import LENET
from paper.scale import Scale, row

TITLE = "Wall-clock time and MACs: time of training, relative to dense"
MODELS = {
    "lenet-mnist": tuple(name for name in LENET if name != "dense"),
    "resnet18-small-cifar10": cifar.LAMBDAS,
    "vgg19-small-cifar10": cifar.LAMBDAS,
    multi30k.RECIPE: multi30k.LAMBDAS,
}
ROUNDS, SECONDS = 24, 0.5  # at least so many, and so long: the shorter a step, the noisier


def measure(scale: Scale) -> dict[str, Any]:
    return {recipe: _recipe(scale, recipe, scale.some(names)) for recipe, names in MODELS.items()}


def _recipe(scale: Scale, recipe: str, names: tuple[str, ...]) -> dict[str, Any]:
    dense = _Steps.of(scale.trained(recipe, method="dense", seed=0))
    seconds: list[float] = []  # of all dense steps
    rounds = 1 if scale.smoke else max(ROUNDS, math.ceil(SECONDS / dense.seconds()))
    runs = {}
    for name in names:
        run = scale.trained(recipe, penalty=name, seed=0)
        steps = _Steps.of(run)
        ratios: list[float] = []
        for ranks in _ranks_during(run):
            if ranks != lod.ranks(steps.model):
                cut(steps.model, ranks, steps.optimizer)
            elif ratios:
                ratios.append(ratios[-1])
                continue
            # in turn: a machine is not always as fast
            pairs = [(dense.seconds(), steps.seconds()) for _ in range(rounds)]
            seconds += [one for one, _ in pairs]
            ratios.append(statistics.median(mine / one for one, mine in pairs))
        runs[name] = {
            "per_epoch": ratios,
            "training_macs": row(run)["training_macs"],
            "params": row(run)["relative_params"],
        }
    step = statistics.median(seconds)
    return {"dense_step": step, "dense_epoch": step * dense.per_epoch, "runs": runs}


def _ranks_during(run: Run) -> list[dict[str, int]]:
    """Return the ranks in force during each epoch: full at first, then what the last one left."""
    after = [dict(epoch.ranks) for epoch in run.epochs()]
    return [run.result()["full_ranks"], *after[:-1]]


@dataclass(frozen=True)
class _Steps:
    """A training as it begins, to time steps of it, all on one batch."""

    model: nn.Module
    optimizer: Optimizer
    per_epoch: int
    step: Callable[[], None]

    @classmethod
    def of(cls, run: Run) -> _Steps:
        setup = Setup.of(run.recipe)
        inputs, target = next(iter(setup.data.train))
        for group in setup.optimizer.param_groups:
            group["lr"] = 0.0  # the same batch again and again must not change the weights

        def step() -> None:
            setup.method.backward(
                lambda: ModelInputs.wrap(inputs).call(setup.model),
                lambda output: setup.loss(output, target),
            )
            setup.optimizer.step()
            setup.optimizer.zero_grad()

        step()  # the first one makes the optimizer's state
        return cls(setup.model, setup.optimizer, len(setup.data.train), step)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "Time of a step (forward, backward, penalty, optimizer; one thread) at the ranks in force "
        "during each epoch, relative to a step of the dense model, measured in turn. "
        "Without shrinking every epoch costs what the first one does.",
        "",
        "| recipe | λ | params | first epoch = without shrinking | last epoch | whole training "
        "| its MACs |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe, measured in result.items():
        lines.append(
            f"| `{recipe}` | dense | 1.00× | {measured['dense_epoch']:.1f} s "
            f"| {measured['dense_epoch']:.1f} s | 1.00× | 1.00× |"
        )
        for name, run in measured["runs"].items():
            ratios = run["per_epoch"]
            lines.append(
                f"| | {name} | {run['params']:.2f}× | {ratios[0]:.2f}× "
                f"| {ratios[-1]:.2f}× | {statistics.mean(ratios):.2f}× "
                f"| {run['training_macs']:.2f}× |"
            )
    return "\n".join([*lines, "", judgement(result)])


def judgement(result: dict[str, Any]) -> str:
    courses = [run["per_epoch"] for of in result.values() for run in of["runs"].values()]
    faster = sum(statistics.mean(ratios) < ratios[0] for ratios in courses)
    below = sum(statistics.mean(ratios) < 1 for ratios in courses)
    return (
        f"Shrinking makes {faster} of {len(courses)} trainings faster than they would be without; "
        f"{below} of them take less time than the dense one."
    )
