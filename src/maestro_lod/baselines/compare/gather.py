"""Collection of the results of finished trainings into a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import mean

from maestro_lod.baselines.compare.contenders import Contender
from maestro_lod.baselines.compare.latency import latencies
from maestro_lod.baselines.compare.measure import Measured, measured
from maestro_lod.baselines.compare.metrics import metric_in
from maestro_lod.baselines.compare.plan import Pace, Training
from maestro_lod.baselines.compare.runner import Runner, training_cost
from maestro_lod.baselines.compare.table import Comparison, Row
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost


@dataclass(frozen=True)
class Seed:
    """A measured model of one seed."""

    training: Training
    size: float | None
    model: Measured


def gather_comparison(runner: Runner, dense: Cost) -> Comparison:
    """Return the comparison of which all trainings are finished."""
    plan = runner.plan
    paces = {each.name: pace for each in runner.contenders if (pace := runner.pace(each))}
    groups: dict[tuple[str, float | None], list[Seed]] = {}
    missing = {name: reason for name, reason in runner.missing.items() if name in runner.names}
    for each in runner.contenders:
        if each.name not in paces:
            continue
        for what, outcome in _outcomes(runner, each, paces[each.name]):
            if isinstance(outcome, str):
                missing[what] = outcome
            else:
                groups.setdefault((each.name, outcome.size), []).append(outcome)
    metric, split = _judged_by(groups)
    rows = [_row(runner, key, seeds, metric, split) for key, seeds in groups.items()]
    first = {_name(key): (seeds[0].training.run, seeds[0].model) for key, seeds in groups.items()}
    times = latencies(first, plan.out / "latency.json")
    return Comparison(
        recipe=plan.base.recipe,
        metric=metric,
        split=split,
        epochs=plan.base.epochs,
        seeds=plan.seeds,
        budget=plan.budget,
        lr_trials=plan.lr_trials,
        sizes=plan.sizes,
        dense={key: float(value or 0) for key, value in asdict(dense).items()},
        trials={each.name: runner.merits(each) for each in runner.contenders}
        if plan.needs_trials
        else {},
        paces={name: (pace.rate, pace.epochs) for name, pace in paces.items()},
        rows=tuple(replace(row, latency=times[_name((row.method, row.size))]) for row in rows),
        missing=tuple(missing.items()),
    )


def _outcomes(runner: Runner, contender: Contender, pace: Pace) -> Iterator[tuple[str, Seed | str]]:
    """Yield a name for each model of a contender, and the model or why it is missing."""
    for training in runner.reported(contender, pace):
        seed = f"seed {training.run.recipe.seed}"
        if (reason := runner.why_not(training)) is not None:
            at = "" if training.size is None else f" at {training.size:g}×"
            yield f"{contender.name}{at}, {seed}", reason
            continue
        for size, model in (measured(training) or {}).items():
            at = "" if size is None else f" at {size:g}×"
            found = model if isinstance(model, str) else Seed(training, size, model)
            yield f"{contender.name}{at}, {seed}", found


def _judged_by(groups: dict[tuple[str, float | None], list[Seed]]) -> tuple[str, str]:
    """Return a metric that all models have, and its split."""
    models = [seed.model for seeds in groups.values() for seed in seeds]
    for split in ("test", "validation"):
        metrics = {metric_in(getattr(model, split)) for model in models}
        if len(metrics) == 1 and (metric := metrics.pop()) is not None:
            return metric, split
    if models:
        raise OptionError(
            "the data has neither a test nor a validation split to compare models on. Add one."
        )
    return "accuracy", "test"


def _row(
    runner: Runner, key: tuple[str, float | None], seeds: list[Seed], metric: str, split: str
) -> Row:
    models = [seed.model for seed in seeds]
    runs = [seed.training.run for seed in seeds]
    whole = runner.plan.base.epochs
    return Row(
        method=key[0],
        size=key[1],
        share=mean(model.share for model in models),
        params=mean(model.params for model in models),
        macs=mean(model.macs for model in models),
        bytes=mean(model.bytes for model in models),
        training=mean(training_cost(run) * run.result()["epochs"] / whole for run in runs),
        seconds=mean(run.result()["seconds"] for run in runs),
        scores=tuple(getattr(model, split)[metric] for model in models),
        runs=tuple(run.directory.name for run in runs),
    )


def _name(key: tuple[str, float | None]) -> str:
    return f"{key[0]} {key[1]}"
