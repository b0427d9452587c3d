"""The training samples that sizes of a model are judged on: the same ones each time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import OptionError
from maestro_lod.model.inputs import (
    Batch,
    Loss,
    ModelInputs,
    device_of,
    on_device,
    samples_in,
    split_batch,
)
from maestro_lod.train.evaluate import Score, sums

SAMPLES = 2048  # of the training set, in the one batch that a search looks at; as in the paper


def first_samples(train_data: Iterable[Batch], count: int = SAMPLES) -> list[tuple[Any, Any]]:
    """Return the same training samples each time, as one batch where they can be put together.

    Data that draws from torch's global generator begins at a fixed seed; afterwards the generator
    is where it was.
    """
    batches: list[tuple[Any, Any]] = []
    found = 0
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for inputs, target in map(split_batch, train_data):
            batches.append((inputs, target))
            found += samples_in(target)
            if found >= count:
                break
    if not batches:
        raise OptionError("the training data is empty: there is nothing to search on.")
    if all(isinstance(part, Tensor) for batch in batches for part in batch):
        inputs = torch.cat([inputs for inputs, _ in batches])[:count]
        return [(inputs, torch.cat([target for _, target in batches])[:count])]
    return batches


def mean_loss(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> float:
    """Return the mean loss over all targets of some batches; NaN if none of them counts."""
    device, score = device_of(model), Score()
    for inputs, target in map(split_batch, batches):
        target = on_device(target, device)
        output = ModelInputs.of(inputs).to(device).call(model)
        score.add(loss(output, target), output, target, summed=sums(loss))
    return score.means().get("loss", math.nan)


def judge(train_data: Iterable[Batch], loss: Loss) -> Callable[[nn.Module], float]:
    """Return what tells the loss of a model on the first samples, which are kept once needed."""

    @functools.cache
    def batches() -> list[tuple[Any, Any]]:
        return first_samples(train_data)

    return lambda model: mean_loss(model, batches(), loss)
