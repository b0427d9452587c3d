"""A dense weight becomes factors: equal at full rank, best at every rank, with gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maestro_lod.layers import svd
from maestro_lod.layers.svd import svd_factors

# Errors that are promised, relative to the largest singular value.
PROMISED = {torch.float32: 1e-6, torch.float64: 1e-12}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def spectrum(matrices: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrices.double())


def largest(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices.double(), 2)


def with_spectrum(values: Tensor, m: int, n: int) -> Tensor:
    """Make a float64 matrix of random directions with these singular values."""
    left = torch.linalg.qr(torch.randn(m, len(values), dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64)).Q
    return ((left * values) @ right.mT)[None]


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Matrices of any shape, dtype and scale, with a spectrum that is flat, falls, or ends."""
    groups, m, n = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    dtype, decades = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 12))
    scale = 10.0 ** draw(st.integers(-3, 3))
    side = min(m, n)
    values = torch.logspace(0, -decades, side, dtype=torch.float64) * scale
    values[draw(st.integers(0, side)) :] = 0
    torch.manual_seed(draw(st.integers(0, 99)))
    return torch.cat([with_spectrum(values, m, n) for _ in range(groups)]).to(dtype)


@given(weights())
def test_full_rank_is_the_weight(weight: Tensor) -> None:
    u, v = svd_factors(weight, min(weight.shape[1:]))
    assert u.dtype == v.dtype == computed_in(weight.dtype)
    error = largest(u.double() @ v.double() - weight.double())
    assert (error <= PROMISED[u.dtype] * largest(weight)).all()


@given(weights(), st.data())
def test_each_rank_is_the_best_approximation_and_has_its_singular_value(
    weight: Tensor, data: st.DataObject
) -> None:
    side = min(weight.shape[1:])
    stored = data.draw(st.integers(1, side))
    kept = data.draw(st.integers(0, stored))
    u, v = svd_factors(weight, stored)
    assert u.shape == (*weight.shape[:2], stored)
    assert v.shape == (weight.shape[0], stored, weight.shape[2])
    values, slack = spectrum(weight), PROMISED[u.dtype] * largest(weight)
    error = weight.double() - u[:, :, :kept].double() @ v[:, :kept].double()
    best = values[:, kept] if kept < side else torch.zeros(len(weight))
    assert (largest(error) <= best + slack).all()
    importance = u.double().norm(dim=1) * v.double().norm(dim=2)
    assert ((importance - values[:, :stored]).abs() <= slack[:, None]).all()


@given(weights())
def test_directions_are_orthogonal_and_each_side_has_the_root(weight: Tensor) -> None:
    rank = min(weight.shape[1:])
    u, v = (factor.double() for factor in svd_factors(weight, rank))
    values, slack = spectrum(weight), PROMISED[computed_in(weight.dtype)]
    shorter, longer = (u.mT, v) if u.shape[1] <= v.shape[2] else (v, u.mT)
    unit = shorter / shorter.norm(dim=2, keepdim=True)  # complete, zero singular values included
    assert (unit @ unit.mT - torch.eye(rank)).abs().max() < 10 * slack
    for i, scale in enumerate(largest(weight)):
        clear = values[i] > 1e3 * slack * scale  # of rounding, for one part in a thousand
        rows = longer[i][clear] / values[i][clear].sqrt()[:, None]
        norms = shorter[i][clear].norm(dim=1)
        assert torch.allclose(norms, values[i][clear].sqrt(), rtol=2e-3)
        assert (rows @ rows.mT - torch.eye(len(rows))).abs().sum() < 1e-2 * max(len(rows), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(6, 10), (10, 6), (8, 8), (1, 5)])
def test_a_weight_of_zeros_gets_the_gradient_of_the_dense_weight(
    m: int, n: int, dtype: torch.dtype
) -> None:
    u, v = svd_factors(torch.zeros(2, m, n, dtype=dtype), min(m, n))
    assert not (u @ v).any()
    u.requires_grad_()
    v.requires_grad_()
    gradient = torch.randn(2, m, n, dtype=u.dtype)
    (u @ v * gradient).sum().backward()
    assert u.grad is not None and v.grad is not None
    step = (u - u.grad) @ (v - v.grad)  # plain descent at learning rate 1
    assert torch.allclose(step, -gradient, atol=1e-5)


@pytest.mark.parametrize(("m", "n"), [(12, 20), (20, 12)])
def test_missing_ranks_get_free_directions_of_a_usual_length_on_the_shorter_side(
    m: int, n: int
) -> None:
    weight = with_spectrum(torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64), m, n).float()
    u, v = svd_factors(weight, 8)
    shorter, longer = (u.mT, v) if m < n else (v, u.mT)
    assert not longer[:, 3:].any()
    assert longer[:, :3].any(dim=2).all()
    assert torch.allclose(shorter[:, 3:].norm(dim=2), torch.tensor(0.3).sqrt())
    large = svd_factors(100 * weight, 8)[m > n]  # no longer than makes a step of the dense layer
    assert torch.allclose(large.norm(dim=1 + (m > n))[:, 3:], torch.tensor(1.0))


def test_free_directions_reach_every_output_at_every_rank() -> None:
    u, _ = svd_factors(torch.zeros(1, 10, 30), 1)
    assert (u.abs() > 1e-3).all()  # not one output alone, as a unit vector would


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
def test_no_scale_is_too_small_or_large(scale: float) -> None:
    weight = torch.randn(1, 10, 15) * scale
    u, v = svd_factors(weight, 10)
    assert largest(u.double() @ v.double() - weight.double()) < 1e-6 * largest(weight)
    assert torch.allclose(u.norm(dim=1), v.norm(dim=2), rtol=1e-4)


def test_groups_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 12, 5)
    weight[3] = 0
    weight[4] *= 1e-6
    together = svd_factors(weight, 4)
    monkeypatch.setattr(svd, "_SCALARS_AT_ONCE", 2 * 12 * 5)  # several passes, the last not full
    in_passes = svd_factors(weight, 4)
    for one, other in zip(together, in_passes, strict=True):
        alive = [0, 1, 2, 4, 5, 6]
        assert torch.allclose(one[alive], other[alive], rtol=1e-4, atol=1e-9)
    assert torch.equal(in_passes[0][3] @ in_passes[1][3], torch.zeros(12, 5))


def test_it_is_repeatable_and_leaves_global_randomness_alone() -> None:
    weight = torch.zeros(1, 6, 9)
    state = torch.get_rng_state()
    first = svd_factors(weight, 6)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(17)
    for one, other in zip(first, svd_factors(weight, 6), strict=True):
        assert torch.equal(one, other)


def test_autocast_does_not_round_the_factors() -> None:
    weight = torch.randn(1, 32, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u, v = svd_factors(weight, 32)
    assert largest(u.double() @ v.double() - weight.double()) < 1e-6 * largest(weight)


def test_no_ranks_and_no_columns() -> None:
    for m, n, rank in ((4, 6, 0), (6, 4, 0), (0, 5, 3), (5, 0, 3)):
        u, v = svd_factors(torch.zeros(2, m, n), rank)
        assert u.shape == (2, m, 0)
        assert v.shape == (2, 0, n)


# -- a few ranks of a large matrix ---------------------------------------------------------------


def falling(power: float, side: int, n: int) -> Tensor:
    """Make a matrix whose k-th singular value is k to minus the power."""
    return with_spectrum(torch.arange(1, side + 1).double() ** -power, side, n).float()


@pytest.mark.parametrize("rank", [1, 16, 48])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(1, 384, 384),
        lambda: torch.randn(1, 1344, 384),
        lambda: falling(0.3, 384, 500),
        lambda: falling(1, 384, 500),
        lambda: falling(4, 384, 500),
    ],
    ids=["random square", "random tall", "slow", "fast", "very fast"],
)
def test_a_sketch_is_within_a_hundredth_of_the_best(
    make: object, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(make)
    weight = make()
    monkeypatch.setattr(svd, "_SKETCH_SIDE", 384)
    u, v = svd_factors(weight, rank)
    best = spectrum(weight)[0, rank:].norm()
    error = (weight.double() - u.double() @ v.double()).norm()
    assert error <= 1.01 * best + 1e-6 * largest(weight)
    kept = v.any(dim=2)
    assert torch.allclose(u.norm(dim=1)[kept], v.norm(dim=2)[kept], rtol=1e-3)
    values = v.double().norm(dim=2) ** 2
    assert (values.diff() <= 1e-6 * values.amax()).all()


def test_a_sketch_of_fewer_ranks_than_asked_for_is_exact_with_free_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(svd, "_SKETCH_SIDE", 64)
    for values in (torch.tensor([3.0, 1.0]).double(), torch.zeros(2).double()):
        weight = with_spectrum(values, 64, 90).float()
        u, v = svd_factors(weight, 8)
        assert largest(u.double() @ v.double() - weight.double()) <= 1e-6 * largest(weight)
        assert not v[:, 2:].any()
        unit = u / u.norm(dim=1, keepdim=True)
        assert torch.allclose(unit.mT @ unit, torch.eye(8), atol=1e-5)


def test_only_few_ranks_of_large_float32_matrices_are_sketched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(matrices: Tensor, rank: int) -> Tensor:
        raise AssertionError(f"sketched {tuple(matrices.shape)} at rank {rank}")

    monkeypatch.setattr(svd, "_sketched_directions", refuse)
    monkeypatch.setattr(svd, "_SKETCH_SIDE", 32)
    svd_factors(torch.randn(1, 32, 40), 5)
    svd_factors(torch.randn(1, 24, 40), 1)
    svd_factors(torch.randn(1, 32, 40, dtype=torch.float64), 1)
    with pytest.raises(AssertionError, match="sketched"):
        svd_factors(torch.randn(1, 40, 32), 4)
