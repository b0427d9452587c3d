"""The hierarchical group lasso: Σ over layers and ranks b of ‖U_b:‖ + ‖V_b:‖, b: = ranks b and up.

Each rank is in all groups that start at or before it, so that later ranks are penalized more:
useless ranks become zero from the end, and the remaining ones are ordered by importance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.distributed.shards import is_sharded, scaled_by_rank, sums_by_rank
from maestro_lod.errors import require_nonnegative
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import require_low_rank

_OTHERS = {
    dim: {ndim: [d for d in range(ndim) if d != dim] for ndim in (2, 3, 4, 5)} for dim in (0, 1)
}
"""The dimensions of a factor other than its ranks', by rank dimension and number of dimensions."""


def _rank_squares(factors: Sequence[Tensor]) -> list[Tensor]:
    """Return the squared norm of every rank of every factor; in float32 or better.

    Factors come as u, v, u, v, ….
    """
    dtype = functools.reduce(torch.promote_types, {f.dtype for f in factors}, torch.float32)
    if any(map(is_sharded, factors)):
        return sums_by_rank(factors, dtype, lambda part, others: part.square().sum(others))
    wide = [f if f.dtype == dtype else f.to(dtype) for f in factors]
    squares = torch._foreach_mul(wide, wide) if _all_small(wide) else [None] * len(wide)
    sums = []
    for i, (factor, square) in enumerate(zip(wide, squares, strict=True)):
        others = _OTHERS[1 - i % 2][factor.ndim]
        if square is not None:
            sums.append(square.sum(others))
        elif i % 2 == 0:
            # over the first dimension, torch sums large tensors faster than it takes norms
            sums.append(factor.square().sum(others))
        else:
            sums.append(torch.linalg.vector_norm(factor, dim=others).square())
    device = factors[0].device
    return [s if s.device == device else s.to(device) for s in sums]


def _all_small(factors: Sequence[Tensor]) -> bool:
    """Return True for small factors, for which one call with a copy is faster than many calls."""
    return all(f.numel() <= 65536 and f.device == factors[0].device for f in factors)


@dataclass(frozen=True)
class _Layout:
    """Indices between two layouts of all ranks: flat, and (factors, largest rank).

    Two gathers convert between them: in a small model, padding and slicing row by row would take
    longer than the penalty itself.
    """

    ranks: tuple[int, ...]
    padded: Tensor
    """For each cell of the matrix, the flat index of its rank; the last rank of a factor comes
    first, so that tails are cumulative sums. Cells without a rank refer to a zero at the end."""
    cells: Tensor
    """For each rank, its cell in a matrix whose first column has the first ranks."""

    @classmethod
    def from_ranks(cls, ranks: tuple[int, ...], device: torch.device) -> _Layout:
        starts, widest, total = [sum(ranks[:i]) for i in range(len(ranks))], max(ranks), sum(ranks)
        padded = [
            start + b if b < rank else total
            for start, rank in zip(starts, ranks, strict=True)
            for b in reversed(range(widest))
        ]
        cells = [i * widest + b for i, rank in enumerate(ranks) for b in range(rank)]
        return cls(
            ranks,
            torch.tensor(padded, dtype=torch.int64, device=device),
            torch.tensor(cells, dtype=torch.int64, device=device),
        )

    def reversed_rows(self, values: Sequence[Tensor]) -> Tensor:
        """Return the values of all ranks as (factors, largest rank), the last rank first."""
        flat = torch.cat([*values, values[0].new_zeros(1)])
        return flat.index_select(0, self.padded).view(len(self.ranks), -1)

    def flat(self, matrix: Tensor) -> Tensor:
        """Return the flat values of a (factors, largest rank) matrix, the first rank first."""
        return matrix.reshape(-1).index_select(0, self.cells)


@functools.lru_cache(maxsize=64)
def _remembered_layout(ranks: tuple[int, ...], device: torch.device) -> _Layout:
    with torch.inference_mode(False):  # cached: autograd may save it later
        return _Layout.from_ranks(ranks, device)


def _layout(factors: Sequence[Tensor]) -> _Layout:
    """Return the cached layout of factors; a graph that is being compiled stores its own."""
    ranks = tuple(f.shape[1 - i % 2] for i, f in enumerate(factors))  # u, v, u, v, …
    compiling = torch.compiler.is_compiling()
    return (_Layout.from_ranks if compiling else _remembered_layout)(ranks, factors[0].device)


def _tail_squares(factors: Sequence[Tensor]) -> Tensor:
    """Return ‖F_b:‖² for every rank b of every factor as (factors, largest rank), last rank first.

    Rows of factors with fewer ranks start with zeros.
    """
    return _layout(factors).reversed_rows(_rank_squares(factors)).cumsum(1)


def _scaled(factors: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
    """Multiply the ranks of all factors by (factors, largest rank) scales."""
    layout = _layout(factors)
    multipliers = []
    by_factor = torch.split(layout.flat(scales), list(layout.ranks))
    if any(map(is_sharded, factors)):
        pairs = enumerate(zip(factors, by_factor, strict=True))
        return [scaled_by_rank(factor, scale, 1 - i % 2) for i, (factor, scale) in pairs]
    for i, (factor, scale) in enumerate(zip(factors, by_factor, strict=True)):
        behind = factor.ndim - 2 + i % 2  # dimensions behind the ranks
        multiplier = scale.view(-1, *[1] * behind) if behind else scale
        same = multiplier.device == factor.device
        multipliers.append(multiplier if same else multiplier.to(factor.device))
    scaled = torch._foreach_mul(list(factors), multipliers)
    return [
        s if s.dtype == f.dtype else s.to(f.dtype) for s, f in zip(scaled, factors, strict=True)
    ]


def _factors(layers: Iterable[LowRank]) -> list[Tensor]:
    return [factor for layer in layers for factor in layer.stored_factors()]


class _GroupLasso(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: float, *factors: Tensor) -> Tensor:
        squares = _tail_squares(factors)
        ctx.weight = weight
        ctx.save_for_backward(squares, *factors)
        return squares.sqrt().sum().mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        squares, *factors = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            squares = _tail_squares(factors)
        scales = _gradient_scales(squares).mul_(ctx.weight * grad)
        needed = ctx.needs_input_grad[1:]
        gradients = _scaled(factors, scales)
        return None, *(g if need else None for g, need in zip(gradients, needed, strict=True))


def _gradient_scales(tail_squares: Tensor) -> Tensor:
    """Return the factor of each rank in the gradient, the first rank first.

    Rank j is in the groups b ≤ j, and d‖F_b:‖/dF_j = F_j/‖F_b:‖; a zero tail counts as zero.
    """
    inverse = tail_squares.masked_fill(tail_squares == 0, math.inf).rsqrt()
    return inverse.flip(1).cumsum(1)


def group_lasso(model: nn.Module) -> Tensor:
    """Return the hierarchical group lasso of all low-rank layers.

    >>> loss = F.cross_entropy(model(x), y) + 1e-4 * group_lasso(model)

    Args:
        model: A model with low-rank layers.

    Returns:
        A differentiable scalar, to be multiplied by λ and added to the loss. Zero tails give zero
        gradients, not NaN.

    Raises:
        LayerError: The model has no low-rank layers.
    """
    return weighted_group_lasso(require_low_rank(model).values(), 1.0)


def weighted_group_lasso(layers: Iterable[LowRank], weight: float) -> Tensor:
    """Return the hierarchical group lasso of some layers, times a weight."""
    function: Any = _GroupLasso
    penalty: Tensor = function.apply(weight, *_factors(layers))
    return penalty


@torch.no_grad()
def add_group_lasso_gradients(
    layers: Iterable[LowRank], strength: float, weight: float = 1.0
) -> Tensor:
    """Add the gradients of weight · strength · `group_lasso` to the factors; return its value.

    They are bit for bit equal to those of a backward of `weight * weighted_group_lasso`.
    """
    factors = _factors(layers)
    squares = _tail_squares(factors)
    scales = _gradient_scales(squares)
    scales.mul_(strength * scales.new_tensor(weight))
    gradients, added = [], []
    for factor, gradient in zip(factors, _scaled(factors, scales), strict=True):
        if factor.requires_grad and factor.grad is not None:
            gradients.append(factor.grad)
            added.append(gradient)
        elif factor.requires_grad:
            factor.grad = gradient
    if gradients:
        torch._foreach_add_(gradients, added)
    return squares.sqrt().sum().mul_(strength).mul_(weight)


@torch.no_grad()
def importance(model: nn.Module) -> dict[str, Tensor]:
    """Return the importance of every rank, ‖U_b:‖·‖V_b:‖ for b = 1 … rank, which `shrink` compares.

    >>> importance(model)["fc1"][-1] <= importance(model)["fc1"][0]

    Args:
        model: A model with low-rank layers.

    Returns:
        A tensor of its ranks for each layer, in float32 or better; in float64 where squares or
        products would be too large for float32.

    Raises:
        LayerError: The model has no low-rank layers.
    """
    layers = require_low_rank(model)
    factors = _factors(layers.values())
    values = _importance(layers, factors)
    if all(bool(value.isfinite().all()) for value in values.values()):
        return values
    return _importance(layers, [factor.double() for factor in factors])


def _importance(layers: Mapping[str, LowRank], factors: Sequence[Tensor]) -> dict[str, Tensor]:
    tails = _tail_squares(factors).sqrt().flip(1)
    return {
        name: tails[2 * i, : layer.rank] * tails[2 * i + 1, : layer.rank]
        for i, (name, layer) in enumerate(layers.items())
    }


def prox_group_lasso_(model: nn.Module, step: float) -> None:
    """Apply the exact proximal map of step · `group_lasso` to all trainable factors, in place.

    >>> optimizer.step()
    >>> prox_group_lasso_(model, step=learning_rate * 1e-4)

    Use it instead of adding the penalty to the loss: useless ranks become exactly zero under any
    optimizer.

    Args:
        model: A model with low-rank layers.
        step: Learning rate times λ.

    Raises:
        LayerError: The model has no low-rank layers.
        OptionError: The step is negative or not finite.
    """
    step = require_nonnegative("step", step)
    prox_layers_({layer: (step, step) for layer in require_low_rank(model).values()})


@torch.no_grad()
def prox_layers_(steps: Mapping[LowRank, tuple[float, float]]) -> dict[LowRank, int]:
    """Apply the proximal map with a step per factor (u, v), in place, except to frozen factors.

    Returns:
        The number of ranks of each layer before the trailing ones that are zero in both factors.
    """
    factors = _factors(steps)
    factor_steps = [step for pair in steps.values() for step in pair]
    norms_matrix = _layout(factors).reversed_rows(_rank_squares(factors)).flip(1).sqrt_()
    all_norms = norms_matrix.tolist()
    scales = [
        _prox_scales(norms, step) if step > 0.0 and factor.requires_grad else [1.0] * len(norms)
        for factor, step, norms in zip(factors, factor_steps, all_norms, strict=True)
    ]
    for factor, scaled in zip(
        factors, _scaled(factors, norms_matrix.new_tensor(scales)), strict=True
    ):
        factor.copy_(scaled)
    left = [sum(map(bool, factor_scales)) for factor_scales in scales]  # zeros come last
    return {layer: min(layer.rank, max(left[2 * i : 2 * i + 2])) for i, layer in enumerate(steps)}


def _prox_scales(norms: list[float], step: float) -> list[float]:
    """Return the scale of each rank, given the norm of each.

    The groups are nested, so that one sweep from the last to the first is exact: group b contains
    rank b and the shrunk group b+1, and both are shrunk by the same factor.
    """
    shrunk, tail = [0.0] * len(norms), 0.0
    for b in reversed(range(len(norms))):
        norm = math.hypot(norms[b], tail)
        shrunk[b] = max(0.0, 1.0 - step / norm) if norm > 0.0 else 0.0
        tail = shrunk[b] * norm
    scale, scales = 1.0, []
    for factor in shrunk:  # rank j is in the groups b ≤ j
        scale *= factor
        scales.append(scale)
    return scales
