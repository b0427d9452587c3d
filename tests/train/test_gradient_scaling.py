"""Scaled gradients: a step moves the product the same way, however large its factors are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.gradient_scaling import scale_gradients
from tests.support.kinds import KINDS, Kind


def moved(model: nn.Module, kind: Kind, *, scaled: bool, rate: float = 1e-6) -> list[Tensor]:
    """Return how far a small step moves each weight, per unit of its rate."""
    layers = low_rank_layers(model)
    before = [layer.weight.detach().clone() for layer in layers.values()]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    output = model(*kind.inputs(torch.float64))
    loss = (output if isinstance(output, Tensor) else output[0]).square().mean()
    loss.backward()
    if scaled:
        scale_gradients({layer: layer.rank for layer in layers.values()})
    optimizer.step()
    weights = [layer.weight.detach() for layer in layers.values()]
    return [(new - old) / rate for new, old in zip(weights, before, strict=True)]


def cut(kind: Kind, stretch: float) -> nn.Module:
    """Return a model of the kind at half its ranks, whose factors are not balanced."""
    model = lod.decompose(kind.dense(torch.float64), ranks=0.5, tied=kind.tied)
    with torch.no_grad():
        for layer in low_rank_layers(model).values():
            layer.u.mul_(stretch)
            layer.v.div_(stretch)
    return model


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_does_not_depend_on_how_a_weight_is_split(kind: Kind) -> None:
    balanced, stretched = (moved(cut(kind, by), kind, scaled=True) for by in (1.0, 7.0))
    for one, other in zip(balanced, stretched, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    plain = [moved(cut(kind, by), kind, scaled=False) for by in (1.0, 7.0)]
    assert any(not torch.allclose(a, b, rtol=0.1) for a, b in zip(*plain, strict=True))


def test_a_step_is_the_projection_of_the_dense_one() -> None:
    kind = KINDS[0]
    model = cut(kind, 3.0)
    layer = low_rank_layers(model)["layer"]
    u, v = (torch.linalg.qr(f)[0] for f in (layer.u.detach(), layer.v.detach().mT))
    dense = nn.Linear(24, 20).double()
    dense.weight = nn.Parameter(layer.weight.detach().clone())
    dense.bias = nn.Parameter(layer.bias.detach().clone())
    dense(*kind.inputs(torch.float64)).square().mean().backward()
    step = -dense.weight.grad
    wanted = u @ u.mT @ step + step @ v @ v.mT
    (got,) = moved(model, kind, scaled=True)
    torch.testing.assert_close(got, wanted, rtol=0.15, atol=0.02 * float(wanted.abs().max()))


def test_ranks_that_are_not_in_use_and_layers_without_gradients_are_left_alone() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 9)))
    model(torch.randn(4, 8)).square().sum().backward()
    first, second = low_rank_layers(model).values()
    second.u.grad = None
    before = [first.u.grad.clone(), first.v.grad.clone(), second.v.grad.clone()]
    scale_gradients({first: 2, second: 3})
    torch.testing.assert_close(first.u.grad[:, 2:], before[0][:, 2:], rtol=0, atol=0)
    torch.testing.assert_close(first.v.grad[2:], before[1][2:], rtol=0, atol=0)
    torch.testing.assert_close(second.v.grad, before[2], rtol=0, atol=0)
    assert not torch.allclose(first.u.grad[:, :2], before[0][:, :2])
