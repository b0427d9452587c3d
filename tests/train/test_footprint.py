"""What a training step holds, counted from shapes."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.train.footprint import footprint


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_parts_of_a_small_model() -> None:
    found = footprint(net(), torch.randn(1, 8), batch=64, moments=2)
    weights = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert (found.weights, found.gradients, found.optimizer) == (weights, weights, 2 * weights)
    # the input, what the ReLU gives, and the outputs twice, for the loss
    assert found.saved == 4 * 64 * (8 + 16 + 2 * 4)
    assert found.total == 4 * weights + found.saved == found.to_dict()["total"]


@pytest.mark.parametrize(
    ("build", "example"),
    [
        (net, torch.randn(1, 8)),
        (LeNet, torch.randn(1, 1, 28, 28)),
        (lambda: nn.LSTM(8, 16, batch_first=True), torch.randn(1, 5, 8)),
        (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(1, 5, 16)),
    ],
)
def test_other_forms_are_those_of_the_model_before_and_after_decomposing(
    build: Any, example: Tensor
) -> None:
    model = build()
    low_rank = lod.decompose(copy.deepcopy(model), ranks=0.5)
    assert footprint(low_rank, example, batch=3, form="dense") == footprint(model, example, batch=3)
    full = footprint(lod.decompose(model), example, batch=3)
    assert footprint(low_rank, example, batch=3, form="full rank") == full


def test_fewer_ranks_hold_less_and_all_of_them_more_than_dense() -> None:
    model, example = lod.decompose(LeNet()), torch.randn(1, 1, 28, 28)
    small = lod.decompose(LeNet(), ranks=0.1)
    dense = footprint(model, example, batch=16, form="dense")
    assert footprint(small, example, batch=16).total < dense.total
    assert footprint(model, example, batch=16).total > dense.total


class Chooser(nn.Module):
    """Looks at values, so that it cannot run without them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = net(), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.norm(self.net(x))
        return scores if float(scores.sum()) > 1e9 else F.dropout(scores, 0.5, self.training)


def test_a_model_that_looks_at_values_runs_as_a_copy() -> None:
    model, example = lod.decompose(Chooser()), torch.randn(1, 8)
    before, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    found = footprint(model, example, batch=6)
    assert found.saved > 4 * 6 * (8 + 16)
    assert torch.equal(random, torch.random.get_rng_state())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_what_has_no_samples_stays_as_it_is() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    masked = (torch.randn(1, 5, 16), torch.zeros(5, 5))
    assert footprint(layer, masked, batch=7).saved > 5 * footprint(layer, masked).saved


def test_frozen_weights_have_no_gradients() -> None:
    model = net().requires_grad_(False)
    model[2].requires_grad_(True)
    found = footprint(model, torch.randn(1, 8), moments=1)
    assert found.gradients == found.optimizer == 4 * (16 * 4 + 4)


def test_outputs_are_freed_before_the_backward() -> None:
    model = lod.decompose(net())
    train = lod.LoD(model, torch.optim.SGD(model.parameters(), 0.1))
    given: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def forward() -> Tensor:
        output = model(torch.randn(4, 8))
        given.append(weakref.ref(output))
        return output

    model[0].bias.register_hook(lambda _: alive.append(given[-1]() is not None))
    train.backward(forward, lambda output: F.cross_entropy(output, torch.zeros(4).long()))
    assert alive == [False]
