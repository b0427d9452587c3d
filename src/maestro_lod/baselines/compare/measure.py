"""Evaluation of the models of finished trainings, in the same way for all methods."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import nn

from maestro_lod.baselines.compare.plan import Training
from maestro_lod.cli.data import Data
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import loss_of
from maestro_lod.cli.trained import Trained, search
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.atomic import alone_in, remove_leftovers
from maestro_lod.files.json_files import Shape, read_json_file, require_shape
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import cost_of
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.surgery import extract
from maestro_lod.train.evaluate import evaluate, evaluation_loss, recalibrate

FILE = "compared.json"


@dataclass(frozen=True)
class Measured:
    """Costs and scores of one model in its deployed form."""

    params: int
    macs: int
    bytes: int
    """Bytes to store, including the positions of the non-zeros of a sparse model."""
    share: float
    """Share of the bits of the dense model, without the positions of non-zeros."""
    test: dict[str, float]
    validation: dict[str, float]
    ranks: dict[str, int] | None = None
    """Ranks that the trained model was cut to."""


_MEASURED: Shape = {
    "params": int, "macs": int, "bytes": int, "share": float, "test": {str: float},
    "validation": {str: float}, "ranks": ({str: int}, None),
}  # fmt: skip

Outcome: TypeAlias = Measured | str
"""A model, or why it is missing."""


def measured(training: Training) -> dict[float | None, Outcome] | None:
    """Return the measured models of a training by size; None if one is not measured yet."""
    kept = _kept(training.run)
    wanted = training.cuts or (training.size,)
    if any(size not in kept for size in wanted):
        return None
    return {size: kept[size] for size in wanted}


def measure(training: Training) -> None:
    """Measure the models of a finished training and store the results in its directory."""
    run = training.run
    with alone_in(run.directory):
        remove_leftovers(run.directory)
        found = _kept(run)  # measured by contenders that share the run
        if training.cuts:
            found |= _cut(training)
        else:
            model, data = run.trained()
            found[training.size] = _measured(run, plain_model(model), data)
        models = [
            {"size": size, **({"reason": it} if isinstance(it, str) else asdict(it))}
            for size, it in found.items()
        ]
        run.write_json(FILE, {"weights": run.result().get("weights"), "models": models})


def plain_model(model: nn.Module, ranks: dict[str, int] | None = None) -> nn.Module:
    """Return a trained model in its deployed form, at its own ranks or at `ranks`."""
    return extract(model, ranks) if low_rank_layers(model) else model


def _kept(run: Run) -> dict[float | None, Outcome]:
    path = run.directory / FILE
    if not run.finished or not path.exists():
        return {}
    try:
        kept = read_json_file(path, {"weights": str | None, "models": [{"size": float | None}]})
        found = {entry["size"]: _outcome(entry) for entry in kept["models"]}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Remove it.") from None
    return found if kept["weights"] == run.result().get("weights") else {}


def _outcome(entry: dict[str, Any]) -> Outcome:
    if "reason" in entry:
        require_shape(entry["reason"], str, "reason")
        return str(entry["reason"])
    require_shape(entry, _MEASURED)
    return Measured(**{field.name: entry[field.name] for field in fields(Measured)})


def _cut(training: Training) -> dict[float | None, Outcome]:
    """Cut a trained model to each size by a frontier search, which is resumed if interrupted.

    Each size has a search of its own, so that it does not depend on the others.
    """
    run, trained = training.run, Trained.of(training.run)
    resume = run.directory / "frontier-params.unfinished"
    found: dict[float | None, Outcome] = {}
    for size in training.cuts:
        sizes = search(trained, cost="params", until=size, resume=resume / f"{size:g}")
        found[size] = _at_size(trained, sizes, size)
    shutil.rmtree(resume, ignore_errors=True)
    return found


def _at_size(trained: Trained, sizes: Frontier, size: float) -> Outcome:
    try:
        ranks = sizes.pick(max_params=size)
    except OptionError as error:
        return str(error)
    return _measured(trained.run, plain_model(trained.model, ranks), trained.data, ranks)


def _measured(
    run: Run, plain: nn.Module, data: Data, ranks: dict[str, int] | None = None
) -> Measured:
    """Measure a model after recalibrating its BatchNorm, as for all methods."""
    torch.manual_seed(run.recipe.seed)
    recalibrate(plain, data.train, max(1, run.recipe.recalibration))
    loss = evaluation_loss(loss_of(run.recipe))
    test = {} if data.test is None else evaluate(plain, data.test, loss)
    if data.score is not None:
        test |= data.score(plain)
    validation = {} if data.validation is None else evaluate(plain, data.validation, loss)
    cost, said = cost_of(plain, data.example), {} if ranks is not None else _said(run)
    share = cost.params / run.result()["summary"]["dense_params"]
    stored = said.get("bits", 8 * cost.bytes) + said.get("index_bits", 0)
    return Measured(
        params=int(said.get("params", cost.params)),
        macs=int(said.get("macs", cost.macs or 0)),
        bytes=-(-int(stored) // 8),
        share=said.get("relative_bits", said.get("relative_params", share)),
        test=test,
        validation=validation,
        ranks=ranks,
    )


def _said(run: Run) -> dict[str, Any]:
    """Return the size that the method reports, which counts sparse and binary weights."""
    said: dict[str, Any] = run.result().get("size") or {}
    return said
