"""Binary layers of XNOR-Net: signs of inputs times signs of weights, scaled by row."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

EPSILON = 1e-4  # of the BatchNorm before the signs


class Sign(torch.autograd.Function):
    """Sign function without 0, with the straight-through gradient where |x| < 1."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return signs(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradient * (x.abs() < 1)


class Binarized(torch.autograd.Function):
    """Binarization of each row to α·sign(w) with α = mean |w|.

    The gradient is exact through α and straight-through for the signs, times n·(1 − 1/inputs),
    where n is the number of weights in a row and the second factor accounts for the centring.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return scales(weight) * signs(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        weight: Tensor = ctx.saved_tensors[0]
        exact = relaxed_gradient(weight, gradient)
        return exact * (weight[0].numel() * (1 - 1 / weight.shape[1]))


def signs(x: Tensor) -> Tensor:
    """Return −1 for negative values, else 1."""
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)


def scales(weight: Tensor) -> Tensor:
    """Return mean |w| of each row, in a shape that broadcasts to the weight."""
    return weight.abs().mean(dim=[*range(1, weight.ndim)], keepdim=True)


def relaxed_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of α·sign(w), with a slope of 1 for the sign where |w| ≤ 1."""
    sign, others = signs(weight), [*range(1, weight.ndim)]
    through_signs = scales(weight) * (weight.abs() <= 1) * gradient
    return through_signs + sign * (sign * gradient).mean(dim=others, keepdim=True)


@torch.no_grad()
def center_and_clamp(weight: Tensor) -> None:
    """Subtract the mean over inputs and clamp weights to [−1, 1], in place."""
    weight.sub_(weight.mean(dim=1, keepdim=True)).clamp_(-1.0, 1.0)


class Binary(nn.Module):
    """A linear layer or convolution: BatchNorm, sign, product with binary weights.

    `weight` holds the real weights, which are trained. With `input_scale`, outputs are multiplied
    by the mean absolute input, as in the paper; the code of its authors omits that.
    """

    def __init__(self, dense: nn.Linear | nn.Conv2d, *, input_scale: bool = False) -> None:
        super().__init__()
        self.is_conv, self.input_scale = dense.weight.ndim == 4, input_scale
        kind = nn.BatchNorm2d if self.is_conv else nn.BatchNorm1d
        like: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        self.norm = kind(dense.weight.shape[1] * getattr(dense, "groups", 1), eps=EPSILON, **like)
        self.weight, self.bias = dense.weight, dense.bias
        names = ("stride", "padding", "dilation", "groups") if self.is_conv else ()
        self.options: dict[str, Any] = {name: getattr(dense, name) for name in names}
        center_and_clamp(self.weight)
        self.train(dense.training)

    def forward(self, x: Tensor) -> Tensor:
        normed = self._normed(x)
        binary, weight = (
            cast(Tensor, function.apply(value))  # type: ignore[no-untyped-call]
            for function, value in ((Sign, normed), (Binarized, self.weight))
        )
        if not self.is_conv:
            size = normed.abs().mean(-1, keepdim=True) if self.input_scale else 1.0
            y = F.linear(binary, weight) * size
            return y if self.bias is None else y + self.bias
        y = F.conv2d(binary, weight, **self.options)
        if self.input_scale:
            y = y * self._sizes(normed)
        return y if self.bias is None else y + self.bias[:, None, None]

    def _normed(self, x: Tensor) -> Tensor:
        """Normalize each channel: the last dimension for linear layers."""
        if self.is_conv or x.ndim == 2:
            return cast(Tensor, self.norm(x))
        return cast(Tensor, self.norm(x.flatten(0, -2))).view(x.shape)

    def _sizes(self, x: Tensor) -> Tensor:
        """Return the mean |x| over the receptive field of each output."""
        mean = x.abs().mean(1, keepdim=True)
        kernel = self.weight.shape[2:]
        box = mean.new_full((1, 1, *kernel), 1 / kernel.numel())
        return F.conv2d(mean, box, **self.options | {"groups": 1})

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, bias={self.bias is not None}"
