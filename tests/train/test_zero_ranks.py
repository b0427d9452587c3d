"""Layers that begin as zeros: nothing is removed before it had a chance to move, and they learn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from maestro_lod import LoD, decompose, ranks
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.fit import Watch, fit
from maestro_lod.train.method import RunPlan
from maestro_lod.train.progress import Progress
from maestro_lod.train.shrink import shrink
from maestro_lod.train.zero_ranks import unmoved_ranks


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
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    return batches[:23], batches[23:]


def warm_up(step: int) -> float:
    return float(step >= 23)  # the steps of an epoch


def warm_up_and_decay(step: int) -> float:
    return min(1.0, step / 46) * 0.5 * (1 + math.cos(math.pi * step / (15 * 23)))


def begun(name: str, **options: Any) -> tuple[nn.Module, LoD]:
    torch.manual_seed(0)
    model = decompose(MODELS[name][0]())
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    return model, LoD(model, optimizer, penalty=1e-4, **options)


def drawing(train: LoD) -> LoD:
    """Let a training draw ranks from the first step on, which it does where no layer is zero."""
    train.warmup_epochs = 0
    return train


def accuracy(
    model: nn.Module, optimizer: optim.Optimizer, method: LoD | None = None, **options: Any
) -> float:
    train, held_out = digits()
    settings = {"epochs": 15, "method": method, "validation": held_out, **options}
    done = fit(model, train, optimizer=optimizer, **settings)
    return done.history[-1].validation["accuracy"]


def fit_until(epoch: int, *given: Any, **options: Any) -> Progress:
    """Begin a training, and stop it after an epoch."""

    class Stopped(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.epoch == epoch:
            raise Stopped

    progress = Progress()
    with pytest.raises(Stopped):
        fit(*given, **options, progress=progress, watch=Watch(epoch=stop))
    return progress


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_begin_as_zeros_learn_as_dense_ones_do(name: str, proximal: bool) -> None:
    build, layer = MODELS[name]
    torch.manual_seed(0)
    dense = build()
    optimizer = optim.Adam(dense.parameters(), lr=5e-3)
    expected = accuracy(dense, optimizer, schedule=warm_up_and_decay)
    model, train = begun(name, proximal=proximal, threshold=1e-6 if proximal else 1e-3)
    assert unmoved_ranks(model) == {layer: ranks(model)[layer]}
    reached = accuracy(model, train.optimizer, train, schedule=warm_up_and_decay)
    assert ranks(model)[layer] > 0
    assert reached > max(0.8, expected - 0.03)  # dense ones differ by 0.02 between seeds


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_first_the_whole_model_is_trained_as_the_dense_one_is(name: str, proximal: bool) -> None:
    """Nothing is drawn, penalized or removed as long as what is zero has hardly moved."""
    model, train = begun(name, proximal=proximal)
    model.double()
    torch.manual_seed(0)
    dense = MODELS[name][0]().double()
    batches = [(x.double(), y) for x, y in digits()[0][:6]]
    for each, method in ((model, train), (dense, None)):
        optimizer = train.optimizer if method else optim.Adam(each.parameters(), lr=5e-3)
        fit_until(2, each, batches, optimizer=optimizer, method=method, epochs=6)
    assert train.warmup_epochs == 2 and train.epoch == 2
    x = digits()[1][0][0].double()
    torch.testing.assert_close(model(x), dense(x), rtol=1e-5, atol=1e-6)  # as float32 began
    assert all(layer.identity_factor is None for layer in low_rank_layers(model).values())
    assert train.history[0] == train.history[1] == ranks(model)


def test_a_run_that_goes_on_trains_alone_as_long_as_it_had_planned() -> None:
    batches = digits()[0][:4]
    whole, train = begun("residual branch", proximal=True)
    fit(whole, batches, optimizer=train.optimizer, method=train, epochs=7)
    half, first = begun("residual branch", proximal=True)
    progress = fit_until(1, half, batches, optimizer=first.optimizer, method=first, epochs=7)
    state = copy.deepcopy((half.state_dict(), first.optimizer.state_dict(), first.state_dict()))
    again, second = begun("residual branch", proximal=True)
    for part, saved in zip((again, second.optimizer, second), state, strict=True):
        part.load_state_dict(saved)
    fit(again, batches, optimizer=second.optimizer, method=second, epochs=7, progress=progress)
    assert second.warmup_epochs == 2
    for mine, other in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    second.start(again, second.optimizer, RunPlan(1000, 4))
    assert second.warmup_epochs == 2


ALONE = {
    "zeros": 6, "few ranks": 6, "rank-deficient": 6,
    "one row": 0, "ordinary": 0, "frozen": 0,
}  # fmt: skip


@pytest.mark.parametrize(("weight", "warmup"), ALONE.items())
def test_ranks_are_drawn_from_the_first_step_on_where_few_are_zero(
    weight: str, warmup: int
) -> None:
    dense = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
    with torch.no_grad():
        if weight == "rank-deficient":
            dense[1].weight[4:] = 0
        elif weight == "one row":  # as an embedding has for padding
            dense[1].weight[9:] = 0
        elif weight != "ordinary":
            dense[1].weight.zero_()
    dense[1].requires_grad_(weight != "frozen")
    model = decompose(dense, ranks={"1": 5} if weight == "few ranks" else None)
    train = LoD(model, optimizer := optim.SGD(model.parameters(), lr=0.1), penalty=1e-4)
    train.start(model, optimizer, RunPlan(epochs=20, steps_per_epoch=3))
    assert train.warmup_epochs == warmup


@pytest.mark.parametrize("begin", ["few ranks", "rank-deficient"])
def test_ranks_that_are_zero_beside_others_are_trained_alone_and_ordered(begin: str) -> None:
    """Where a layer does not have all its ranks, its factors are trained as they are."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        dense[2].weight[4:] = 0
    model = decompose(dense, ranks={"2": 8} if begin == "few ranks" else None)
    train = LoD(model, optim.SGD(model.parameters(), lr=0.1), penalty=1e-4, threshold=1e-3)
    x, y = digits()[0][0]
    assert one_step(model, train, x, y) == {"0": 32, "2": model[2].rank}
    assert (model[2].identity_factor is None) is (begin == "few ranks")
    assert train.end_epoch() == {}
    assert model[0].identity_factor is model[2].identity_factor is None
    values = torch.linalg.vector_norm(model[2].v.detach(), dim=1)
    assert torch.equal(values.sort(descending=True).values, values)
    assert len(one_step(model, train, x, y)) == 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("without", ["grace", "directions"])
def test_without_either_the_same_training_loses_the_layer(
    name: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they learn by: ranks that may move before they are judged, and directions to move in.

    The rate begins at zero, as in many warm-ups, so that nothing has moved after the first epoch.
    """
    layer = MODELS[name][1]
    if without == "grace":
        monkeypatch.setattr(
            "maestro_lod.train.zero_ranks.unmoved_ranks", lambda model: dict[str, int]()
        )
    model, train = begun(name, threshold=1e-3)
    drawing(train)
    if without == "directions":
        with torch.no_grad():
            model.get_submodule(layer).u.zero_()
            model.get_submodule(layer).v.zero_()
    accuracy(model, train.optimizer, train, epochs=2, schedule=warm_up)
    assert ranks(model)[layer] == 0


@pytest.mark.parametrize("name", MODELS)
def test_with_both_it_keeps_the_layer(name: str) -> None:
    model, train = begun(name, threshold=1e-3)
    accuracy(model, train.optimizer, drawing(train), epochs=2, schedule=warm_up)
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
    train = drawing(LoD(model, optim.SGD(model.parameters(), lr=0.1), seed=1))
    drawn = one_step(model, train, x, y)
    assert drawn["0"] < 10  # the ranks behind it got no gradient
    assert train.end_epoch() == {}


def test_a_rate_that_begins_at_zero_removes_nothing() -> None:
    model, batches = zero_head(), digits()[0]
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    train = drawing(LoD(model, optimizer, penalty=1e-5))
    for rate in (0.0, 0.0, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        for x, y in batches:
            one_step(model, train, x, y)
        assert train.end_epoch() == {}
    assert unmoved_ranks(model) == {}
    x, y = digits()[1][0]
    assert (model(x).argmax(1) == y).float().mean() > 0.7


def test_what_has_moved_is_judged_from_the_second_epoch_on() -> None:
    model, (x, y) = zero_head(), digits()[0][0]
    train = drawing(LoD(model, optim.SGD(model.parameters(), lr=0.1), threshold=1e9))
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
    train = drawing(LoD(model, optim.SGD(model.parameters(), lr=0.0)))
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


@pytest.mark.parametrize("lr", [0.005, 0.05])
def test_a_learning_rate_that_is_too_large_for_factors_is_warned_of_before_sampling(
    lr: float,
) -> None:
    """Sampled steps of a ViT with a head of zeros ended at 60 % at 0.05, and at 100 % at 0.005."""
    first = nn.Linear(64, 64)
    nn.init.orthogonal_(first.weight, gain=1.6)
    model = decompose(nn.Sequential(first, nn.ReLU(), zeroed(nn.Linear(64, 10))))
    train = LoD(model, optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    one_step(model, train, *digits()[0][0])
    if lr == 0.005:
        train.end_epoch()  # a warning would be an error
        return
    with pytest.warns(UserWarning, match=r"factors of these layers, .*: 0\. .*clip_norm"):
        train.end_epoch()
