"""Beyond the paper: accuracy at every size, from one training or from one training per size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from torch import nn

from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import loss_of, optimizer_of
from maestro_lod.cli.trained import Trained, search
from maestro_lod.errors import OptionError
from maestro_lod.model.plot import svg
from maestro_lod.model.surgery import extract
from maestro_lod.train.finetune import finetune
from paper.scale import Scale, Setting, row

TITLE = "Beyond the paper: every size, from one training or from one per size"
SHARES = (0.5, 0.33, 0.25, 0.15, 0.1)
NAMES = {"params": "params", "macs": "MACs"}
ELASTIC, BUDGET, NARROW, SVD = "elastic", "budget", "narrower", "SVD of dense"
HEALED = ", healed"
SHOWN_FIRST = {
    BUDGET: "trained to a budget",
    NARROW: "narrower dense",
    ELASTIC + HEALED: "one training, cut",
}
"""What the project's README shows, and how it names it."""
ONCE = (ELASTIC, ELASTIC + HEALED, SVD, SVD + HEALED)
"""Lines that come of one training; the others need one per size."""


@dataclass(frozen=True)
class Task:
    """What is trained, and for which sizes by the lines that need a training for each."""

    recipe: str
    seeds: tuple[int, ...]
    sizes: Mapping[str, tuple[float, ...]]
    """Kind of cost -> shares of dense."""
    changes: dict[str, Setting] = field(default_factory=dict)
    """Settings of the recipe that are others here."""


TASKS = {
    "LeNet, 6,000 images of MNIST": Task(
        "paper/lenet.yaml", (0, 1, 2), {"params": SHARES, "macs": (0.5, 0.33, 0.25)}
    ),
    "MLP, 6,000 images of MNIST": Task("paper/mlp.yaml", (0, 1, 2), {"params": SHARES}),
    "LSTM, digits by rows": Task("paper/lstm.yaml", (0, 1, 2), {"params": SHARES}),  # MACs stay
    "ResNet, 5,000 images of CIFAR-10": Task("paper/resnet.yaml", (0,), {"params": SHARES}),
    "Transformer, characters of Multi30k": Task("paper/transformer.yaml", (0,), {"params": SHARES}),
}
"""Settings of budgets and elastic training were chosen on validation data of the first three, with
other seeds; those after them are run once."""

Point = dict[str, float]
Line = dict[str, dict[str, list[Point]]]
"""Kind of cost -> share -> a point per seed; none where a size cannot be reached."""


def measure(scale: Scale) -> dict[str, Any]:
    return measured(scale, TASKS)


def measured(scale: Scale, tasks: dict[str, Task]) -> dict[str, Any]:
    """Train all lines of these tasks, or those of the first one in a smoke test."""
    return {name: _measured(scale, tasks[name]) for name in scale.some(tuple(tasks))}


def _measured(scale: Scale, task: Task) -> dict[str, Any]:
    whole: dict[str, list[Point]] = {}
    lines: dict[str, Line] = {
        name: {kind: {str(share): [] for share in SHARES} for kind in task.sizes}
        for name in (*ONCE, BUDGET, NARROW)
    }
    for seed in task.seeds if not scale.smoke else task.seeds[:1]:

        def trained(seed: int = seed, **changes: Setting) -> Run:
            return scale.trained(task.recipe, **task.changes, **changes, seed=seed)

        runs = {ELASTIC: trained(elastic=0.1), SVD: trained(method="dense")}
        for name, run in runs.items():
            whole.setdefault(name, []).append(row(run))
            for kind in task.sizes:
                for share, (cut, healed) in _sizes(run, kind).items():
                    lines[name][kind][share].append(cut)
                    lines[name + HEALED][kind][share].append(healed)
        for kind, shares in task.sizes.items():
            for share in map(str, shares):
                for name, one in _per_size(kind, share).items():
                    if (point := _reached(trained, one)) is not None:
                        lines[name][kind][share].append(point)
    return {"whole": whole, "lines": lines}


def _per_size(kind: str, share: str) -> dict[str, dict[str, Setting]]:
    """Return what the lines that need a training per size are trained with."""
    return {
        BUDGET: {f"budget__{kind}": share},
        NARROW: {"method": "narrow", "size": share, "size_in": kind},
    }


def _reached(trained: Callable[..., Run], changes: dict[str, Setting]) -> Point | None:
    try:
        return row(trained(**changes))
    except OptionError:  # a size below the least that there is
        return None


def _sizes(run: Run, kind: str) -> dict[str, tuple[Point, Point]]:
    """Return what a run's model reaches cut to each share of a cost, and healed for an epoch.

    What was measured is kept beside the run.
    """
    file = run.directory / f"every-size-{kind}.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if all(str(share) in known for share in SHARES):
        return {share: (cut, healed) for share, (cut, healed) in known.items() if cut}
    trained = Trained.of(run)
    kept = run.directory / f"search-{kind}.jsonl"
    found = search(trained, cost=kind, until=0.95 * SHARES[-1], resume=kept)
    for share in SHARES:
        within = [p for p in found if getattr(p, kind) <= share * getattr(found.dense, kind)]
        if within and str(share) not in known:
            best = min(within, key=lambda point: point.loss)
            costs = {"params": best.params, "macs": best.macs}
            plain = extract(trained.model, best.ranks)
            before = {**trained.tested(plain), **costs}
            _heal(plain, trained)
            known[str(share)] = before, {**trained.tested(plain), **costs}
        known.setdefault(str(share), (None, None))
        file.write_text(json.dumps(known))
    return {share: (cut, healed) for share, (cut, healed) in known.items() if cut}


def _heal(plain: nn.Module, trained: Trained) -> None:
    recipe = trained.run.recipe
    optimizer = optimizer_of(recipe, plain)
    finetune(plain, trained.data.train, optimizer=optimizer, loss=loss_of(recipe), seed=recipe.seed)


# -- what is shown -----------------------------------------------------------------------------


def _accuracy(points: list[Point]) -> float | None:
    return 100 * mean(point["accuracy"] for point in points) if points else None


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {**drawings(result), "accuracy-against-size": _shown_first(result)}


def drawings(result: dict[str, Any]) -> dict[str, str]:
    """Return all lines of each task over each cost."""
    drawn = {}
    for task, measured in result.items():
        for kind in next(iter(measured["lines"].values())):
            lines = {
                name: _curve(line[kind]) for name, line in measured["lines"].items() if line[kind]
            }
            drawn[f"every-size-{_file_name(task)}-{kind}"] = svg(
                {name: curve for name, curve in lines.items() if curve},
                title=f"{task}: accuracy over {NAMES[kind]}",
                across=f"{NAMES[kind]}, relative to dense", up="test accuracy, %",
            )  # fmt: skip
    return drawn


def _shown_first(result: dict[str, Any]) -> str:
    task, measured = next(iter(result.items()))
    return svg(
        {
            title: curve
            for name, title in SHOWN_FIRST.items()
            if (curve := _curve(measured["lines"].get(name, {}).get("params", {})))
        },
        title=f"{task}: accuracy against size",
        across="parameters, relative to dense", up="test accuracy, %",
    )  # fmt: skip


def _file_name(task: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", task.lower().replace(",000", "000")))


def _curve(sizes: dict[str, list[Point]]) -> list[tuple[float, float]]:
    known = [(float(share), _accuracy(points)) for share, points in sizes.items()]
    return sorted((share, accuracy) for share, accuracy in known if accuracy is not None)


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "Test accuracy in % of models cut to, or trained for, a share of dense; – is a size that "
        "a line does not reach. Healed is one more epoch for the size. `elastic` and `SVD of "
        "dense` are one training each, `budget` and `narrower` one per size.", "",
    ]  # fmt: skip
    for task, measured in result.items():
        names = measured["lines"]
        whole = {name: _accuracy(points) for name, points in measured["whole"].items()}
        seeds = len(measured["whole"][ELASTIC])
        lines += [
            f"**{task}** ({seeds} seed{'s' if seeds > 1 else ''}); whole: dense "
            f"{whole[SVD]:.2f}, elastic {whole[ELASTIC]:.2f}. {_cost(measured)}", "",
            f"| size | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|",
        ]  # fmt: skip
        for kind in names[ELASTIC]:
            for share in names[ELASTIC][kind]:
                reached = [_accuracy(line[kind][share]) for line in names.values()]
                shown = ["–" if value is None else f"{value:.2f}" for value in reached]
                lines.append(f"| {NAMES[kind]} {share}× | {' | '.join(shown)} |")
        lines += ["", _judgement(measured), ""]
    return "\n".join(lines)


def _cost(measured: dict[str, Any]) -> str:
    """Say what the training of each line costs as a whole."""
    elastic = mean(point["training_macs"] for point in measured["whole"][ELASTIC])
    budget = sum(
        mean(point["training_macs"] for point in points)
        for sizes in measured["lines"][BUDGET].values() for points in sizes.values() if points
    )  # fmt: skip
    narrower = sum(
        mean(point["relative_macs"] for point in points)
        for sizes in measured["lines"][NARROW].values() for points in sizes.values() if points
    )  # fmt: skip
    return (
        f"Training MACs of a whole line, in trainings of the dense model: elastic {elastic:.2f}, "
        f"budget {budget:.2f}, narrower {narrower:.2f}, SVD 1."
    )


def judgement(result: dict[str, Any]) -> str:
    return " ".join(f"{task}: {_judgement(measured)}" for task, measured in result.items())


def _judgement(measured: dict[str, Any]) -> str:
    lines, whole = measured["lines"], measured["whole"]
    against = _gaps(lines[BUDGET], lines[NARROW])
    won = sum(gap >= 0 for gap in against.values())
    sentences = [
        f"Budget runs are at or above narrower models at {won} of {len(against)} sizes, at worst "
        f"{min(against.values()):+.2f} pp ({_worst(against)})."
    ]
    for name in (ELASTIC, ELASTIC + HEALED):
        gaps = {
            key: gap for key, gap in _gaps(lines[name], lines[BUDGET]).items()
            if key[1] >= (0.15 if key[0] == "params" else 0.33)
        }  # fmt: skip
        sentences.append(
            f"One {name} run is at worst {min(gaps.values()):+.2f} pp beside budget runs "
            f"({_worst(gaps)}; from 0.15 of the params and 0.33 of the MACs on)."
        )
    difference = (_accuracy(whole[ELASTIC]) or 0.0) - (_accuracy(whole[SVD]) or 0.0)
    sentences.append(f"Its whole size is {difference:+.2f} pp beside dense.")
    if worse := _perplexities(lines[BUDGET], lines[NARROW]):
        (kind, share), most = max(worse.items(), key=lambda item: item[1])
        sentences.append(
            f"The perplexity of budget runs is at worst {most:+.1%} beside narrower models "
            f"({NAMES[kind]} {share:g}×)."
        )
    return " ".join(sentences)


Gaps = dict[tuple[str, float], float]


def _gaps(line: Line, other: Line) -> Gaps:
    """Return by how much a line is above another, at all sizes that both reach."""
    gaps = {}
    for kind, sizes in line.items():
        for share, points in sizes.items():
            mine, theirs = _accuracy(points), _accuracy(other[kind][share])
            if mine is not None and theirs is not None:
                gaps[kind, float(share)] = mine - theirs
    return gaps


def _perplexities(line: Line, other: Line) -> Gaps:
    """Return by which share a line's perplexity is above another's, if the task has one."""
    return {
        (kind, float(share)): mean(p["perplexity"] for p in points)
        / mean(p["perplexity"] for p in other[kind][share])
        - 1
        for kind, sizes in line.items()
        for share, points in sizes.items()
        if points and other[kind][share] and "perplexity" in points[0]
    }


def _worst(gaps: Gaps) -> str:
    kind, share = min(gaps, key=lambda key: gaps[key])
    return f"{NAMES[kind]} {share:g}×"
