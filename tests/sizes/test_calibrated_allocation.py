"""Ranks by arithmetic keep the limit, and lose least where layers do not depend on each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Costs
from maestro_lod.sizes.calibrated_allocation import choose_ranks, rank_energies
from maestro_lod.sizes.calibration import calibrate


class Beside(nn.Module):
    """Layers side by side, so that what they lose adds up; each matters by a factor of its own."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in factors)
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([f * m(x) for f, m in zip(self.factors, self.layers, strict=True)], 1)


def calibrated(model: nn.Module, x: Tensor, **options):
    found = calibrate(model, [(x, None)], **options)
    return lod.decompose(model, calibration=found), found


def summed(output: Tensor, target: None) -> Tensor:
    """A loss whose gradients are independent of each other and of inputs."""
    return (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))).sum()


@given(st.floats(0.3, 1.0), st.integers(0, 9), st.booleans())
def test_limits_are_kept_and_hardly_missed(share, seed, with_loss):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 16), nn.Linear(16, 25))
    x = torch.randn(60, 20)
    model, found = calibrated(model, x, loss=summed if with_loss else None)
    costs = Costs(model, None)
    params = costs.at(choose_ranks(model, found, max_params=share)).params
    assert params <= share * costs.dense.params
    dense_again = max(layer.dense_weights for layer in (model[0], model[2], model[3]))
    assert params > share * costs.dense.params - dense_again


def test_the_error_is_close_to_the_best_of_all_ranks_within_the_limit():
    torch.manual_seed(3)
    model, x = Beside(1.0, 1.0), torch.randn(500, 12) * torch.logspace(0.5, -0.5, 12)
    expected = model(x).detach()
    model, found = calibrated(model, x, loss=summed)

    def error(ranks: dict[str, int]) -> float:
        with lod.at_ranks(model, ranks), torch.no_grad():
            return float((model(x) - expected).square().sum())

    costs = Costs(model, None)
    pairs = itertools.product(range(1, 13), repeat=2)
    possible = [dict(zip(lod.ranks(model), pair, strict=True)) for pair in pairs]
    for share in (0.4, 0.6, 0.8):
        limit = int(share * costs.dense.params)
        best = min(error(r) for r in possible if costs.at(r).params <= limit)
        assert error(choose_ranks(model, found, max_params=limit)) <= 1.5 * best, share


def test_a_layer_that_matters_more_keeps_more():
    torch.manual_seed(0)
    model, found = calibrated(Beside(1.0, 20.0), torch.randn(200, 12), loss=summed)
    low, high = choose_ranks(model, found, max_params=0.5).values()
    assert low < high
    assert (
        rank_energies(low_rank_layers(model), found)["layers.1"].sum()
        > 100 * rank_energies(low_rank_layers(model), found)["layers.0"].sum()
    )


def test_without_gradients_all_layers_matter_the_same():
    model, found = calibrated(Beside(1.0, 20.0), torch.randn(200, 12))
    assert not found.has_gradients
    for energy in rank_energies(low_rank_layers(model), found).values():
        torch.testing.assert_close(energy.sum(), torch.ones((), dtype=energy.dtype))


def test_a_loss_decides_between_allocations():
    torch.manual_seed(0)
    model, x = Beside(1.0, 6.0), torch.randn(200, 12)
    expected = model(x).detach()
    model, found = calibrated(model, x)  # which believes that both matter the same

    def loss(m: nn.Module) -> Tensor:
        return (m(x) - expected).square().mean()

    def measured(ranks: dict[str, int]) -> float:
        with lod.at_ranks(model, ranks), torch.no_grad():
            return float(loss(model))

    told = choose_ranks(model, found, max_params=0.5, objective=loss)
    assert measured(told) <= measured(choose_ranks(model, found, max_params=0.5))
    assert Costs(model, None).at(told).params <= 0.5 * Costs(model, None).dense.params


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (0, "above 0"),
        (1.5, "share"),
        (True, "not a number"),
        (3, "cannot be reached: 0 parameters"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limit, says):
    model, found = calibrated(Beside(1.0), torch.randn(20, 12))
    with pytest.raises(OptionError, match=says):
        choose_ranks(model, found, max_params=limit)
