"""A pretrained model to a limit: calibrated, decomposed, cut, corrected and healed in place."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maestro_lod.errors import DataError, LayerError, OptionError, require_whole
from maestro_lod.files.stage_cache import Kept, digest_of
from maestro_lod.files.tensor_file import distinct
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers, unwrapped
from maestro_lod.layers.ranks import ranks as ranks_of
from maestro_lod.model.cost import Costs, better_forms, count_params
from maestro_lod.model.inputs import Loss, split_batch
from maestro_lod.model.limits import require_limits
from maestro_lod.model.replace import copy_on_meta
from maestro_lod.model.structure import Fill, restructure, structure_of, uninitialized
from maestro_lod.model.surgery import fuse, require_usable_weights
from maestro_lod.model.survey import Plan, Tied
from maestro_lod.pretrained.correction import correct
from maestro_lod.pretrained.distillation import Healed, heal
from maestro_lod.sizes.calibrated_allocation import energies_of, ranks_within
from maestro_lod.sizes.calibration import Batches, Calibration, calibrate
from maestro_lod.sizes.outputs import SoftLoss, own_outputs
from maestro_lod.train.evaluate import recalibrate

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is, and of how much."""

_CORRECTED_ON = 8  # batches: each layer is a pass of its own over them


@dataclass(frozen=True)
class Compressed:
    """What a compression has made."""

    ranks: dict[str, int]
    """Of the low-rank layers; the others are dense at every size."""
    params: int
    """Of the model as it is saved and loaded."""
    dense_params: int
    bytes: int
    """Of the tensors in a file of the model."""
    dense_bytes: int
    healed: Healed | None = None
    """What healing did, if there was any."""

    def __str__(self) -> str:
        size = (
            f"{_share('parameters', self.params, self.dense_params)}, "
            f"{_share('bytes', self.bytes, self.dense_bytes)}"
        )
        return size if self.healed is None else f"{size}\n{self.healed}"


def _share(what: str, count: int, of: int) -> str:
    return f"{count:,} of {of:,} {what} ({count / max(1, of):.2f}×)"


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

    `max_params` is a number, or as a float a share of the model's parameters. Layers that factors
    would not make smaller stay dense. `loss(output,
    target)` says how much outputs count; by default the model's own, which need no targets:
    `maestro_lod.sizes.outputs.own_scores` is better for class scores that are a plain tensor.
    `sequential` fits the layers in order to the original, `healing` is for so many steps, with
    `soft_loss` as in `heal`. The low-rank layers are made beside the dense ones, which they replace
    at the very end: until then, and after any failure, the model is as it was.
    `keep` is a directory for what is finished: after a kill the same call goes on there.
    """
    require_limits({"max_params": max_params})
    model, data = unwrapped(model), list(batches)
    if not data:
        raise DataError("there is nothing to compress by: the data has no batch.")
    said: dict[str, Any] = {"max_params": max_params, "tied": tied, "sequential": sequential,
            "healing": require_whole("healing", healing)}  # fmt: skip
    if keep is not None:
        said |= {"model": digest_of(model.state_dict()), "batches": digest_of(data),
                 "loss": getattr(loss, "__qualname__", str(type(loss)))}  # fmt: skip
    kept = Kept(keep, said)
    plan = Plan(model, only=None, skip=None, ranks=None, tied=tied)
    require_usable_weights(plan)
    _require_inside(model, plan)
    seen = calibrate(model, _Counted(data, progress), loss=loss, tied=tied, kept=kept)
    before = _size(model)
    ranks = _chosen(model, plan, max_params, seen, kept, fitted=sequential)
    replaced = (plan.dense[name].weight for name in ranks)
    shared = replaced if sequential or healing else model.parameters()
    compressed = copy.deepcopy(model, {id(weight): weight for weight in shared})
    restructure(
        compressed, plan.structure(ranks), fill=_counting(seen.fill(), len(ranks), progress)
    )
    if sequential:
        _correct(compressed, model, data, seen, kept, progress)
        fuse(compressed)
    else:
        recalibrate(compressed, [(split_batch(batch)[0], None) for batch in data])
    healed = None
    if healing:
        healed = heal(compressed, data, teacher=model, steps=healing, soft_loss=soft_loss,
                      checkpoint=kept.file("healing"),
                      progress=lambda step, _: progress("healing", step, healing))  # fmt: skip
    _take_over(model, compressed)
    (params, size), (dense_params, dense_size) = _size(model), before
    return Compressed(ranks_of(model), params, dense_params, size, dense_size, healed)


def _size(model: nn.Module) -> tuple[int, int]:
    """Return the parameters of a model, and the bytes of its tensors in a file."""
    stored, _ = distinct(model.state_dict())
    return count_params(model), sum(tensor.nbytes for tensor in stored.values())


def _require_inside(model: nn.Module, plan: Plan) -> None:
    if "" in plan.wanted():
        raise LayerError(
            f"the model is a bare {type(model).__name__}, which cannot change in place. Compress "
            "the model that contains it, or nn.Sequential(layer)."
        )


def _chosen(
    model: nn.Module,
    plan: Plan,
    max_params: float,
    seen: Calibration,
    kept: Kept,
    *,
    fitted: bool,
) -> dict[str, int]:
    """Return the ranks that lose least within a limit, of all layers that are to have factors.

    These are the layers that factors make smaller, and, to be `fitted`, all that can be.
    """
    decomposed = restructure(copy_on_meta(model), plan.structure(), fill=uninitialized)
    layers = {name: plan.dense[name] for name in plan.wanted()}
    ranks: dict[str, int] = kept.part(
        "ranks",
        lambda: ranks_within(max_params, Costs(decomposed, None), energies_of(layers, seen)),
    )
    forms = better_forms(decomposed, ranks, copied=False)
    if "factored" not in forms.values():
        raise OptionError(
            f"max_params={max_params} is met by the model as it is: no layer would be cut. Give a "
            "smaller limit."
        )
    made = low_rank_layers(decomposed)
    return {
        name: rank
        for name, rank in ranks.items()
        if forms[name] == "factored" or (fitted and made[name].positionwise)
    }


def _counting(fill: Fill, count: int, progress: Progress) -> Fill:
    """Return a fill that reports each layer that is done."""
    done = itertools.count(1)

    def filled(name: str, dense: nn.Module, rank: int) -> LowRank:
        layer = fill(name, dense, rank)
        progress("decomposing", next(done), count)
        return layer

    return filled


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


@torch.no_grad()
def _take_over(model: nn.Module, compressed: nn.Module) -> None:
    """Give a model, in place, the layers and values of its compressed copy."""
    made = low_rank_layers(compressed)

    def fill(name: str, dense: nn.Module, rank: int) -> LowRank:
        layer = uninitialized(name, dense, rank)
        layer.u.data, layer.v.data = made[name].u.data, made[name].v.data
        return layer

    restructure(model, structure_of(compressed), fill=fill)
    for mine, others in (
        (model.named_parameters(), compressed.named_parameters()),
        (model.named_buffers(), compressed.named_buffers()),
    ):
        values = dict(others)
        for name, tensor in mine:
            tensor.copy_(values[name])


class _Counted:
    """Batches that tell how many of them were taken, each time that they are gone through."""

    def __init__(self, data: list[Any], progress: Progress) -> None:
        self._data, self._progress = data, progress

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._data):
            yield batch
            self._progress("calibrating", number + 1, len(self._data))
