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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from maestro_lod.layers.conv import LowRankConv, LowRankConvTranspose
from maestro_lod.layers.linear import LowRankLinear
from maestro_lod.layers.lowrank import LowRank
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
        yield _by_group(_patches(layer, part), layer.groups, dims)


@rows_of.register
def _(layer: LowRankConvTranspose, *inputs: Any) -> Iterator[Rows]:
    (x,), dims = inputs[:1], layer.dimensions
    yield _by_group(x if x.ndim == dims + 2 else x[None], layer.groups, dims)


@rows_of.register
def _(layer: LowRankStack, *inputs: Any) -> Iterator[Rows]:
    rows, experts = inputs
    yield torch.split(rows, experts.bincount(minlength=layer.groups).tolist())


@singledispatch
def output_rows_of(layer: LowRank, output: Tensor) -> Rows | None:
    """Return outputs as rows (positions, m) for each group, None for kinds that cannot be."""
    return None


@output_rows_of.register
def _(layer: LowRankLinear, output: Tensor) -> Rows | None:
    return [output.reshape(-1, layer.out_features)]


@output_rows_of.register
def _(layer: LowRankConv, output: Tensor) -> Rows | None:
    dims = layer.dimensions
    return _by_group(output if output.ndim == dims + 2 else output[None], layer.groups, dims)


def _patches(layer: LowRankConv, x: Tensor) -> Tensor:
    """Return the patches (N, channels, *positions, *kernel) that a convolution multiplies by."""
    amounts = [amount for both in reversed(layer._paddings()) for amount in both]
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


# -- recurrent layers, which multiply inside of torch's kernels ----------------------------------


@torch.no_grad()
def recurrent_rows(
    layer: nn.RNNBase, inputs: Any, hidden: Any = None
) -> Iterator[tuple[str, Rows]]:
    """Yield for each input and hidden weight of a recurrent layer what it multiplies, by name.

    Each layer is run alone, since torch does not show what passes between them. What a projection
    (`proj_size`) multiplies stays hidden.
    """
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    for number in range(layer.num_layers):
        outputs, _ = _alone(layer, number, inputs)(inputs, _of_layer(layer, hidden, number))
        steps = inputs.data if isinstance(inputs, PackedSequence) else inputs
        padded, lengths = _padded(layer, outputs)
        width = padded.shape[-1] // len(directions)
        for index, suffix in enumerate(directions):
            yield f"weight_ih_l{number}{suffix}", [steps.reshape(-1, steps.shape[-1])]
            own = padded[..., index * width : (index + 1) * width]
            yield f"weight_hh_l{number}{suffix}", [_before(own, lengths, reverse=bool(suffix))]
        inputs = outputs


def _alone(layer: nn.RNNBase, number: int, inputs: Any) -> nn.RNNBase:
    """Return one layer of a recurrent stack by itself, over the same memory."""
    options: dict[str, Any] = {"nonlinearity": layer.nonlinearity} if type(layer) is nn.RNN else {}
    if isinstance(layer, nn.LSTM):
        options["proj_size"] = layer.proj_size
    width = (inputs.data if isinstance(inputs, PackedSequence) else inputs).shape[-1]
    kind: Any = next(kind for kind in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(layer, kind))
    alone: nn.RNNBase = kind(
        width, layer.hidden_size, 1, bias=layer.bias, batch_first=layer.batch_first,
        bidirectional=layer.bidirectional, device="meta", **options,
    )  # fmt: skip
    for name in list(alone._parameters):
        setattr(alone, name, getattr(layer, name.replace("_l0", f"_l{number}")))
    return alone


def _of_layer(layer: nn.RNNBase, hidden: Any, number: int) -> Any:
    """Return the part of the first hidden state that one layer of a stack gets."""
    if hidden is None:
        return None
    if isinstance(hidden, tuple):
        return tuple(_of_layer(layer, part, number) for part in hidden)
    directions = 2 if layer.bidirectional else 1
    return hidden[number * directions : (number + 1) * directions]


def _padded(layer: nn.RNNBase, outputs: Any) -> tuple[Tensor, Tensor]:
    """Return outputs as (sequences, steps, width), and how many steps of each count."""
    if isinstance(outputs, PackedSequence):
        padded, lengths = pad_packed_sequence(outputs, batch_first=True)
        return padded, lengths.to(padded.device)
    if outputs.ndim == 2:
        outputs = outputs[None]
    elif not layer.batch_first:
        outputs = outputs.transpose(0, 1)
    return outputs, torch.full((len(outputs),), outputs.shape[1], device=outputs.device)


def _before(hidden: Tensor, lengths: Tensor, *, reverse: bool) -> Tensor:
    """Return the hidden states that a step begins with; the first one, mostly zero, is left out."""
    step = torch.arange(hidden.shape[1], device=hidden.device)
    counts = (step >= 1) & (step < lengths[:, None]) if reverse else step < lengths[:, None] - 1
    return hidden[counts]
