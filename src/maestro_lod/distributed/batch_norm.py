"""BatchNorm with the statistics of a whole batch whose parts are on several processes.

torch's SyncBatchNorm is a module of another type, for GPUs only. Here the operation is replaced
during a forward, and the model is not changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from maestro_lod.distributed.collectives import sum_over


class WholeBatchNorm(TorchFunctionMode):
    """Context in which BatchNorms in training mode use the samples of all processes.

    `counts=False` leaves out the samples of a process that runs only because others wait for it.
    """

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._normed(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _normed(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            tensors = (input, running_mean, running_var, weight, bias)
            return F.batch_norm(*tensors, training=False, momentum=momentum, eps=eps)
        others = [d for d in range(input.ndim) if d != 1]
        shape = [1, -1, *[1] * (input.ndim - 2)]
        weight_here = float(self._counts)
        count = input.new_tensor([weight_here * input.numel() / input.shape[1]])
        summed = _summed(torch.cat([weight_here * input.sum(others), count]))
        total, n = summed[:-1], summed[-1].detach()
        centred = input - (total / n).view(shape)
        var = _summed(weight_here * centred.square().sum(others)) / n
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(total / n, momentum)
                running_var.lerp_(var * n / (n - 1), momentum)
        normed = centred * (var + eps).rsqrt().view(shape)
        if weight is not None and bias is not None:
            normed = normed * weight.view(shape) + bias.view(shape)
        return normed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return sum_over(values.clone(), None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sum_over(grad.clone(), None)


def _summed(values: Tensor) -> Tensor:
    """Return the sum over all processes, whose gradient is summed too."""
    function: Any = _Sum
    total: Tensor = function.apply(values)
    return total
