"""A pretrained model to a limit: calibrated, decomposed, cut, corrected and healed in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from maestro_lod.cost import Costs
from maestro_lod.deploy.limits import require_limits
from maestro_lod.errors import DataError, require_whole
from maestro_lod.handover import copy_on_meta
from maestro_lod.layers.ranks import unwrapped
from maestro_lod.planning import Plan, Tied
from maestro_lod.pretrained.allocation import energies_of, ranks_within
from maestro_lod.pretrained.calibration import Batches, Calibration, calibrate, split_batch
from maestro_lod.pretrained.healing import heal
from maestro_lod.pretrained.kept import Kept
from maestro_lod.pretrained.outputs import SoftLoss, own_outputs
from maestro_lod.pretrained.sequential import correct
from maestro_lod.structure import restructure, uninitialized
from maestro_lod.surgery import decompose
from maestro_lod.train.evaluate import Loss, recalibrate

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
    keep: Path | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Compressed:
    """Cut a pretrained model to a limit, in place; it stays low-rank, with ordered ranks.

    `max_params` is a number, or as a float a share of the model's parameters. `loss(output,
    target)` says how much outputs count; by default the model's own, which need no targets:
    `maestro_lod.pretrained.outputs.own_scores` is better for class scores that are a plain tensor.
    `sequential` fits the layers in order to the original, `healing` is for so many steps, with
    `soft_loss` as in `heal`. Both hold a copy of the original; without them nothing is there twice.
    `keep` is a directory for what is finished: after a kill the same call goes on there.
    """
    require_limits({"max_params": max_params})
    model, data = unwrapped(model), list(batches)
    if not data:
        raise DataError("there is nothing to compress by: the data has no batch.")
    said = {"max_params": max_params, "tied": tied, "sequential": sequential,
            "healing": require_whole("healing", healing)}  # fmt: skip
    kept = Kept(keep, {**said, "batches": len(data)})
    teacher = copy.deepcopy(model) if sequential or healing else None
    done = _cut(model, data, max_params, loss, tied, kept, progress)
    if teacher is not None and sequential:
        _correct(model, teacher, data, done.seen, kept, progress)
    else:
        recalibrate(model, [(split_batch(batch)[0], None) for batch in data])
    if teacher is not None and healing:
        heal(model, data, teacher=teacher, steps=healing, soft_loss=soft_loss,
             checkpoint=kept.file("healing"),
             progress=lambda step, _: progress("healing", step, healing))  # fmt: skip
    return Compressed(done.ranks, done.costs.at(done.ranks).params, done.costs.dense.params)


class _Cut(NamedTuple):
    """What is known of a model that was cut."""

    ranks: dict[str, int]
    costs: Costs
    seen: Calibration


def _cut(
    model: nn.Module,
    data: list[Any],
    max_params: float,
    loss: Loss,
    tied: Tied,
    kept: Kept,
    progress: Progress,
) -> _Cut:
    """Calibrate a model, choose the ranks that lose least, and decompose it to those."""
    seen = calibrate(model, _Counted(data, progress), loss=loss, tied=tied, kept=kept)
    ranks, costs = _chosen(model, max_params, tied, seen, kept)
    for number, (name, rank) in enumerate(ranks.items()):  # a layer is gone before the next is made
        decompose(model, only=lambda layer, _, name=name: layer == name, ranks={name: rank},
                  tied=tied, calibration=seen)  # fmt: skip
        progress("decomposing", number + 1, len(ranks))
    return _Cut(ranks, costs, seen)


def _chosen(
    model: nn.Module, max_params: float, tied: Tied, seen: Calibration, kept: Kept
) -> tuple[dict[str, int], Costs]:
    """Return the ranks that lose least within a limit, and what the model costs at any ranks."""
    plan = Plan(model, only=None, skip=None, ranks=None, tied=tied)
    costs = Costs(restructure(copy_on_meta(model), plan.structure(), fill=uninitialized), None)
    layers = {name: plan.dense[name] for name in plan.wanted()}
    ranks: dict[str, int] = kept.part(
        "ranks", lambda: ranks_within(max_params, costs, energies_of(layers, seen))
    )
    return ranks, costs


def _correct(
    model: nn.Module,
    teacher: nn.Module,
    data: list[Any],
    seen: Calibration,
    kept: Kept,
    progress: Progress,
) -> None:
    def corrected() -> dict[str, Any]:
        correct(model, teacher, data[:_CORRECTED_ON], calibration=seen,
                progress=lambda done, of: progress("correcting", done, of))  # fmt: skip
        return model.state_dict()

    model.load_state_dict(kept.part("corrected", corrected))


class _Counted:
    """Batches that tell how many of them were taken, each time that they are gone through."""

    def __init__(self, data: list[Any], progress: Progress) -> None:
        self._data, self._progress = data, progress

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._data):
            yield batch
            self._progress("calibrating", number + 1, len(self._data))
