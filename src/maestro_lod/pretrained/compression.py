"""A pretrained model to a limit: calibrated, decomposed, cut, corrected and healed in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from maestro_lod.cost import Costs
from maestro_lod.deploy.limits import require_limits
from maestro_lod.errors import DataError, require_whole
from maestro_lod.layers.ranks import unwrapped
from maestro_lod.planning import Tied, survey
from maestro_lod.pretrained.allocation import choose_ranks
from maestro_lod.pretrained.calibration import Batches, Calibration, calibrate, split_batch
from maestro_lod.pretrained.healing import heal
from maestro_lod.pretrained.outputs import SoftLoss, own_outputs
from maestro_lod.pretrained.sequential import correct
from maestro_lod.surgery import decompose
from maestro_lod.train.evaluate import Loss, recalibrate
from maestro_lod.train.shrink import cut

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is, and of how much."""

_CORRECTED_ON = 8  # batches: each layer is a pass of its own over them


@dataclass(frozen=True)
class Compressed:
    """What a compression has made."""

    ranks: dict[str, int]
    params: int
    """Of the model as it will be deployed."""
    dense_params: int

    def __str__(self) -> str:
        share = self.params / max(1, self.dense_params)
        return f"{self.params:,} of {self.dense_params:,} parameters ({share:.2f}×)"


def compress(
    model: nn.Module,
    batches: Batches,
    *,
    max_params: float,
    loss: Loss = own_outputs,
    tied: Tied = "keep",
    sequential: bool = True,
    healing: int = 0,
    soft_loss: SoftLoss | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Compressed:
    """Cut a pretrained model to a limit, in place; it stays low-rank, with ordered ranks.

    `max_params` is a number, or as a float a share of the model's parameters. `loss(output,
    target)` says how much outputs count; by default the model's own, which need no targets:
    `maestro_lod.pretrained.outputs.own_scores` is better for class scores that are a plain tensor.
    `sequential` fits the layers in order to the original, `healing` is for so many steps, with
    `soft_loss` as in `heal`. Both keep a copy of the original; without them layers are exchanged
    one by one, and the dense model is never there twice.
    """
    require_limits({"max_params": max_params})
    require_whole("healing", healing)
    model, data = unwrapped(model), list(batches)
    if not data:
        raise DataError("there is nothing to compress by: the data has no batch.")
    teacher = copy.deepcopy(model) if sequential or healing else None
    seen = calibrate(model, _Counted(data, progress), loss=loss, tied=tied)
    _decompose_one_by_one(model, seen, tied, progress)
    costs = Costs(model, None)
    ranks = choose_ranks(model, seen, max_params=max_params)
    cut(model, ranks)
    if sequential and teacher is not None:
        few = data[:_CORRECTED_ON]
        correct(model, teacher, few, calibration=seen,
                progress=lambda done, of: progress("correcting", done, of))  # fmt: skip
    else:
        recalibrate(model, [(split_batch(batch)[0], None) for batch in data])
    if healing and teacher is not None:
        heal(model, data, teacher=teacher, steps=healing, soft_loss=soft_loss,
             progress=lambda done, _: progress("healing", done, healing))  # fmt: skip
    return Compressed(ranks, costs.at(ranks).params, costs.dense.params)


class _Counted:
    """Batches that tell how many of them were taken, each time that they are gone through."""

    def __init__(self, data: list[Any], progress: Progress) -> None:
        self._data, self._progress = data, progress

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._data):
            yield batch
            self._progress("calibrating", number + 1, len(self._data))


def _decompose_one_by_one(
    model: nn.Module, seen: Calibration, tied: Tied, progress: Progress
) -> None:
    """Exchange layer after layer, so that a dense one is gone before the next is made."""
    names = list(survey(model, tied=tied).ranks)
    for number, name in enumerate(names):
        decompose(model, only=lambda layer, _, name=name: layer == name, tied=tied,
                  calibration=seen)  # fmt: skip
        progress("decomposing", number + 1, len(names))
