"""Measured allocation: curves from a few measurements, and nested ranks for all sizes."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.layers.ranks import at_ranks, low_rank_layers
from maestro_lod.model.cost import Costs
from maestro_lod.sizes.allocation import smallest_cost
from maestro_lod.sizes.calibrated_allocation import rank_energies
from maestro_lod.sizes.calibration import calibrate
from maestro_lod.sizes.measured_allocation import (
    convex_losses,
    count_measurements,
    loss_curve,
    measure_losses,
    nested_ranks,
)


def net(seed: int, widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=i % 2 == 0) for i, (a, b) in enumerate(pairwise(widths))]
    return nn.Sequential(*layers)


shapes = st.lists(st.integers(3, 24), min_size=2, max_size=5).map(tuple)


@given(
    widths=shapes,
    seed=st.integers(0, 99),
    shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6),
    frozen=st.booleans(),
)
def test_smaller_sizes_have_no_more_ranks_in_any_layer(
    widths: tuple[int, ...], seed: int, shares: list[float], frozen: bool
) -> None:
    model = lod.decompose(net(seed, widths))
    layers = low_rank_layers(model)
    if frozen:
        next(iter(layers.values())).requires_grad_(False)
    costs = Costs(model, None)
    losses = {n: torch.rand(m.rank + 1).cumsum(0).flip(0) for n, m in layers.items()}
    limits = [int(share * costs.dense.params) for share in shares]
    found = nested_ranks(model, costs, losses, limits)
    assert found.keys() == set(limits)
    least = smallest_cost(model, costs, "params")
    for limit, ranks in found.items():
        assert costs.at(ranks).params <= max(limit, least)
        for name, rank in ranks.items():
            assert 1 <= rank <= layers[name].rank
            assert layers[name].u.requires_grad or rank == layers[name].rank
    for larger, smaller in pairwise(sorted(found, reverse=True)):
        assert all(found[smaller][name] <= rank for name, rank in found[larger].items())


@given(seed=st.integers(0, 99), limit=st.integers(40, 200))
def test_no_other_ranks_within_a_limit_lose_less(seed: int, limit: int) -> None:
    model = lod.decompose(net(seed, (6, 5, 7)))
    torch.manual_seed(seed)
    layers, costs = low_rank_layers(model), Costs(model, None)
    losses = {}
    for name, layer in layers.items():  # convex in what the ranks cost
        spent = torch.tensor([costs.layer(name, rank).params for rank in range(layer.rank + 1)])
        losses[name] = 5 * torch.rand(1) * (1 - spent / spent[-1]) ** (1 + 3 * torch.rand(1))

    def total(a: int, b: int) -> float:
        return float(losses["0"][a] + losses["1"][b])

    ranks = nested_ranks(model, costs, losses, [limit])[limit]
    others = [
        total(a, b)
        for a in range(1, 6)
        for b in range(1, 6)
        if 0.95 * limit <= costs.at({"0": a, "1": b}).params <= limit
    ]
    if others:
        assert total(ranks["0"], ranks["1"]) <= min(others) + 1e-5


def decomposed(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    dense = nn.Sequential(
        nn.Linear(20, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 16), nn.Linear(16, 5)
    ).to(dtype)
    data = [(torch.randn(32, 20, dtype=dtype), torch.randint(5, (32,))) for _ in range(4)]
    calibration = calibrate(dense, data, loss=F.cross_entropy)
    model = lod.decompose(copy.deepcopy(dense), calibration=calibration)
    return model, rank_energies(low_rank_layers(model), calibration)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_curves_pass_through_what_was_measured_and_fall(dtype: torch.dtype) -> None:
    model, energies = decomposed(dtype)
    x = torch.randn(64, 20, dtype=dtype)
    wanted = model.train()(x).detach()
    asked: list[dict[str, int]] = []

    def loss(m: nn.Module) -> torch.Tensor:
        asked.append({name: layer.active_rank for name, layer in low_rank_layers(m).items()})
        return F.mse_loss(m(x), wanted)

    before = copy.deepcopy(model.state_dict())
    curves = measure_losses(model, loss, energies)
    assert len(asked) == count_measurements(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    full = lod.ranks(model)
    for name, curve in curves.items():
        assert len(curve) == full[name] + 1 and curve[-1] == 0
        assert all(fewer >= more for fewer, more in pairwise(curve.tolist()))
    for ranks in asked[1:]:
        ((name, rank),) = [(n, r) for n, r in ranks.items() if r != full[n]]
        with at_ranks(model, ranks), torch.no_grad():
            value = float(F.mse_loss(model(x), wanted))
        assert float(curves[name][rank]) >= 0.99 * value  # at least: noise is smoothed upwards


def test_the_smallest_size_is_not_held_to_the_ranks_of_larger_ones() -> None:
    """Two layers take turns in what they need most, so that the best ranks are not nested."""
    model = lod.decompose(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    first = torch.tensor([9.0, 4.0, 3.9, 0.1, *[0.0] * 13])  # of use from three ranks on
    second = torch.tensor([9.0, 2.0, 1.0, 0.9, *[0.8] * 12, 0.0])
    losses, costs = {"0": first, "1": second}, Costs(model, None)
    small, large = (costs.at({"0": r, "1": 4 - r}).params for r in (2, 3))
    large += costs.layer("1", 2).params - costs.layer("1", 1).params
    found = nested_ranks(model, costs, losses, [small, large])
    assert found[small] == {"0": 3, "1": 1}
    assert found[large] == {"0": 3, "1": 2}


def test_a_layer_that_needs_two_more_ranks_gets_them_in_time() -> None:
    """The first of them brings nothing, and other layers always have some use for its cost."""
    model = lod.decompose(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    stairs = torch.tensor([9.0, 9.0, 9.0, 1.0, *[0.0] * 13])
    slope = torch.tensor([0.5 * 0.8**rank for rank in range(16)] + [0.0])
    losses, costs = {"0": stairs, "1": slope}, Costs(model, None)
    limits = [costs.at({"0": 1, "1": rank}).params for rank in range(1, 8)]
    found = nested_ranks(model, costs, convex_losses(model, costs, losses), limits)
    assert [found[limit]["0"] for limit in limits[:3]] == [1, 2, 3]


@given(
    energy=st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=12),
    steepness=st.floats(1e-6, 1e6),
)
def test_curves_stay_between_what_was_measured_whatever_the_energies(
    energy: list[float], steepness: float
) -> None:
    at = sorted({0, 1, len(energy) - 1})
    curve = loss_curve(torch.tensor(energy), at, lambda rank: steepness / (1 + rank) ** 9)
    assert bool(curve.isfinite().all()) and float(curve.min()) >= 0.0
    assert all(float(curve[1]) >= float(value) * (1 - 1e-9) for value in curve[1:])


def test_losses_that_are_no_numbers_count_as_ruin() -> None:
    model, energies = decomposed()

    def loss(m: nn.Module) -> float:
        return float("nan") if low_rank_layers(m)["0"].active_rank < 20 else 0.0

    curves = measure_losses(model, loss, energies)
    assert float(curves["0"][1]) == 1e6 and float(curves["0"][-1]) == 0.0
    assert float(curves["3"][1]) < 1e-6


def test_layers_without_ranks_are_left_alone() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)), ranks={"0": 0})
    energies = {"0": torch.zeros(0), "1": torch.ones(6)}
    x = torch.randn(4, 8)
    curves = measure_losses(model, lambda m: m(x).square().mean(), energies)
    assert curves["0"].tolist() == [0.0] and len(curves["1"]) == 7
    costs = Costs(model, None)
    assert nested_ranks(model, costs, curves, [1000])[1000] == {"0": 0, "1": 6}
