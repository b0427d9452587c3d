"""Compression of a pretrained model: calibrate, measure, cut, correct and distill in place."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from maestro_lod.errors import DataError, LayerError, OptionError, require_whole
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.files.tensor_file import distinct
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import at_ranks, low_rank_layers, unwrapped
from maestro_lod.layers.ranks import ranks as ranks_of
from maestro_lod.model.cost import Costs, better_forms, count_params
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import (
    Loss,
    ModelInputs,
    model_device,
    require_number,
    split_batch,
)
from maestro_lod.model.limits import Size, require_limits
from maestro_lod.model.structure import Fill, read_structure, restructure, uninitialized
from maestro_lod.model.surgery import require_usable_weights
from maestro_lod.model.survey import Plan, Tied
from maestro_lod.pretrained.correction import correct_blocks
from maestro_lod.pretrained.distillation import Distillation, Distilled, Sizes
from maestro_lod.pretrained.precision import in_single_precision, single
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.calibrated_allocation import limit_on_params, rank_energies, ranks_by_losses
from maestro_lod.sizes.calibration import Batches, calibrate_plan
from maestro_lod.sizes.measured_allocation import FEW_SHARES, measure_losses
from maestro_lod.sizes.outputs import SoftLoss, own_outputs, soft_loss_for
from maestro_lod.sizes.replay import alone_with
from maestro_lod.train.evaluate import recalibrate

_MEASURED = 1.5  # samples to measure on, per layer and sample of calibration


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
    frontier: Frontier
    """The sizes that were asked for, for `save`, `extract` and `load`; their loss is the distance
    to the original on the first batch."""
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
    max_params: float | None = None,
    sizes: Sequence[float] | None = None,
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

    Ranks are allocated by measurement: one layer at a time is cut to a few ranks, and the distance
    of the model's outputs to the original's is measured on a few samples of the first batch.

    >>> done = lod.compress(model, batches, max_params=0.5, distill_steps=500)
    >>> done = lod.compress(model, batches, sizes=[0.9, 0.7, 0.5])
    >>> half = lod.extract(model, done.frontier.pick(max_params=0.5))

    Args:
        model: The pretrained model.
        batches: Batches (inputs, target), or inputs alone.
        max_params: The most parameters: a number, or as a float a share of the model's.
        sizes: Several such limits instead. The model keeps the ranks that any of them needs; a
            smaller size never has more ranks in a layer than a larger one.
        loss: `loss(output, target)`, which weights the errors of outputs. By default it is computed
            from the outputs alone and needs no targets; `maestro_lod.sizes.outputs.own_scores` is
            better for class scores that are a plain tensor.
        tied: What happens to layers that share a weight, as for `decompose`.
        correct: Whether to train the blocks one after the other to the original's outputs, as
            `correct` does.
        distill_steps: The number of steps to train by the original at the end.
        soft_loss: `soft_loss(output, teacher)`, as for `distill`.
        resume: A directory for finished stages: after an interruption, the same call resumes there.
        on_progress: `on_progress(done, total, note)` gets the progress of each stage; the note is
            "calibrating", "decomposing", "measuring", "correcting" or "distilling".

    Returns:
        The ranks, and the sizes of the model before and after.

    Raises:
        DataError: The data has no batch.
        LayerError: A layer has weights that are not finite, or the model is a bare layer.
        OptionError: The limit cannot be reached or cuts nothing, or `resume` belongs to another
            call.
    """
    limits = _require_limits(max_params, sizes)
    require_whole("distill_steps", distill_steps)
    model, data = unwrapped(model), list(batches)
    if not data:
        raise DataError("the data to compress by has no batch. Give at least one.")
    plan = Plan(model, only=None, skip=None, ranks=None, tied=tied)
    require_usable_weights(plan)
    _require_inside(model, plan)
    settings = {"max_params": str(limits), "tied": tied, "correct": correct,
                "distill_steps": distill_steps, "loss": loss, "soft_loss": soft_loss}  # fmt: skip
    cache = StageCache(resume, {**settings, "model": model, "data": data})
    before = _size(model)
    with in_single_precision(model):
        stages = _Stages(
            model, plan, [single(batch) for batch in data], soft_loss, cache, on_progress
        )
        found = stages.choose(limits, loss)
        compressed = stages.cut([*found.values()], shared=not (correct or distill_steps))
        if correct:
            stages.correct(compressed, [*found.values()])
        else:
            recalibrate(compressed, [(split_batch(batch)[0], None) for batch in stages.data])
        distilled = None
        if distill_steps:
            together: Sizes = "below" if len(found) == 1 else [*found.values()]
            distillation = Distillation(distill_steps, sizes=together, soft_loss=soft_loss)
            distilled = distillation.run(compressed, model, stages.data, cache, on_progress)
        frontier = stages.frontier(compressed, found)
    _take_over(model, compressed)
    (params, size), (dense_params, dense_size) = _size(model), before
    return Compressed(ranks_of(model), params, dense_params, size, dense_size, frontier, distilled)


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


def _require_limits(max_params: float | None, sizes: Sequence[float] | None) -> list[float]:
    if (max_params is None) == (sizes is None):
        raise OptionError(
            f"compress got max_params={max_params!r} and sizes={sizes!r}. Give one of them."
        )
    limits = [max_params] if max_params is not None else [*(sizes or ())]
    if not limits:
        raise OptionError("sizes=[] leaves nothing to compress to. Give sizes such as [0.7, 0.5].")
    for limit in limits:
        require_limits({"max_params": limit})
    return limits


class _Stages:
    """The stages of one compression; what each of them has found is in the cache."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        data: list[Any],
        soft_loss: SoftLoss | None,
        cache: StageCache,
        on_progress: OnProgress,
    ) -> None:
        self._model, self._plan, self.data = model, plan, data
        self._cache, self._on_progress = cache, on_progress
        self._distance = Distance(model, data, len(plan.planned()), soft_loss)

    def choose(self, limits: Sequence[float], loss: Loss) -> dict[int, dict[str, int]]:
        """Return the ranks for each limit on the parameters, the largest first."""
        model, plan, cache = self._model, self._plan, self._cache
        data = _Counted(self.data, self._on_progress)
        calibration = calibrate_plan(model, plan, data, loss=loss, cache=cache, stacklevel=4)
        shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
        self._whole = copy.deepcopy(model, dict(shared))
        fill = _reporting(calibration.fill(), len(plan.planned()), self._on_progress)
        restructure(self._whole, plan.structure(), fill=fill)
        layers = {name: plan.dense[name] for name in plan.planned()}
        losses = cache.get_or_compute(
            "losses",
            lambda: measure_losses(
                self._whole, self._distance, rank_energies(layers, calibration),
                shares=FEW_SHARES, on_progress=self._on_progress,
            ),
        )  # fmt: skip
        self._costs = Costs(self._whole, None, copied=False)
        counts = [limit_on_params(limit, self._costs) for limit in limits]
        found = ranks_by_losses(self._whole, self._costs, losses, counts)
        self._cut_names = {
            name
            for ranks in found.values()
            for name, form in better_forms(self._whole, ranks, copied=False).items()
            if form == "factored"
        }
        if not self._cut_names:
            raise OptionError(
                f"the model already meets max_params={max(limits)}, so that no layer would be cut. "
                "Give a smaller limit."
            )
        return {
            limit: {name: rank for name, rank in ranks.items() if name in self._cut_names}
            for limit, ranks in found.items()
        }

    def cut(self, sizes: Sequence[Mapping[str, int]], *, shared: bool) -> nn.Module:
        """Return a copy of the model with the ranks that any of the sizes needs.

        Only layers that are smaller as factors at one of the sizes are low-rank. The copy shares
        all weights with the model that are not replaced, or none.
        """
        ranks = {name: max(of[name] for of in sizes) for name in sizes[0]}
        whole = low_rank_layers(self._whole)
        kept = self._model.parameters() if shared else (self._plan.dense[n].weight for n in ranks)
        compressed = copy.deepcopy(self._model, {id(weight): weight for weight in kept})

        def fill(name: str, dense: nn.Module, rank: int) -> LowRank:
            layer = uninitialized(name, dense, rank)
            layer.u.data.copy_(whole[name].u.detach().narrow(1, 0, rank))
            layer.v.data.copy_(whole[name].v.detach().narrow(0, 0, rank))
            return layer

        restructure(compressed, self._plan.structure(ranks), fill=fill)
        del self._whole
        return compressed

    def correct(self, compressed: nn.Module, sizes: Sequence[Mapping[str, int]]) -> None:
        """Train the blocks of the cut model."""
        correct_blocks(compressed, self._model, self.data, sizes, self._cache, self._on_progress)

    def frontier(self, compressed: nn.Module, found: Mapping[int, dict[str, int]]) -> Frontier:
        """Return the sizes that were asked for, with their distance to the original."""
        costs = Costs(compressed, None, copied=False)
        points = []
        with alone_with(compressed):
            for ranks in found.values():
                with at_ranks(compressed, ranks):
                    distance = self._distance(compressed)
                points.append(Size(ranks, distance, None, **asdict(costs.at(ranks))))
        dense = Size({}, points[0].loss, None, **asdict(costs.dense))
        return Frontier(tuple(points), dense, "measured", "params")


class Distance:
    """The distance of a model's outputs to the original's, on a few samples of the first batch.

    Measuring one layer after the other takes about as long as calibration.
    """

    def __init__(
        self, model: nn.Module, data: list[Any], layers: int, soft_loss: SoftLoss | None
    ) -> None:
        inputs = ModelInputs.wrap(split_batch(data[0])[0]).to(model_device(model))
        self._inputs = _first(inputs, len(data), layers)
        with alone_with(model):
            self._output = self._inputs.call(model)
        self._compare = soft_loss or soft_loss_for(self._output)

    def __call__(self, model: nn.Module) -> float:
        return require_number(self._compare(self._inputs.call(model), self._output), "soft_loss")


def _first(inputs: ModelInputs, batches: int, layers: int) -> ModelInputs:
    """Return the first samples of a batch: fewer of them for models with more layers.

    All of them if it is not clear which dimension counts the samples.
    """
    tensors = inputs.tensors
    if inputs.is_packed or not tensors or not tensors[0].ndim:
        return inputs
    size = len(tensors[0])
    if any(size in tensor.shape[1:] or tensor.shape[:1] != (size,) for tensor in tensors):
        return inputs
    few = math.ceil(_MEASURED * size * batches / max(1, layers))
    return inputs.map_tensors(lambda tensor: tensor[:few])


def _reporting(fill: Fill, count: int, on_progress: OnProgress) -> Fill:
    """Return a fill that reports each finished layer."""
    done = itertools.count(1)

    def filled(name: str, dense: nn.Module, rank: int) -> LowRank:
        layer = fill(name, dense, rank)
        on_progress(next(done), count, "decomposing")
        return layer

    return filled


@torch.no_grad()
def _take_over(model: nn.Module, compressed: nn.Module) -> None:
    """Replace the layers and values of a model by those of its compressed copy, in place."""
    made = low_rank_layers(compressed)

    def fill(name: str, dense: nn.Module, rank: int) -> LowRank:
        layer = uninitialized(name, dense, rank)
        dtype = layer.u.dtype
        layer.u.data, layer.v.data = made[name].u.data.to(dtype), made[name].v.data.to(dtype)
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
