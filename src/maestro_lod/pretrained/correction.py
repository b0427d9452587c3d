"""Correction: fit the layers of a cut model, one after the other, to the original's outputs.

A layer behind cut layers gets other inputs than in training. With the inputs x of the original and
x̃ of the cut model, the layer closest to the original's outputs W·x is the regression
M = W·E[x·x̃ᵀ]·E[x̃·x̃ᵀ]⁻¹, and the best one of rank k is M factored with respect to the inputs x̃. A
bias compensates for the means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from maestro_lod.errors import DataError, OptionError
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import (
    at_ranks,
    low_rank_layers,
    resolve_for,
    unwrapped,
)
from maestro_lod.model.inputs import ModelInputs, in_mode, model_device, split_batch
from maestro_lod.model.structure import UNPACKED, read_structure, restructured_copy
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.calibration import Batches, Calibration
from maestro_lod.sizes.whitening import whitened_factors
from maestro_lod.train.evaluate import recalibrate

_RIDGE = 0.1  # weight of the original layer in the regression
_ENOUGH = 4  # positions per input of a layer, the least for a regression


@torch.no_grad()
def correct(
    model: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    *,
    calibration: Calibration | None = None,
    sizes: Sequence[Mapping[str, int | float]] = ({},),
    on_progress: OnProgress = lambda done, total, note: None,
) -> int:
    """Fit linear layers and convolutions of a cut model to the original, in place and in order.

    The model keeps its ranks, and their order stays optimal for each layer; BatchNorms get new
    statistics. Not changed are layers of other kinds, layers that one call uses more than once, and
    layers with few positions in the data per input.

    >>> lod.correct(model, original, batches, calibration=seen)

    Args:
        model: The low-rank model.
        teacher: The original.
        batches: Batches (inputs, target), or inputs alone.
        calibration: The calibration of the decomposition; its gradients weight errors of outputs.
        sizes: The ranks of several sizes: each layer is fitted to its inputs in all of them.
        on_progress: `on_progress(done, total, note)` gets the number of layers that are done.

    Returns:
        The number of layers that were fitted.

    Raises:
        DataError: The data has no batch, or a batch does not reach a layer.
        OptionError: `sizes` is empty.
    """
    model, teacher = unwrapped(model), unwrapped(teacher)
    at_sizes = [resolve_for(model, ranks) for ranks in sizes]
    data = [split_batch(batch)[0] for batch in batches]
    if not data:
        raise DataError("the data to correct on has no batch. Give at least one.")
    if not at_sizes:
        raise OptionError("sizes=[] leaves nothing to correct. Give ranks, or leave it out.")
    original = _unpacked_alike(teacher, model)
    with in_mode(model, training=False), in_mode(original, training=False):
        for module in model.modules():  # so that later layers get their final inputs
            module.training = isinstance(module, _BatchNorm)
        groups = _in_order(model, data[0])
        done, fitted, count = 0, 0, sum(map(len, groups))
        for group in groups:
            pair = _Pair.measure(original, model, group[0], data, at_sizes)
            if pair.count >= _ENOUGH * len(at_sizes) * pair.cut.shape[1]:
                for name in group:
                    _fit(model, original, name, pair, calibration)
                fitted += len(group)
            done += len(group)
            on_progress(done, count, "correcting")
    recalibrate(model, [(inputs, None) for inputs in data])
    return fitted


def _unpacked_alike(teacher: nn.Module, model: nn.Module) -> nn.Module:
    """Return the teacher, in a copy with the same unpacked modules as the model if needed."""
    unpacked = {name: form for name, form in read_structure(model).items() if form == UNPACKED}
    return restructured_copy(teacher, unpacked) if unpacked else teacher


def _in_order(model: nn.Module, inputs: Any) -> list[list[str]]:
    """Return the layers in order of use, in groups with the same input."""
    layers = {name: layer for name, layer in low_rank_layers(model).items() if layer.positionwise}
    calls: list[tuple[str, Any]] = []  # inputs are referenced, so that their ids stay unique
    with ExitStack() as hooks:
        for name, layer in layers.items():
            _hook(hooks, layer, lambda x, name=name: calls.append((name, x)))  # type: ignore[misc]
        ModelInputs.wrap(inputs).to(model_device(model)).call(model)
    names = [name for name, _ in calls]
    groups: list[list[str]] = []
    last: Tensor | None = None
    for name, x in calls:
        if names.count(name) > 1:
            continue
        if x is last and layers[groups[-1][0]].input_key() == layers[name].input_key():
            groups[-1].append(name)
        else:
            groups.append([name])
        last = x
    return groups


def _hook(hooks: ExitStack, layer: nn.Module, look: Callable[[Tensor], Any]) -> None:
    def called(module: nn.Module, args: Any, kwargs: Any) -> None:
        look(next(iter((*args, *kwargs.values()))))

    hooks.callback(layer.register_forward_pre_hook(called, with_kwargs=True).remove)


class _Reached(BaseException):
    """Ends a forward at a layer, with its inputs."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


def _inputs_at(model: nn.Module, name: str, inputs: Any) -> Tensor:
    def stop(x: Tensor) -> None:
        raise _Reached(x)

    with ExitStack() as hooks:
        _hook(hooks, model.get_submodule(name), stop)
        try:
            ModelInputs.wrap(inputs).to(model_device(model)).call(model)
        except _Reached as reached:
            return reached.inputs
    raise DataError(f"a batch does not reach layer {name!r}. Give batches that do.")


@dataclass
class _Pair:
    """Sums over a layer's inputs in the original, x, and in the cut model, x̃, for each group."""

    both: Tensor  # Σ x·x̃ᵀ (groups, n, n)
    cut: Tensor  # Σ x̃·x̃ᵀ
    mean: Tensor  # Σ x (groups, n), later the mean
    cut_mean: Tensor
    count: int

    @classmethod
    def measure(
        cls,
        original: nn.Module,
        model: nn.Module,
        name: str,
        data: Iterable[Any],
        sizes: Iterable[Mapping[str, int]],
    ) -> _Pair:
        layer = model.get_submodule(name)
        assert isinstance(layer, LowRank)
        n, device = layer.matrix_shape[1], layer.u.device
        square = torch.zeros(2, layer.groups, n, n, dtype=torch.float64, device=device)
        line = torch.zeros(2, layer.groups, n, dtype=torch.float64, device=device)
        pair = cls(square[0], square[1], line[0], line[1], 0)
        for inputs in data:
            x = _inputs_at(original, name, inputs)
            for ranks in sizes:
                with at_ranks(model, ranks):
                    cut = _inputs_at(model, name, inputs)
                for rows, cut_rows in zip(layer.input_rows(x), layer.input_rows(cut), strict=True):
                    pair._add(torch.stack([*rows]).float(), torch.stack([*cut_rows]).float())
        pair.mean /= pair.count
        pair.cut_mean /= pair.count
        return pair

    def _add(self, rows: Tensor, cut: Tensor) -> None:
        self.both += rows.mT @ cut
        self.cut += cut.mT @ cut
        self.mean += rows.sum(1)
        self.cut_mean += cut.sum(1)
        self.count += rows.shape[1]

    def moments(self, *, centered: bool) -> tuple[Tensor, Tensor]:
        """Return E[x·x̃ᵀ] and E[x̃·x̃ᵀ], centered at the means on request."""
        both, cut = self.both / self.count, self.cut / self.count
        if centered:
            both = both - self.mean[:, :, None] * self.cut_mean[:, None]
            cut = cut - self.cut_mean[:, :, None] * self.cut_mean[:, None]
        return both, cut


def _fit(
    model: nn.Module, original: nn.Module, name: str, pair: _Pair, calibration: Calibration | None
) -> None:
    layer, dense = model.get_submodule(name), original.get_submodule(name)
    assert isinstance(layer, LowRank)
    weight, bias = dense.weight, dense._parameters.get("bias")
    assert isinstance(weight, Tensor)
    matrices = layer.to_matrices(weight).double()
    both, cut = pair.moments(centered=bias is not None)
    ridge = torch.eye(cut.shape[1], dtype=cut.dtype, device=cut.device)
    ridge = ridge * (_RIDGE * cut.diagonal(dim1=1, dim2=2).mean()).clamp_min(1e-12)
    regression = torch.linalg.solve(cut + ridge, (matrices @ (both + ridge)).mT).mT
    seen = None if calibration is None else calibration.moments.get(name)
    outputs = None if seen is None else seen.outputs
    layer._set_matrices(*whitened_factors(regression, layer.rank, cut, outputs))
    if bias is not None and layer.bias is not None:
        now = layer.to_matrices(layer.weight).double()
        moved = matrices @ pair.mean[:, :, None] - now @ pair.cut_mean[:, :, None]
        layer.bias.copy_(bias + moved.flatten().to(bias.dtype))
