"""Measurements of `lod bench`: the model of a run, dense, as trained and at smaller sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn

from maestro_lod.cli.trained import Trained, frontier_of
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost, cost_of
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import ModelInputs, model_device
from maestro_lod.model.surgery import extract
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.choice import Choice
from maestro_lod.sizes.timing import ROUNDS, eager, interleaved, relative
from maestro_lod.text import table


def bench(
    trained: Trained,
    *,
    shares: Sequence[float] = (0.5, 0.25, 0.1),
    batch: int = 1,
    reference: Trained | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Measure the dense model, the trained model and smaller sizes.

    Args:
        trained: The model of a finished run.
        shares: The smaller sizes, as shares of the dense MACs.
        batch: Batch size of the timings.
        reference: Another run of the same task, such as a dense training.
        on_progress: Called while sizes are searched, as in `frontier`.

    Returns:
        A table of cost, latency and test metrics.

    Raises:
        OptionError: If the two runs were trained on different data.
    """
    sizes, example = frontier_of(trained, on_progress), trained.example(batch)
    models = _models_to_bench(trained, sizes, shares)
    if reference is not None:
        _require_same_data(trained, reference)
        models = {f"run {reference.run.directory.name}": reference.dense(), **models}
    tests = {name: trained.tested(model) for name, model in models.items()}
    runs = ModelInputs.from_example(example).drawn(model_device(trained.model))
    variants = {name: eager(model, runs) for name, model in models.items()}
    times = interleaved(variants, rounds=ROUNDS)
    costs = {name: cost_of(model, trained.data.example) for name, model in models.items()}
    rows = [
        (
            name,
            *_relative_costs(costs[name], costs["dense form"]),
            _relative_time(*relative(times, name, "dense form")),
            *(f"{value:.4f}" for value in tests[name].values()),
        )
        for name in models
    ]
    header = ("", "params", "MACs", "bytes", "latency", *(f"test {n}" for n in tests["dense form"]))
    method = (
        f"batch {batch}, {torch.get_num_threads()} threads, medians of {ROUNDS} interleaved rounds"
    )
    return f"{table(header, rows, right=range(1, len(header)))}\n{method}"


def _require_same_data(trained: Trained, reference: Trained) -> None:
    if trained.run.recipe.data != reference.run.recipe.data:
        raise OptionError(
            f"{reference.run.directory} was not trained on the data of {trained.run.directory}. "
            "Give "
            "a run on the same data."
        )


def _models_to_bench(
    trained: Trained, sizes: Frontier, shares: Sequence[float]
) -> dict[str, nn.Module]:
    """Return the dense model, the trained model and the sizes that the frontier reaches."""
    model = trained.model
    models = {"dense form": trained.dense(), "as trained": extract(model)}
    for share in shares:
        with suppress(OptionError):  # the frontier has no size that small
            choice = Choice(model, sizes, {"max_macs": share}, trained.data.example)
            models[f"≤ {share:.0%} of MACs"] = choice.best()[1]
    return models


def _relative_costs(cost: Cost, dense: Cost) -> tuple[str, str, str]:
    of_params, of_macs = cost.params / dense.params, (cost.macs or 0) / (dense.macs or 1)
    return (
        f"{cost.params:,} ({of_params:.2f}×)",
        f"{cost.macs:,} ({of_macs:.2f}×)",
        f"{cost.bytes:,}",
    )


def _relative_time(seconds: float, ratio: float) -> str:
    return f"{1e3 * seconds:.3f} ms ({ratio:.2f}×)"
