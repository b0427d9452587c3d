"""Wall-clock beside MACs: what each epoch of a training takes at its ranks, relative to dense."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.tasks.run import Run
from maestro_lod.tasks.setup import Setup
from maestro_lod.train.evaluate import call
from paper import cifar, multi30k
from paper.published import LENET
from paper.scale import Scale, row

TITLE = "Wall-clock beside MACs: time of training, relative to dense"
MODELS = {
    "lenet-mnist": tuple(name for name in LENET if name != "dense"),
    "resnet18-small-cifar10": cifar.LAMBDAS,
    "vgg19-small-cifar10": cifar.LAMBDAS,
    multi30k.RECIPE: multi30k.LAMBDAS,
}
ROUNDS = 15


def measure(scale: Scale) -> dict[str, Any]:
    return {recipe: _recipe(scale, recipe, names) for recipe, names in MODELS.items()}


def _recipe(scale: Scale, recipe: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Time a step at the ranks of every epoch of every run, and of the dense model, in turn."""
    dense = scale.trained(recipe, method="dense", seed=0)
    runs = {name: scale.trained(recipe, penalty=name, seed=0) for name in names}
    during = {name: _ranks_during(run) for name, run in runs.items()}
    steps = {
        _key(ranks): _step(runs[name], ranks) for name, all_ in during.items() for ranks in all_
    }
    steps["dense"] = _step(dense, None)
    seconds = _timed(steps, 2 if scale.smoke else ROUNDS)
    ratio = {
        key: statistics.median(a / b for a, b in zip(times, seconds["dense"], strict=True))
        for key, times in seconds.items()
    }
    return {
        "dense_step": statistics.median(seconds["dense"]),
        "runs": {
            name: {
                "first": ratio[_key(all_[0])],
                "last": ratio[_key(all_[-1])],
                "total": statistics.mean(ratio[_key(ranks)] for ranks in all_),
                "training_macs": row(runs[name])["training_macs"],
                "params": row(runs[name])["relative_params"],
            }
            for name, all_ in during.items()
        },
    }


def _ranks_during(run: Run) -> list[dict[str, int]]:
    """Return the ranks in force during each epoch: full at first, then what the last one left."""
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    after = [json.loads(line)["ranks"] for line in lines]
    return [run.result()["full_ranks"], *after[:-1]]


def _key(ranks: dict[str, int]) -> str:
    return json.dumps(ranks)


def _step(run: Run, ranks: dict[str, int] | None) -> Callable[[], None]:
    """Return one optimizer step of a run's training on a batch of its data, at these ranks."""
    setup = Setup.of(run.recipe)
    inputs, target = next(iter(setup.data.train))
    for name, layer in low_rank_layers(setup.model).items():
        assert ranks is not None
        layer.resize(ranks[name])
    for group in setup.optimizer.param_groups:
        group["lr"] = 0.0  # the same batch again and again must not change the weights

    def step() -> None:
        if setup.lod is None:
            setup.loss(call(setup.model, inputs), target).backward()  # type: ignore[no-untyped-call]
        else:
            setup.lod.backward(
                lambda: call(setup.model, inputs), lambda output: setup.loss(output, target)
            )
        setup.optimizer.step()
        setup.optimizer.zero_grad()

    return step


def _timed(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


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
    faster = 0
    for recipe, measured in result.items():
        for name, run in measured["runs"].items():
            faster += run["total"] < run["first"]
            lines.append(
                f"| `{recipe}` | {name} | {run['params']:.2f}× | {run['first']:.2f}× "
                f"| {run['last']:.2f}× | {run['total']:.2f}× | {run['training_macs']:.2f}× |"
            )
    count = sum(len(measured["runs"]) for measured in result.values())
    return "\n".join([*lines, "", f"Shrinking makes {faster} of {count} trainings faster."])
