"""Products of matrices by whichever of torch's two libraries is faster on this processor.

torch multiplies matrices with MKL, which uses vectors of half the width on processors with AVX-512
that are not its maker's. oneDNN, the library of torch's convolutions, uses all of it there and is
twice as fast. `benchmarks/products.py` measures from which size on.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.layers.eager import runs_as_written

_FEWEST_MACS = 1 << 22  # with fewer, the calls cost more than what they save
_PLAIN = (Tensor, nn.Parameter)  # not sharded, fake or otherwise something else
_backends: Any = torch.backends


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return left (m, k) times right (k, n); differentiable."""
    if not _pays(left, right, left.shape[0] * right.numel()):
        return left @ right
    function: Any = _Linear
    product: Tensor = function.apply(left, right.mT, None)
    return product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `F.linear` does: x (..., k) times the transpose of weight (n, k), plus a bias."""
    if not _pays(x, weight, x.numel() * weight.shape[0]):
        return F.linear(x, weight, bias)
    function: Any = _Linear
    product: Tensor = function.apply(x.flatten(0, -2), weight, bias)
    return product.view(*x.shape[:-1], -1)


@functools.cache
def _faster_here() -> bool:
    """Say whether oneDNN is the faster one: with AVX-512, by another maker than MKL's."""
    has_both = _backends.mkl.is_available() and _backends.mkldnn.is_available()
    if not has_both or _backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        maker = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # not Linux
        return False
    return maker and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _pays(left: Tensor, right: Tensor, macs: int) -> bool:
    return (
        macs >= _FEWEST_MACS
        and _faster_here()
        and left.dtype == right.dtype == torch.float32
        and type(left) in _PLAIN
        and type(right) in _PLAIN
        and left.device.type == right.device.type == "cpu"
        and left.ndim > 1
        and runs_as_written("cpu")
        and torch._C._len_torch_dispatch_stack() == 0  # nobody counts or fakes operations
        and _backends.mkldnn.enabled
    )


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (N, k) times the transpose of weight (n, k), plus a bias, without gradients."""
    operation: Any = torch.ops.mkldnn._linear_pointwise
    product: Tensor = operation(_dense(x), _dense(weight), bias, "none", [], "")
    return product


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows or columns lie one after the other in memory."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated once more
            return (
                grad @ weight if of_x else None,
                grad.mT @ x if of_weight else None,
                grad.sum(0) if of_bias else None,
            )
        return (
            _by_onednn(grad, weight.mT) if of_x else None,
            _by_onednn(grad.mT, x.mT) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor, of_weight: Tensor, of_bias: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        return F.linear(of_x, weight, of_bias) + F.linear(x, of_weight)
