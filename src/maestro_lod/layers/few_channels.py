"""Convolutions over one or two channels, such as grey images or sound, with a faster gradient.

Where AVX2 are the widest vectors, oneDNN computes the gradient of such a weight as if it had eight
channels. For three it has a kernel of its own, which is faster. So the gradient is taken of an
input with one or two channels of zeros more, and what belongs to them is dropped; the forward,
which has no such gap, stays as it is. `benchmarks/few_channels.py` measures where this pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maestro_lod.layers.eager import runs_as_written

_CHANNELS = 3  # that have a kernel of their own
_LARGEST_KERNEL = 13  # that it can take
_FEWEST_VALUES = 16384  # in the input: with fewer, the calls cost more than what they save
_backends: Any = torch.backends
_HERE = _backends.cpu.get_cpu_capability() == "AVX2" and _backends.mkldnn.is_available()


def gradient_is_slow(
    x: Tensor, weight: Tensor, padding: Sequence[int] | str, dilation: Sequence[int]
) -> bool:
    """Say whether `convolve` computes this weight's gradient faster than torch's convolution."""
    return (
        _HERE
        # inside torch.func nobody can tell whether the input's gradient will be asked for
        and runs_as_written("cpu")
        and x.ndim == weight.ndim < 5  # a batch, in one or two dimensions
        and x.shape[1] == weight.shape[1] < _CHANNELS  # equal: no groups
        and 1 < max(weight.shape[2:]) <= _LARGEST_KERNEL
        and x.numel() >= _FEWEST_VALUES
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and weight.requires_grad
        and not x.requires_grad
        and not isinstance(padding, str)
        and max(dilation) == 1
        and torch.is_grad_enabled()
    )


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Convolve (N, C, *size) with (out, C, *kernel); differentiable in weight and bias."""
    function: Any = _Convolution
    y: Tensor = function.apply(x, weight, bias, stride, padding)
    return y


def _convolution(x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    return (F.conv1d if weight.ndim == 3 else F.conv2d)(x, weight, *options)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
        ctx.kernel, (_, ctx.stride, ctx.padding) = weight.shape[2:], options
        ctx.save_for_backward(x)
        ctx.save_for_forward(x, weight)
        return _convolution(x, weight, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        channels, dims, out = x.shape[1], len(ctx.kernel), grad.shape[1]
        widened = F.pad(x, [0, 0] * dims + [0, _CHANNELS - channels])
        shape_alone = grad.new_zeros(1).expand(out, _CHANNELS, *ctx.kernel)
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            grad, widened, shape_alone, [out], ctx.stride, ctx.padding, [1] * dims,
            False, [0] * dims, 1, [False, True, ctx.needs_input_grad[2]],
        )  # fmt: skip
        return None, of_weight[:, :channels], of_bias, None, None

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor, of_weight: Tensor, of_bias: Tensor | None, *_: Any) -> Tensor:
        x, weight = ctx.saved_tensors
        options = ctx.stride, ctx.padding
        return _convolution(of_x, weight, None, *options) + _convolution(
            x, of_weight, of_bias, *options
        )
