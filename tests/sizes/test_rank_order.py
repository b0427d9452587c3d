"""Ranks in order: the weight stays, its best approximations come first, moments follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import maestro_lod as lod
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.sizes.rank_order import order_ranks

LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(7, 5),
    "conv": lambda: nn.Conv2d(4, 6, 3),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
    "embedding": lambda: nn.Embedding(9, 4),
    "lstm": lambda: nn.LSTM(3, 4),
}


def disordered(kind: str) -> nn.Module:
    """A layer whose factors training could have left like this: of any directions."""
    model = lod.decompose(nn.Sequential(LAYERS[kind]()))
    with torch.no_grad():
        for layer in low_rank_layers(model).values():
            layer.u.normal_()
            layer.v.normal_()
    return model


@pytest.mark.slow
@given(kind=st.sampled_from(sorted(LAYERS)), seed=st.integers(0, 99), averaged=st.booleans())
def test_the_weight_stays_and_its_first_ranks_are_the_best(
    kind: str, seed: int, averaged: bool
) -> None:
    torch.manual_seed(seed)
    model = disordered(kind)
    ema = AveragedModel(model) if averaged else None
    before = {name: layer.weight.detach() for name, layer in low_rank_layers(model).items()}
    order_ranks(model, ema=ema)
    for copy in (model, *([] if ema is None else [ema.module])):
        for name, layer in low_rank_layers(copy).items():
            torch.testing.assert_close(layer.weight.detach(), before[name], rtol=1e-3, atol=1e-3)
            matrices = layer.to_matrices(layer.weight.detach()).double()
            values = torch.linalg.svdvals(matrices)
            u, v = (f.detach().double() for f in layer._matrices(layer.u, layer.v))
            for rank in range(layer.rank):  # no other matrices of this rank are nearer
                lost = (matrices - u[..., :rank] @ v[:, :rank]).square().sum()
                wanted = values[..., rank:].square().sum()
                torch.testing.assert_close(lost, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_momentum_is_what_the_gradients_would_have_left_in_the_new_directions(kind: str) -> None:
    torch.manual_seed(0)
    model = disordered(kind)
    gradients = {n: torch.randn_like(m.weight) for n, m in low_rank_layers(model).items()}

    def backward() -> None:
        model.zero_grad()
        for name, layer in low_rank_layers(model).items():
            (layer.weight * gradients[name]).sum().backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    backward()
    optimizer.step()
    order_ranks(model, optimizer)
    backward()
    for layer in low_rank_layers(model).values():
        for factor in (layer.u, layer.v):
            held: Tensor = optimizer.state[factor]["momentum_buffer"]
            assert factor.grad is not None
            torch.testing.assert_close(held, factor.grad, rtol=1e-2, atol=1e-3)


def test_squares_stay_squares_and_frozen_layers_as_they_are() -> None:
    torch.manual_seed(0)
    model = lod.decompose(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    with torch.no_grad():
        model[0].u.normal_()
        model[1].u.normal_()
    model[1].requires_grad_(False)
    frozen = model[1].u.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    order_ranks(model, optimizer)
    assert torch.equal(model[1].u, frozen)
    state = optimizer.state[model[0].u]
    assert bool((state["exp_avg_sq"] > 0).all()) and bool((state["exp_avg"] < 0).any())


def test_a_weight_that_is_zero_has_nothing_to_order() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(5, 4)))
    with torch.no_grad():
        model[0].u.zero_()
    order_ranks(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert bool(torch.isfinite(model[0].u).all()) and not bool(model[0].weight.any())
