"""Layers that begin as zeros: nothing is removed before it had a chance to move, and they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.nn import functional as F

from maestro_lod import Budget, LoD, decompose, ranks
from maestro_lod.train.fit import fit
from maestro_lod.train.shrink import shrink
from maestro_lod.train.unmoved import Grace, unmoved_ranks


def zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    return layer


class Residual(nn.Module):
    """Adds a branch that begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), zeroed(nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(F.relu(self.first(x)))


class Patches(nn.Module):
    """A small ViT on the four quarters of a digit, whose head begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.place = nn.Parameter(0.1 * torch.randn(4, 32))
        self.head = zeroed(nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        quarters = x.view(-1, 2, 4, 2, 4).transpose(2, 3).reshape(-1, 4, 16)
        return self.head(self.block(self.embed(quarters) + self.place).mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "head of a ViT": (Patches, "head"),
    "residual branch": (
        lambda: nn.Sequential(nn.Linear(64, 32), Residual(), nn.Linear(32, 10)), "1.last",
    ),
    "last layer of an MLP": (
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), zeroed(nn.Linear(32, 10))), "2",
    ),
}  # fmt: skip


def digits() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    return batches[:23], batches[23:]


def warm_up(step: int) -> float:
    return float(step >= 23)  # the steps of an epoch


def begun(name: str, **options: object) -> tuple[nn.Module, LoD]:
    torch.manual_seed(0)
    model = decompose(MODELS[name][0]())
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    return model, LoD(model, optimizer, penalty=1e-4, **options)  # type: ignore[arg-type]


def accuracy(
    model: nn.Module, optimizer: optim.Optimizer, method: LoD | None = None, **options: Any
) -> float:
    train, held_out = digits()
    settings = {"epochs": 15, "method": method, "validation": held_out, **options}
    done = fit(model, train, optimizer=optimizer, **settings)
    return done.history[-1].validation["accuracy"]


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_begin_as_zeros_learn_as_dense_ones_do(name: str, proximal: bool) -> None:
    build, layer = MODELS[name]
    torch.manual_seed(0)
    dense = build()
    expected = accuracy(dense, optim.Adam(dense.parameters(), lr=5e-3))
    model, train = begun(name, proximal=proximal, threshold=1e-6 if proximal else 1e-3)
    assert unmoved_ranks(model) == {layer: ranks(model)[layer]}
    reached = accuracy(model, train.optimizer, train)
    assert ranks(model)[layer] > 0
    assert reached > max(0.8, expected - 0.04)  # dense ones differ by 0.02 between seeds


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("without", ["grace", "directions"])
def test_without_either_the_same_training_loses_the_layer(
    name: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they learn by: ranks that may move before they are judged, and directions to move in.

    The rate begins at zero, as in many warm-ups, so that nothing has moved after the first epoch.
    """
    layer = MODELS[name][1]
    model, train = begun(name, threshold=1e-3)
    if without == "grace":
        monkeypatch.setattr(Grace, "end_epoch", lambda self, epoch: {})
    else:
        with torch.no_grad():
            model.get_submodule(layer).u.zero_()
            model.get_submodule(layer).v.zero_()
    accuracy(model, train.optimizer, train, epochs=2, schedule=warm_up)
    assert ranks(model)[layer] == 0


@pytest.mark.parametrize("name", MODELS)
def test_with_both_it_keeps_the_layer(name: str) -> None:
    model, train = begun(name, threshold=1e-3)
    accuracy(model, train.optimizer, train, epochs=2, schedule=warm_up)
    assert ranks(model)[MODELS[name][1]] > 0


def one_step(model: nn.Module, train: LoD, x: Tensor, y: Tensor) -> dict[str, int]:
    with train.step() as drawn:
        (F.cross_entropy(model(x), y) + train.penalty_loss()).backward()
    train.optimizer.step()
    train.optimizer.zero_grad()
    return drawn


def zero_head() -> nn.Module:
    torch.manual_seed(0)
    return decompose(nn.Sequential(zeroed(nn.Linear(64, 10))))


def test_ranks_that_no_step_has_reached_yet_are_kept() -> None:
    model, (x, y) = zero_head(), digits()[0][0]
    train = LoD(model, optim.SGD(model.parameters(), lr=0.1), seed=1)
    drawn = one_step(model, train, x, y)
    assert drawn["0"] < 10  # the ranks behind it got no gradient
    assert train.end_epoch() == {}


def test_a_rate_that_begins_at_zero_removes_nothing() -> None:
    model, batches = zero_head(), digits()[0]
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    train = LoD(model, optimizer, penalty=1e-5)
    for rate in (0.0, 0.0, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        for x, y in batches:
            one_step(model, train, x, y)
        assert train.end_epoch() == {}
    assert unmoved_ranks(model) == {}
    x, y = digits()[1][0]
    assert (model(x).argmax(1) == y).float().mean() > 0.7


def test_under_a_budget_too_nothing_goes_that_has_not_moved() -> None:
    torch.manual_seed(0)
    model = decompose(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), zeroed(nn.Linear(32, 10))))
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    train = LoD(model, optimizer, penalty=Budget(params=0.3, steps=1000))
    one_step(model, train, *digits()[0][0])
    assert train.end_epoch() == {}
    assert train.landing is not None
    assert train.landing.phase == "whole"


def test_what_has_moved_is_judged_from_the_second_epoch_on() -> None:
    model, (x, y) = zero_head(), digits()[0][0]
    train = LoD(model, optim.SGD(model.parameters(), lr=0.1), threshold=1e9)
    for _ in range(30):
        one_step(model, train, x, y)
    assert train.end_epoch() == {}
    one_step(model, train, x, y)
    train.min_rank = 1
    assert train.end_epoch() == {"0": 9}


def test_ranks_that_become_zero_later_get_no_such_grace() -> None:
    torch.manual_seed(0)
    model, (x, y) = decompose(nn.Sequential(nn.Linear(64, 10))), digits()[0][0]
    train = LoD(model, optim.SGD(model.parameters(), lr=0.1))
    one_step(model, train, x, y)
    with torch.no_grad():
        model[0].v[4:] = 0
    assert train.end_epoch() == {"0": 6}


def test_the_grace_is_part_of_the_state_and_older_states_have_none() -> None:
    model, (x, y) = zero_head(), digits()[0][0]
    train = LoD(model, optim.SGD(model.parameters(), lr=0.0))
    one_step(model, train, x, y)
    state = train.state_dict()
    assert state["unmoved"] == {"0": 10}

    same = LoD(model, train.optimizer)
    same.load_state_dict(state)
    assert same.end_epoch() == {}

    del state["unmoved"]
    older = LoD(model, train.optimizer, min_rank=1)
    older.load_state_dict(state)
    assert older.end_epoch() == {"0": 9}


def test_a_shrink_by_hand_takes_the_threshold_at_its_word() -> None:
    model = decompose(nn.Sequential(nn.Linear(64, 32), zeroed(nn.Linear(32, 10))))
    assert shrink(model, threshold=0.0, min_rank=1) == {"1": 9}
