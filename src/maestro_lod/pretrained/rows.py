"""What the weight of a layer multiplies: its inputs as rows, whatever the kind of layer.

A layer of a model computes y = W·x at many positions. Which vectors x those are is all that
calibration has to know about a kind; a kind of your own says it by

    @rows_of.register
    def _(layer: LowRankBilinear, *inputs): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from maestro_lod.layers.conv import LowRankConv, LowRankConvTranspose
from maestro_lod.layers.embedding import LowRankEmbedding
from maestro_lod.layers.linear import LowRankLinear
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.matrix import LowRankMatrix
from maestro_lod.layers.stack import LowRankStack

Rows: TypeAlias = Sequence[Tensor]
"""For each group of a layer the vectors (positions, n) that its matrix multiplies."""

_SCALARS_AT_ONCE = 2**24  # of patches that are laid out together


@singledispatch
def rows_of(layer: LowRank, *inputs: Any) -> Iterator[Rows]:
    """Yield the rows of inputs, part by part; nothing for kinds of which they are not known."""
    return iter(())


@rows_of.register
def _(layer: LowRankLinear, *inputs: Any) -> Iterator[Rows]:
    yield [inputs[0].reshape(-1, layer.in_features)]


@rows_of.register
def _(layer: LowRankConv, *inputs: Any) -> Iterator[Rows]:
    (x,), dims = inputs[:1], layer.dimensions
    x = x if x.ndim == dims + 2 else x[None]
    size = max(1, layer.positions_of(x[:1]) * layer.groups * layer.matrix_shape[1])
    for part in x.split(max(1, _SCALARS_AT_ONCE // size)):
        yield _by_group(_patches(layer, part, layer._paddings()), layer.groups, dims)


@rows_of.register
def _(layer: LowRankConvTranspose, *inputs: Any) -> Iterator[Rows]:
    (x,), dims = inputs[:1], layer.dimensions
    yield _by_group(x if x.ndim == dims + 2 else x[None], layer.groups, dims)


@rows_of.register
def _(layer: LowRankStack, *inputs: Any) -> Iterator[Rows]:
    rows, experts = inputs
    yield torch.split(rows, experts.bincount(minlength=layer.groups).tolist())


@singledispatch
def output_rows_of(layer: LowRank, output: Tensor, *inputs: Any) -> Rows | None:
    """Return outputs, or their gradients, as rows (positions, m) for each group.

    None is for kinds of which they are not known. The inputs are those that gave the outputs.
    """
    return None


@output_rows_of.register
def _(layer: LowRankLinear, output: Tensor, *inputs: Any) -> Rows | None:
    return [output.reshape(-1, layer.out_features)]


@output_rows_of.register
def _(layer: LowRankMatrix, output: Tensor, *inputs: Any) -> Rows | None:
    return [output.reshape(-1, layer.matrix_shape[0])]


@output_rows_of.register
def _(layer: LowRankEmbedding, output: Tensor, *inputs: Any) -> Rows | None:
    return [output.reshape(-1, layer.embedding_dim)]


@output_rows_of.register
def _(layer: LowRankConv, output: Tensor, *inputs: Any) -> Rows | None:
    dims = layer.dimensions
    return _by_group(output if output.ndim == dims + 2 else output[None], layer.groups, dims)


@output_rows_of.register
def _(layer: LowRankConvTranspose, output: Tensor, *inputs: Any) -> Rows | None:
    dims = layer.dimensions  # each input position adds a patch to the outputs
    output = output if output.ndim == dims + 2 else output[None]
    amounts = [(amount, amount) for amount in layer.padding]
    return _by_group(_patches(layer, output, amounts), layer.groups, dims)


@output_rows_of.register
def _(layer: LowRankStack, output: Tensor, *inputs: Any) -> Rows | None:
    return torch.split(output, inputs[1].bincount(minlength=layer.groups).tolist())


def _patches(layer: Any, x: Tensor, paddings: Sequence[tuple[int, int]]) -> Tensor:
    """Return the patches (N, channels, *positions, *kernel) under a convolution's kernel."""
    amounts = [amount for both in reversed(paddings) for amount in both]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, amounts, mode=mode)
    for i, (size, step) in enumerate(zip(layer.kernel_size, layer.stride, strict=True)):
        reach = layer.dilation[i] * (size - 1) + 1
        x = x.unfold(2 + i, reach, step)[..., :: layer.dilation[i]]
    return x


def _by_group(x: Tensor, groups: int, dims: int) -> Rows:
    """Turn (N, channels, *positions, *kernel) into rows for each group of channels."""
    x = x.reshape(len(x), groups, -1, *x.shape[2:]).movedim(
        1, 0
    )  # (groups, N, channels/groups, ...)
    return tuple(x.movedim(2, 2 + dims).flatten(1, 1 + dims).flatten(2).unbind())
