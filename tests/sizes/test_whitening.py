"""Whitened factors are the best of every rank in the measure that they are given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maestro_lod.layers.svd import svd_factors
from maestro_lod.sizes.whitening import energies, whitened_factors

SIZES = st.integers(1, 9)


def moment(size: int, samples: int, groups: int = 1) -> Tensor:
    """The second moment of random vectors of very different lengths; singular if there are few."""
    rows = torch.randn(groups, samples, size, dtype=torch.float64) * torch.logspace(1, -1, size)
    return rows.mT @ rows


def root(metric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(metric)
    return vectors * values.clamp_min(0).sqrt() @ vectors.mT


def best(matrix: Tensor, rank: int) -> Tensor:
    """How far the best matrix of a rank is from this one."""
    return torch.linalg.svdvals(matrix)[rank:].square().sum()


@given(SIZES, SIZES, st.booleans(), st.booleans(), st.integers(0, 99))
def test_every_rank_is_the_best_in_its_measure(m, n, by_inputs, by_outputs, seed):
    torch.manual_seed(seed)
    weight = torch.randn(1, m, n, dtype=torch.float64)
    inputs = moment(n, 3 * n) if by_inputs else None
    outputs = moment(m, 3 * m) if by_outputs else None
    right = torch.eye(n, dtype=torch.float64) if inputs is None else root(inputs[0])
    left = torch.eye(m, dtype=torch.float64) if outputs is None else root(outputs[0])
    u, v = whitened_factors(weight, min(m, n), inputs, outputs)
    whole = (left @ weight[0] @ right).square().sum()
    for k in range(min(m, n) + 1):
        error = (left @ (weight[0] - u[0, :, :k] @ v[0, :k]) @ right).square().sum()
        assert error <= best(left @ weight[0] @ right, k) + 1e-5 * whole, k
    tails = energies(weight, inputs, outputs).flip(0).cumsum(0).flip(0)
    for k, tail in enumerate(tails):
        torch.testing.assert_close(
            tail, best(left @ weight[0] @ right, k), rtol=1e-4, atol=1e-5 * float(whole)
        )


@given(SIZES, SIZES, st.integers(0, 3), st.sampled_from([torch.float32, torch.float64]))
def test_full_rank_is_the_weight_whatever_was_measured(m, n, samples, dtype):
    weight = torch.randn(2, m, n, dtype=dtype)
    u, v = whitened_factors(weight, min(m, n), moment(n, samples, 2), moment(m, samples, 2))
    torch.testing.assert_close((u @ v).to(dtype), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 12, 7), (1, 7, 12), (3, 8, 8)])
def test_without_measure_it_is_the_svd(shape):
    weight = torch.randn(shape)
    for rank in (1, 4, 7):
        u, v = whitened_factors(weight, rank, None)
        plain_u, plain_v = svd_factors(weight, rank)
        torch.testing.assert_close((u @ v).float(), plain_u @ plain_v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 12, 7), (2, 7, 12)])
def test_both_factors_of_a_rank_are_equally_long(shape):
    weight = torch.randn(shape)
    u, v = whitened_factors(weight, 5, moment(shape[2], 40, 2), moment(shape[1], 40, 2))
    torch.testing.assert_close(u.norm(dim=1), v.norm(dim=2))


def test_ranks_that_carry_nothing_can_be_trained():
    weight = torch.zeros(1, 4, 6)
    weight[0, 0] = 1.0
    u, v = whitened_factors(weight, 4, moment(6, 20))
    assert (u.norm(dim=1) > 0.1).all()
    assert not v[0, 1:].any()


def test_a_diagonal_counts_like_its_matrix():
    weight, counts = torch.randn(1, 9, 4), torch.rand(1, 9) + 0.1
    by_diagonal = whitened_factors(weight, 2, None, counts)
    by_matrix = whitened_factors(weight, 2, None, torch.diag_embed(counts))
    torch.testing.assert_close(
        by_diagonal[0] @ by_diagonal[1], by_matrix[0] @ by_matrix[1], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("rank", [64, 256])
def test_few_ranks_of_a_large_matrix_are_within_one_percent_of_the_best(rank):
    weight, inputs = torch.randn(1, 1024, 1056), moment(1056, 1200)
    u, v = whitened_factors(weight, rank, inputs)  # by iteration; a random weight is the hardest
    left_out = weight[0].double() - u[0] @ v[0]
    error = (left_out @ inputs[0] * left_out).sum()
    tail = energies(weight, inputs)[rank:].sum()
    assert error.sqrt() < 1.01 * tail.sqrt()
