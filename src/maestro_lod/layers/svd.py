"""Factorization of dense weights by truncated SVD.

Only the shorter side of a matrix W is decomposed: it gives the leading left singular directions Q,
and the other factor is QᵀW. Then Q·(QᵀW) is W at full rank, however small the singular values are.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A singular value below this part of the largest is a rounding error of zero.
_NEGLIGIBLE = {torch.float32: 4e-7, torch.float64: 1e-13}

_SCALARS_AT_ONCE = 2**22  # in one batch of matrices: larger batches only take memory
_COLUMNS_AT_ONCE = 2048  # converted to float64
_ROWS_AT_ONCE = 256
_GRAM_BLOCKS = 8  # in each dimension; only those on and below the diagonal are computed

# A sketch finds a few leading directions alone. With these numbers its approximation of the weight
# is at most 1 % worse than the best, on random matrices, whose spectrum is the hardest.
_SKETCH_SIDE = 1024  # the shorter side of the smallest matrix that is sketched
_SKETCH_SHARE = 1 / 8  # the largest rank that is sketched, as a share of that side
_SKETCH_ROUNDS = 4


@torch.no_grad()
def svd_factors(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Split (groups, m, n) into (groups, m, rank) and (groups, rank, n), √S to each side.

    The first k ranks are the best approximation of rank k. Where a singular value is zero, the
    shorter side gets an orthonormal direction and the longer side zeros: the product stays equal
    and a gradient arrives, at full rank the whole gradient that the dense weight would get.
    """
    groups, m, n = matrices.shape
    if m > n:  # the shorter side comes first
        right, left = svd_factors(matrices.mT, rank)
        return left.mT, right.mT
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    rank = min(rank, m)
    left = matrices.new_empty(groups, m, rank, dtype=dtype)
    right = matrices.new_empty(groups, rank, n, dtype=dtype)
    if left.numel() == 0:
        return left, right
    at_once = max(1, _SCALARS_AT_ONCE // (m * n))
    with torch.autocast(matrices.device.type, enabled=False):
        for start in range(0, groups, at_once):
            part = slice(start, start + at_once)
            wide = matrices[part].to(dtype)
            directions = _leading_directions(wide, rank)
            torch.matmul(directions.mT, wide, out=right[part])
            left[part] = directions
            balance(left[part], right[part])
    return left, right


def _leading_directions(matrices: Tensor, rank: int) -> Tensor:
    """Return the first left singular vectors of matrices with m ≤ n."""
    side = matrices.shape[1]
    if matrices.dtype == torch.float64:  # squaring would cost half of its digits
        triangle = torch.linalg.qr(matrices.mT, mode="r").R.mT
        exact: Tensor = torch.linalg.svd(triangle).U
        return exact[:, :, :rank]
    if side >= _SKETCH_SIDE and rank <= _SKETCH_SHARE * side:
        return _sketched_directions(matrices, rank)
    return leading_eigenvectors(_gram(matrices), rank).to(matrices.dtype)


def leading_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Return the eigenvectors of the largest eigenvalues, largest first; reads lower triangles."""
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[..., -rank:].flip(-1)


def _gram(matrices: Tensor) -> Tensor:
    """Return W·Wᵀ in float64; its upper triangle is undefined."""
    groups, m, _ = matrices.shape
    gram = matrices.new_zeros(groups, m, m, dtype=torch.float64)
    step = -(-m // _GRAM_BLOCKS)
    for columns in torch.split(matrices, _COLUMNS_AT_ONCE, dim=2):
        exact = columns.double()
        for start in range(0, m, step):
            stop = start + step
            gram[:, start:stop, :stop] += exact[:, start:stop] @ exact[:, :stop].mT
    return gram


def _sketched_directions(matrices: Tensor, rank: int) -> Tensor:
    """Approximate the first left singular vectors by subspace iteration from a fixed start."""
    groups, side, _ = matrices.shape
    basis = _random_like(matrices, groups, side, rank + rank // 4 + 16)
    for _ in range(_SKETCH_ROUNDS):
        rows = torch.linalg.qr(matrices.mT @ basis).Q  # or rounding hides small singular values
        basis = torch.linalg.qr(matrices @ rows).Q
    vectors: Tensor = torch.linalg.eigh(_gram(basis.mT @ matrices)).eigenvectors
    return basis @ vectors[:, :, -rank:].flip(-1).to(basis.dtype)


def balance(left: Tensor, right: Tensor) -> None:
    """Multiply √S into each side, in place, and fill ranks without singular value.

    The columns of `left` must have length 1, so that the lengths of the rows of `right` are S. A
    rank without singular value gets a free direction.
    """
    rows = torch.split(right, _ROWS_AT_ONCE, dim=1)  # to float64, as squares of tiny numbers need
    values = torch.cat([torch.linalg.vector_norm(r, dim=2, dtype=torch.float64) for r in rows], 1)
    largest = values.amax(dim=1, keepdim=True)
    alive = values > _NEGLIGIBLE[left.dtype] * largest
    # A free direction is as long as a usual rank's, and no longer than makes a step of the dense
    # layer: with Q orthonormal and the other side zero, Q·(QᵀG) is its gradient G.
    usual = (values * alive).sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_min(1)
    usual = torch.where(largest > 0, usual.clamp_max(1), 1)
    root = torch.where(alive, values, usual).sqrt().to(left.dtype)
    if not alive.all():
        column = alive[:, None, :]
        free = torch.linalg.qr(torch.where(column, left, _random_like(left, *left.shape))).Q
        left.copy_(torch.where(column, left, free))
        right *= alive[:, :, None]
    left *= root[:, None, :]
    right /= root[:, :, None]


def _random_like(tensor: Tensor, *shape: int) -> Tensor:
    """Return normal numbers that depend on the shape alone."""
    generator = torch.Generator("cpu").manual_seed(shape[-2] << 32 | shape[-1])
    numbers = torch.randn(shape, generator=generator, dtype=tensor.dtype, device="cpu")
    return numbers.to(tensor.device)
