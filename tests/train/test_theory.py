"""What the paper shows on linear maps (its Figures 2a, 2b, 6 and 7), asserted.

Training the map A on data x with sampled ranks makes the first k ranks, for every k at once, the
best map of rank k on the data: the truncated SVD of A if the data is white, PCA if A is the
identity, and in general the SVD of what A does to the data.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from maestro_lod import LoD, at_ranks, decompose, importance, ranks


def orthonormal(rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns))[0]


def linear_map(weight: Tensor) -> nn.Module:
    """A low-rank layer that starts from this weight."""
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        dense.weight.copy_(weight)
    return decompose(dense)


def fit(train: LoD, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        with train.step():
            loss = F.mse_loss(train.model(x), y, reduction="sum") + train.penalty_loss()
            loss.backward()
        train.optimizer.step()
        train.optimizer.zero_grad()


@torch.no_grad()
def outputs_at(model: nn.Module, x: Tensor, rank: int) -> Tensor:
    with at_ranks(model, rank):
        return model(x)


def best_of_rank(y: Tensor, rank: int) -> Tensor:
    left, scale, right = torch.linalg.svd(y, full_matrices=False)
    return left[:, :rank] * scale[:rank] @ right[:rank]


def singular_values(model: nn.Module) -> Tensor:
    return torch.linalg.svdvals(model.weight.detach())


# -- Figure 2a ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["pairs", "several"])
def test_training_with_sampled_ranks_recovers_the_svd(sampling):
    torch.manual_seed(123)
    target = torch.randn(9, 3) @ torch.randn(3, 6)
    target /= torch.linalg.matrix_norm(target, 2)
    model = decompose(nn.Linear(6, 9, bias=False))  # knows nothing of the target
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    train = LoD(model, optimizer, sampling=sampling, threshold=None)
    x = torch.eye(6)
    fit(train, x, target.T, steps=2500)
    for k in range(1, 7):
        error = outputs_at(model, x, k) - best_of_rank(target.T, k)
        assert error.norm() < 0.01, k


def test_training_without_sampling_does_not_order_the_ranks():
    torch.manual_seed(123)
    target = torch.randn(9, 3) @ torch.randn(3, 6)
    target /= torch.linalg.matrix_norm(target, 2)
    model = decompose(nn.Linear(6, 9, bias=False))
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    x = torch.eye(6)
    for _ in range(2500):
        F.mse_loss(model(x), target.T, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (outputs_at(model, x, 6) - target.T).norm() < 0.01
    assert (outputs_at(model, x, 1) - best_of_rank(target.T, 1)).norm() > 0.1


# -- Figure 2b ---------------------------------------------------------------------------------

SCALES = (1.2, 1.1, 1.0)


def data_in_three_directions() -> tuple[Tensor, Tensor]:
    """Points of R^10 along three orthonormal directions, and the directions."""
    torch.manual_seed(12345)
    directions = orthonormal(10, 3).T
    return torch.diag(torch.tensor(SCALES)) @ directions, directions


def autoencoder(proximal: bool) -> LoD:
    """A linear map of R^10, at full rank, that is to learn the identity on the data."""
    model = decompose(nn.Linear(10, 10, bias=False))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return LoD(model, optimizer, penalty=1e-2, threshold=1e-4, proximal=proximal)


@pytest.mark.parametrize("proximal", [False, True], ids=["subgradient", "proximal"])
def test_the_identity_on_data_in_three_directions_becomes_pca(proximal):
    x, directions = data_in_three_directions()
    train = autoencoder(proximal)
    for _ in range(10):
        fit(train, x, x, steps=250)
        train.end_epoch()
    assert ranks(train.model) == {"": 3}
    values = singular_values(train.model)
    torch.testing.assert_close(values[:3], torch.ones(3), rtol=0, atol=0.06)
    assert values[3:].max() < 1e-5
    for k in (1, 2, 3):
        projected = x @ directions[:k].T @ directions[:k]
        assert (outputs_at(train.model, x, k) - projected).norm() < 0.1, k


# -- Figure 6 ----------------------------------------------------------------------------------


def test_the_order_that_the_data_asks_for_is_learned_where_the_svd_has_it_reversed():
    torch.manual_seed(0)
    left, right = orthonormal(9, 3), orthonormal(6, 3)
    scale = torch.tensor([3.0, 2.0, 1.0])
    target = left * scale @ right.T
    x = torch.diag(torch.tensor([1.0, 2.0, 3.0]) / scale) @ right.T / 3  # last direction first
    y = x @ target.T
    svd = linear_map(target)
    model = linear_map(target + 0.01 * torch.randn_like(target))
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    fit(LoD(model, optimizer, threshold=None), x, y, steps=3000)
    for k in (1, 2):
        optimum = (best_of_rank(y, k) - y).norm()
        assert (outputs_at(model, x, k) - y).norm() < 1.02 * optimum
        assert (outputs_at(svd, x, k) - y).norm() > 1.5 * optimum
    assert (outputs_at(model, x, 3) - y).norm() < 0.01
    # the first rank is the last singular direction, and the other way round
    with at_ranks(model, 1):
        first = model.weight.detach()
    overlap = (left.T @ first @ right).diagonal().abs() / first.norm()
    assert overlap.argmax() == 2


# -- Figure 7 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("proximal", [False, True], ids=["subgradient", "proximal"])
def test_ranks_drop_from_three_to_two_when_the_data_loses_a_dimension(proximal):
    x, directions = data_in_three_directions()
    train = autoencoder(proximal)
    for _ in range(5):
        fit(train, x, x, steps=250)
        train.end_epoch()
    assert ranks(train.model) == {"": 3}
    flat = x - x @ directions[2:].T @ directions[2:]
    for _ in range(5):
        fit(train, flat, flat, steps=250)
        train.end_epoch()
    assert ranks(train.model) == {"": 2}
    assert [epoch[""] for epoch in train.history][5] == 3
    values = singular_values(train.model)
    torch.testing.assert_close(values[:2], torch.ones(2), rtol=0, atol=0.1)
    (weights,) = importance(train.model).values()
    assert (weights > 0.5).all()
