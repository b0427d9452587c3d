"""Compression of a pretrained model: calibrate, decompose, cut, correct and distill in place."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from maestro_lod.errors import DataError, LayerError, OptionError, require_whole
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.files.tensor_file import distinct
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers, unwrapped
from maestro_lod.layers.ranks import ranks as ranks_of
from maestro_lod.model.cost import Costs, better_forms, count_params
from maestro_lod.model.inputs import Loss, split_batch
from maestro_lod.model.limits import require_limits
from maestro_lod.model.replace import copy_on_meta
from maestro_lod.model.structure import Fill, read_structure, restructure, uninitialized
from maestro_lod.model.surgery import fuse, require_usable_weights
from maestro_lod.model.survey import Plan, Tied
from maestro_lod.pretrained.correction import correct as correct_layers
from maestro_lod.pretrained.distillation import Distillation, Distilled
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.calibrated_allocation import rank_energies, ranks_within
from maestro_lod.sizes.calibration import Batches, Calibration, calibrate_plan
from maestro_lod.sizes.outputs import SoftLoss, own_outputs
from maestro_lod.train.evaluate import recalibrate

_CORRECTION_BATCHES = 8  # each layer needs its own pass over them


@dataclass(frozen=True)
class Compressed:
    """The result of a compression: ranks and sizes."""

    ranks: dict[str, int]
    """Of the low-rank layers; the others stay dense."""
    params: int
    """Of the compressed model."""
    dense_params: int
    bytes: int
    """Of the tensors in a file of the model."""
    dense_bytes: int
    distilled: Distilled | None = None
    """The result of the distillation; None if there was none."""

    def __str__(self) -> str:
        sizes = (
            f"{_share('parameters', self.params, self.dense_params)}, "
            f"{_share('bytes', self.bytes, self.dense_bytes)}"
        )
        return sizes if self.distilled is None else f"{sizes}\n{self.distilled}"


def _share(unit: str, count: int, total: int) -> str:
    return f"{count:,} of {total:,} {unit} ({count / max(1, total):.2f}×)"


def compress(
    model: nn.Module,
    batches: Batches,
    *,
    max_params: float,
    loss: Loss = own_outputs,
    tied: Tied = "keep",
    correct: bool = True,
    distill_steps: int = 0,
    soft_loss: SoftLoss | None = None,
    resume: str | os.PathLike[str] | None = None,
    on_progress: OnProgress = lambda done, total, note: None,
) -> Compressed:
    """Cut a pretrained model to a limit, in place; it stays low-rank, with ordered ranks.

    Layers that factors would not make smaller stay dense. The low-rank layers are made next to the
    dense ones, which they replace at the very end: until then, and after any failure, the model is
    unchanged.

    >>> done = lod.compress(model, batches, max_params=0.5, distill_steps=500)

    Args:
        model: The pretrained model.
        batches: Batches (inputs, target), or inputs alone.
        max_params: The most parameters: a number, or as a float a share of the model's.
        loss: `loss(output, target)`, which weights the errors of outputs. By default it is computed
            from the outputs alone and needs no targets; `maestro_lod.sizes.outputs.own_scores` is
            better for class scores that are a plain tensor.
        tied: What happens to layers that share a weight, as for `decompose`.
        correct: Whether to fit the layers one after the other to the original.
        distill_steps: The number of steps to train by the original at the end.
        soft_loss: `soft_loss(output, teacher)`, as for `distill`.
        resume: A directory for finished stages: after an interruption, the same call resumes there.
        on_progress: `on_progress(done, total, note)` gets the progress of each stage; the note is
            "calibrating", "decomposing", "correcting" or "distilling".

    Returns:
        The ranks, and the sizes of the model before and after.

    Raises:
        DataError: The data has no batch.
        LayerError: A layer has weights that are not finite, or the model is a bare layer.
        OptionError: The limit cannot be reached or cuts nothing, or `resume` belongs to another
            call.
    """
    require_limits({"max_params": max_params})
    require_whole("distill_steps", distill_steps)
    model, data = unwrapped(model), list(batches)
    if not data:
        raise DataError("the data to compress by has no batch. Give at least one.")
    plan = Plan(model, only=None, skip=None, ranks=None, tied=tied)
    require_usable_weights(plan)
    _require_inside(model, plan)
    settings = {"max_params": max_params, "tied": tied, "correct": correct,
                "distill_steps": distill_steps, "loss": loss, "soft_loss": soft_loss}  # fmt: skip
    cache = StageCache(resume, {**settings, "model": model, "data": data})
    calibration = calibrate_plan(
        model, plan, _Counted(data, on_progress), loss=loss, cache=cache, stacklevel=3
    )
    before = _size(model)
    ranks = _choose_ranks(model, plan, max_params, calibration, cache, corrected=correct)
    replaced = (plan.dense[name].weight for name in ranks)
    shared = replaced if correct or distill_steps else model.parameters()
    compressed = copy.deepcopy(model, {id(weight): weight for weight in shared})
    fill = _reporting(calibration.fill(), len(ranks), on_progress)
    restructure(compressed, plan.structure(ranks), fill=fill)
    if correct:
        _correct(compressed, model, data, calibration, cache, on_progress)
        fuse(compressed)
    else:
        recalibrate(compressed, [(split_batch(batch)[0], None) for batch in data])
    distilled = None
    if distill_steps:
        distillation = Distillation(steps=distill_steps, soft_loss=soft_loss)
        distilled = distillation.run(compressed, model, data, cache, on_progress)
    _take_over(model, compressed)
    (params, size), (dense_params, dense_size) = _size(model), before
    return Compressed(ranks_of(model), params, dense_params, size, dense_size, distilled)


def _size(model: nn.Module) -> tuple[int, int]:
    """Return the parameters of a model, and the bytes of its tensors in a file."""
    stored, _ = distinct(model.state_dict())
    return count_params(model), sum(tensor.nbytes for tensor in stored.values())


def _require_inside(model: nn.Module, plan: Plan) -> None:
    if "" in plan.planned():
        raise LayerError(
            f"the model is a single layer, which cannot be replaced in place: "
            f"{type(model).__name__}. Compress the model that contains it, or "
            "nn.Sequential(layer)."
        )


def _choose_ranks(
    model: nn.Module,
    plan: Plan,
    max_params: float,
    calibration: Calibration,
    cache: StageCache,
    *,
    corrected: bool,
) -> dict[str, int]:
    """Return the ranks with the smallest loss within a limit, for the layers to decompose.

    These are the layers that become smaller as factors and, with a correction, all that it can fit.
    """
    decomposed = restructure(copy_on_meta(model), plan.structure(), fill=uninitialized)
    layers = {name: plan.dense[name] for name in plan.planned()}
    ranks: dict[str, int] = cache.get_or_compute(
        "ranks",
        lambda: ranks_within(
            max_params, Costs(decomposed, None, copied=False), rank_energies(layers, calibration)
        ),
    )
    forms = better_forms(decomposed, ranks, copied=False)
    if "factored" not in forms.values():
        raise OptionError(
            f"the model already meets max_params={max_params}, so that no layer would be cut. Give "
            "a smaller limit."
        )
    made = low_rank_layers(decomposed)
    return {
        name: rank
        for name, rank in ranks.items()
        if forms[name] == "factored" or (corrected and made[name].positionwise)
    }


def _reporting(fill: Fill, count: int, on_progress: OnProgress) -> Fill:
    """Return a fill that reports each finished layer."""
    done = itertools.count(1)

    def filled(name: str, dense: nn.Module, rank: int) -> LowRank:
        layer = fill(name, dense, rank)
        on_progress(next(done), count, "decomposing")
        return layer

    return filled


def _correct(
    model: nn.Module,
    teacher: nn.Module,
    data: list[Any],
    calibration: Calibration,
    cache: StageCache,
    on_progress: OnProgress,
) -> None:
    def corrected() -> dict[str, Any]:
        correct_layers(model, teacher, data[:_CORRECTION_BATCHES], calibration=calibration,
                       on_progress=on_progress)  # fmt: skip
        return model.state_dict()

    model.load_state_dict(cache.get_or_compute("corrected", corrected))


@torch.no_grad()
def _take_over(model: nn.Module, compressed: nn.Module) -> None:
    """Replace the layers and values of a model by those of its compressed copy, in place."""
    made = low_rank_layers(compressed)

    def fill(name: str, dense: nn.Module, rank: int) -> LowRank:
        layer = uninitialized(name, dense, rank)
        layer.u.data, layer.v.data = made[name].u.data, made[name].v.data
        return layer

    restructure(model, read_structure(compressed), fill=fill)
    for targets, sources in (
        (model.named_parameters(), compressed.named_parameters()),
        (model.named_buffers(), compressed.named_buffers()),
    ):
        values = dict(sources)
        for name, tensor in targets:
            tensor.copy_(values[name])


class _Counted:
    """Batches that report progress whenever they are iterated."""

    def __init__(self, data: list[Any], on_progress: OnProgress) -> None:
        self._data, self._on_progress = data, on_progress

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._data):
            yield batch
            self._on_progress(number + 1, len(self._data), "calibrating")
