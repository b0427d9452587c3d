"""The hierarchical group lasso: Σ over layers and ranks b of ‖U_b:‖ + ‖V_b:‖, b: = ranks b and up.

Each rank is in all the groups that start at or before it, so a rank costs more the later it comes:
useless ranks go to zero from the end, and what is left is ordered by importance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from maestro_lod.errors import require_nonnegative
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import require_low_rank

_OTHERS = {
    dim: {ndim: [d for d in range(ndim) if d != dim] for ndim in (2, 3, 4, 5)} for dim in (0, 1)
}
"""The dimensions of a factor beside that of its ranks, by that one and by how many there are."""


def rank_norms(factors: Sequence[Tensor]) -> Tensor:
    """Return the norm of every rank of every factor as (factors, largest rank), padded with zeros.

    Factors come as u, v, u, v, …. Computed in float32 or better.
    """
    dtype = functools.reduce(torch.promote_types, {f.dtype for f in factors}, torch.float32)
    device = factors[0].device
    norms = []
    for i, factor in enumerate(factors):
        others = _OTHERS[1 - i % 2][factor.ndim]
        values = factor if factor.dtype == dtype else factor.to(dtype)
        if i % 2 == 0 and factor.numel() > 65536:
            # over the first dimension, torch sums large tensors faster than it takes norms
            norm = values.square().sum(others).sqrt()
        else:
            norm = torch.linalg.vector_norm(values, dim=others)
        norms.append(norm if norm.device == device else norm.to(device))
    padded, _ = _places(tuple(map(len, norms)), device)
    return torch.cat([*norms, norms[0].new_zeros(1)]).take(padded)


def _computed_places(ranks: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how to pad values of so many ranks, laid end to end, to a matrix, and how to undo it.

    Two gathers, because padding and slicing row by row would cost a small model more than the
    penalty itself.
    """
    total, widest = sum(ranks), max(ranks)
    starts = [sum(ranks[:i]) for i in range(len(ranks))]
    padded = [
        [start + b if b < rank else total for b in range(widest)]  # total: where the zero is
        for start, rank in zip(starts, ranks, strict=True)
    ]
    flat = [i * widest + b for i, rank in enumerate(ranks) for b in range(rank)]
    return (
        torch.tensor(padded, dtype=torch.int64, device=device),
        torch.tensor(flat, dtype=torch.int64, device=device),
    )


_remembered_places = functools.lru_cache(maxsize=64)(_computed_places)


def _places(ranks: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Look the places up, except in a graph that is being compiled, which keeps them itself."""
    compiling = torch.compiler.is_compiling()
    return (_computed_places if compiling else _remembered_places)(ranks, device)


def tail_norms(factors: Sequence[Tensor]) -> Tensor:
    """Return ‖F_b:‖ for every rank b of every factor, laid out like `rank_norms`."""
    squares = rank_norms(factors).square()
    return squares.flip(1).cumsum(1).flip(1).sqrt()


def _scaled(factors: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
    """Multiply the ranks of all factors by (factors, largest rank) scales."""
    ranks = tuple(f.shape[1 - i % 2] for i, f in enumerate(factors))  # u, v, u, v, …
    _, flat = _places(ranks, scales.device)
    multipliers = []
    for i, (factor, scale) in enumerate(
        zip(factors, torch.split(scales.take(flat), list(ranks)), strict=True)
    ):
        behind = factor.ndim - 2 + i % 2  # dimensions behind the ranks
        multiplier = scale.view(-1, *[1] * behind) if behind else scale
        same = multiplier.device == factor.device
        multipliers.append(multiplier if same else multiplier.to(factor.device))
    scaled = torch._foreach_mul(list(factors), multipliers)
    return [
        s if s.dtype == f.dtype else s.to(f.dtype) for s, f in zip(scaled, factors, strict=True)
    ]


def _factors(layers: Iterable[LowRank]) -> list[Tensor]:
    return [factor for layer in layers for factor in (layer.u, layer.v)]


class _GroupLasso(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: float, *factors: Tensor) -> Tensor:
        tails = tail_norms(factors)
        ctx.weight = weight
        ctx.save_for_backward(tails, *factors)
        return tails.sum().mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tails, *factors = ctx.saved_tensors
        # Rank j is in the groups b ≤ j, and d‖F_b:‖/dF_j = F_j/‖F_b:‖; a zero tail counts as zero.
        scales = (
            tails.reciprocal()
            .nan_to_num_(nan=math.nan, posinf=0.0)
            .cumsum(1)
            .mul_(ctx.weight * grad)
        )
        needed = ctx.needs_input_grad[1:]
        gradients = _scaled(factors, scales)
        return None, *(g if need else None for g, need in zip(gradients, needed, strict=True))


_FEW = 16384  # scalars: factors with no more than this in all are packed into one vector


class _PackedGroupLasso(torch.autograd.Function):
    """The same for few scalars, where calls cost more than arithmetic: one vector, a third of them.

    The vector holds all factors end to end; `owners` says for each scalar which rank it belongs to.
    """

    @staticmethod
    def forward(ctx: Any, weight: float, *factors: Tensor) -> Tensor:
        shapes = tuple(f.shape for f in factors)
        rows, owners, cells, _ = _packing(shapes, factors[0].device)
        vector = torch.cat([f.reshape(-1) for f in factors])
        squares = vector.new_zeros(len(cells) + 1).scatter_add_(0, owners, vector * vector)
        by_row = squares.index_select(0, rows.view(-1)).view(rows.shape)
        tails = by_row.cumsum(1).sqrt_()
        ctx.weight, ctx.shapes = weight, shapes
        ctx.save_for_backward(tails, vector)
        return tails.sum().mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tails, vector = ctx.saved_tensors
        _, owners, cells, sizes = _packing(ctx.shapes, vector.device)
        scales = tails.reciprocal().nan_to_num_(nan=math.nan, posinf=0.0).flip(1).cumsum(1)
        by_rank = scales.view(-1).index_select(0, cells).mul_(ctx.weight * grad)
        gradients = torch.split(by_rank.index_select(0, owners).mul_(vector), sizes)
        return None, *(
            gradient.view(shape) if need else None
            for gradient, shape, need in zip(
                gradients, ctx.shapes, ctx.needs_input_grad[1:], strict=True
            )
        )


@functools.lru_cache(maxsize=64)
def _packing(
    shapes: tuple[torch.Size, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return where things are when factors u, v, u, v, … of these shapes are packed.

    `rows`: which rank comes where in (factors, largest rank), the last first, after zeros;
    `owners`: the rank of each scalar; `cells`: the place of each rank in (factors, largest rank);
    and how many scalars each factor has.
    """
    ranks = [shape[1 - i % 2] for i, shape in enumerate(shapes)]
    starts, widest, total = [sum(ranks[:i]) for i in range(len(ranks))], max(ranks), sum(ranks)
    rows = [
        start + b if b < rank else total
        for start, rank in zip(starts, ranks, strict=True)
        for b in reversed(range(widest))
    ]
    owners = []
    for i, shape in enumerate(shapes):
        along = [1] * len(shape)
        along[1 - i % 2] = ranks[i]
        owners.append((torch.arange(ranks[i]) + starts[i]).view(along).expand(shape).reshape(-1))
    cells = [i * widest + b for i, rank in enumerate(ranks) for b in range(rank)]
    return (
        torch.tensor(rows, dtype=torch.int64, device=device).view(len(ranks), widest),
        torch.cat(owners).to(device),
        torch.tensor(cells, dtype=torch.int64, device=device),
        [shape.numel() for shape in shapes],
    )


def _pack_well(factors: Sequence[Tensor]) -> bool:
    """Say whether there are so few scalars, all of one wide type, that packing them pays."""
    first = factors[0]
    return (
        not torch.compiler.is_compiling()
        and first.dtype in (torch.float32, torch.float64)
        and sum(f.numel() for f in factors) <= _FEW
        and all(f.dtype == first.dtype and f.device == first.device for f in factors)
    )


def group_lasso(model: nn.Module) -> Tensor:
    """Return the hierarchical group lasso of all low-rank layers, a differentiable scalar.

    Multiply by λ and add to the loss. Zero tails give zero gradients, not NaN.
    """
    return weighted_group_lasso(require_low_rank(model).values(), 1.0)


def weighted_group_lasso(layers: Iterable[LowRank], weight: float) -> Tensor:
    """Return the hierarchical group lasso of some layers, times a weight."""
    factors = _factors(layers)
    function: Any = _PackedGroupLasso if _pack_well(factors) else _GroupLasso
    penalty: Tensor = function.apply(weight, *factors)
    return penalty


@torch.no_grad()
def importance(model: nn.Module) -> dict[str, Tensor]:
    """Return ‖U_b:‖·‖V_b:‖ for b = 1 … rank of each layer: what `shrink` compares."""
    layers = require_low_rank(model)
    tails = tail_norms(_factors(layers.values()))
    return {
        name: tails[2 * i, : layer.rank] * tails[2 * i + 1, : layer.rank]
        for i, (name, layer) in enumerate(layers.items())
    }


def prox_group_lasso_(model: nn.Module, step: float) -> None:
    """Apply the exact proximal map of step · `group_lasso` to all trainable factors, in place.

    Call it after `optimizer.step()` with step = learning rate · λ, instead of adding the penalty to
    the loss: useless ranks become exactly zero, whatever the optimizer.
    """
    step = require_nonnegative("step", step)
    prox_layers_({layer: (step, step) for layer in require_low_rank(model).values()})


@torch.no_grad()
def prox_layers_(steps: Mapping[LowRank, tuple[float, float]]) -> None:
    """Apply the proximal map with a step per factor (u, v), in place; frozen factors are kept."""
    factors = _factors(steps)
    factor_steps = [step for pair in steps.values() for step in pair]
    norms_matrix = rank_norms(factors)
    all_norms = norms_matrix.tolist()
    scales = [
        _prox_scales(norms, step) if step > 0.0 and factor.requires_grad else [1.0] * len(norms)
        for factor, step, norms in zip(factors, factor_steps, all_norms, strict=True)
    ]
    for factor, scaled in zip(
        factors, _scaled(factors, norms_matrix.new_tensor(scales)), strict=True
    ):
        factor.copy_(scaled)


def _prox_scales(norms: list[float], step: float) -> list[float]:
    """Return by how much each rank is scaled, given the norm of each.

    The groups are nested, so one sweep from the last to the first is exact: group b holds rank b
    and what the sweep left of group b+1, and shrinks both by the same factor.
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
