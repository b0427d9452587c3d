"""Whitening: factors ordered by their effect on a layer's outputs on data.

For inputs x with second moment C and output errors weighted by G, the best approximation of W with
k ranks minimizes tr(Gᵀ·Δ·C·Δᵀ) for its error Δ. It is the truncated SVD of G½·W·C½, multiplied by
the inverse roots. As with plain weights only the shorter side is decomposed: its leading directions
Q are eigenvectors of G½·W·C·Wᵀ·G½, and the factors are G⁻½·Q and Qᵀ·G½·W. So no root of the longer
side is needed, and the product at full rank is W for any moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maestro_lod.layers.svd import balance, leading_eigenvectors

# The weight of directions that no input reached, relative to the mean: they come last, ordered by
# the dense weight.
_UNSEEN = 1e-6

_SKETCH_SIDE = 1024  # the shorter side of the smallest matrix that is sketched
_SKETCH_SHARE = 1 / 4  # the largest rank that is sketched, as a share of that side
_SKETCH_ROUNDS = 6


@torch.no_grad()
def whitened_factors(
    matrices: Tensor, rank: int, inputs: Tensor | None, outputs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split (groups, m, n) into (groups, m, rank) and (groups, rank, n), balanced and ordered.

    `inputs` (groups, n, n) is the second moment of the multiplied rows, `outputs` (groups, m, m)
    the weights of errors of their products; (groups, n) or (groups, m) is a diagonal, None the
    identity. The first k ranks are the best approximation of rank k by these weights.
    """
    groups, m, n = matrices.shape
    if m > n:  # the shorter side comes first
        right, left = whitened_factors(matrices.mT, rank, outputs, inputs)
        return left.mT, right.mT
    rank = min(rank, m)
    left = matrices.new_empty(groups, m, rank, dtype=torch.float64)
    right = matrices.new_empty(groups, rank, n, dtype=torch.float64)
    for group in range(groups if rank else 0):
        weight = matrices[group].double()
        root, inverse = _roots(None if outputs is None else outputs[group])
        weighted = _times(root, weight)
        gram = _gram(weighted, None if inputs is None else inputs[group])
        directions = _leading(gram, rank)
        left[group] = _times(inverse, directions)
        torch.matmul(directions.mT, weighted, out=right[group])
    length = torch.linalg.vector_norm(left, dim=1, keepdim=True)
    left /= length
    right *= length.mT
    if rank:
        balance(left, right)
    return left, right


@torch.no_grad()
def energies(matrices: Tensor, inputs: Tensor | None, outputs: Tensor | None = None) -> Tensor:
    """Return the energy of each rank of `whitened_factors`, summed over groups, first to last."""
    _, m, n = matrices.shape
    if m > n:
        return energies(matrices.mT, outputs, inputs)
    total = torch.zeros(m, dtype=torch.float64, device=matrices.device)
    for group, weight in enumerate(matrices):
        root, _ = _roots(None if outputs is None else outputs[group])
        gram = _gram(_times(root, weight.double()), None if inputs is None else inputs[group])
        total += torch.linalg.eigvalsh(gram).flip(0).clamp_min(0.0)
    return total


def _roots(metric: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return R with RᵀR the metric, and its inverse; both stable where the metric is singular."""
    if metric is None or not bool(metric.any()):
        return None, None
    if metric.ndim == 1:
        root = (metric.double() + _UNSEEN * metric.double().mean()).sqrt()
        return root, 1.0 / root
    values, vectors = torch.linalg.eigh(metric.double())
    root = (values.clamp_min(0.0) + _UNSEEN * values.clamp_min(0.0).mean()).sqrt()
    return root[:, None] * vectors.mT, vectors / root


def _times(metric: Tensor | None, matrix: Tensor) -> Tensor:
    if metric is None:
        return matrix
    return metric @ matrix if metric.ndim == 2 else metric[:, None] * matrix


def _gram(matrix: Tensor, metric: Tensor | None) -> Tensor:
    """Return X·C·Xᵀ, with a small weight for directions outside of the range of C."""
    if metric is None or not bool(metric.any()):
        return matrix @ matrix.mT
    metric = metric.double()
    if metric.ndim == 1:
        return (matrix * (metric + _UNSEEN * metric.mean())) @ matrix.mT
    weighted = matrix @ metric
    weighted += _UNSEEN * metric.diagonal().mean() * matrix
    return weighted @ matrix.mT


def _leading(gram: Tensor, rank: int) -> Tensor:
    """Return the leading eigenvectors, by subspace iteration if few of many are needed."""
    side = len(gram)
    if side < _SKETCH_SIDE or rank > _SKETCH_SHARE * side:
        return leading_eigenvectors(gram, rank)
    start = torch.Generator("cpu").manual_seed(side)
    wide = min(side, rank + rank // 4 + 16)
    basis = torch.randn(side, wide, generator=start, dtype=gram.dtype).to(gram.device)
    for _ in range(_SKETCH_ROUNDS):
        basis = torch.linalg.qr(gram @ basis).Q
    return basis @ leading_eigenvectors(basis.mT @ gram @ basis, rank)
