"""Replaying gives what running gives, bit for bit, whatever the model does inside."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.errors import LayerError, OptionError
from maestro_lod.layers import LowRank
from maestro_lod.sizes.replay import Replay, batch_statistics


def mlp() -> tuple[nn.Module, Tensor]:
    layers = nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 9), nn.ReLU(), nn.Linear(9, 6)
    return nn.Sequential(*layers), torch.randn(16, 12)


class Block(nn.Module):
    """A residual block that writes into outputs of its modules, as many models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def residual() -> tuple[nn.Module, Tensor]:
    stem, blocks = nn.Conv2d(3, 6, 3, padding=1), (Block(6), nn.Dropout(), Block(6))
    return nn.Sequential(stem, *blocks, nn.Flatten(), nn.Linear(96, 5)), torch.randn(8, 3, 4, 4)


class Twice(nn.Module):
    """Calls one layer twice, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.shared(x)) + x)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, torch.randn(3, 5, 8)


class Language(nn.Module):
    """An embedding tied to the output head, and a recurrent layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp,
    "residual": residual,
    "called twice": lambda: (Twice(), torch.randn(6, 8)),
    "transformer": transformer,
    "language": lambda: (Language(), torch.randint(20, (4, 5))),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    dense, x = MODELS[request.param]()
    return lod.decompose(dense, tied="share"), x


def loss_of(x: Tensor) -> Callable[[nn.Module], Tensor]:
    """A loss that depends on every output."""
    return lambda model: model(x).float().logsumexp(-1).square().mean()


def plainly(model: nn.Module, loss: Callable[[nn.Module], Any], ranks: dict[str, int]) -> float:
    """Evaluate on a copy, in full."""
    twin = copy.deepcopy(model).eval()
    for module in twin.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
    with torch.no_grad(), lod.at_ranks(twin, ranks):
        return float(loss(twin))


class Walk:
    """A fixed random walk through the ranks of a model: evaluate here, accept there."""

    def __init__(self, replay: Replay, seed: int) -> None:
        self.replay, self.random = replay, torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.random))

    def step(self) -> tuple[dict[str, int], float]:
        names = list(self.replay.ranks)
        chosen = {names[self.draw(len(names))] for _ in range(1 + self.draw(2))}
        changes = {n: 1 + self.draw(self.replay.layers[n].rank) for n in chosen}
        loss = self.replay.evaluate(changes)
        ranks = {**self.replay.ranks, **changes}
        if self.draw(2):
            self.replay.accept(changes, loss)
        return ranks, loss


@pytest.mark.parametrize("memory", [0, 3000, 2**30])
def test_a_walk_gives_the_losses_of_full_evaluations(
    case: tuple[nn.Module, Tensor], memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = case
    replay = Replay(model, loss_of(x), memory=memory)
    assert replay.loss == plainly(model, loss_of(x), lod.ranks(model))
    walk = Walk(replay, seed=1)
    for _ in range(25):
        ranks, loss = walk.step()
        assert loss == plainly(model, loss_of(x), ranks)
    assert not caplog.records


@given(seed=st.integers(0, 1000))
def test_any_walk_gives_the_losses_of_full_evaluations(seed: int) -> None:
    torch.manual_seed(0)
    dense, x = residual()
    model = lod.decompose(dense)
    walk = Walk(Replay(model, loss_of(x), memory=2**30), seed)
    for _ in range(6):
        ranks, loss = walk.step()
        assert loss == plainly(model, loss_of(x), ranks)


def executed(monkeypatch: pytest.MonkeyPatch) -> list[LowRank]:
    """Collect the uses of low-rank layers from now on."""
    uses: list[LowRank] = []
    before = LowRank._active_factors

    def noted(layer: LowRank) -> tuple[Tensor, Tensor]:
        uses.append(layer)
        return before(layer)

    monkeypatch.setattr(LowRank, "_active_factors", noted)
    return uses


def test_only_what_a_change_reaches_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp()
    replay = Replay(lod.decompose(model), loss_of(x), memory=2**30)
    for name in ("0", "2", "4"):
        replay.evaluate({name: 3})
    uses = executed(monkeypatch)
    layers = [replay.layers[name] for name in ("0", "2", "4")]
    replay.evaluate({"4": 2})
    assert uses == layers[2:]
    uses.clear()
    replay.evaluate({"0": 2})
    assert uses == layers
    uses.clear()
    replay.accept({"2": 3}, replay.evaluate({"2": 3}))
    assert uses == layers[1:]
    uses.clear()
    replay.evaluate({"4": 2})  # the output of layer 2 has changed, that of layer 0 has not
    assert uses == layers[1:]
    uses.clear()
    replay.evaluate({"4": 1})
    assert uses == layers[2:]


def test_each_batch_of_a_loss_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, x = mlp()
    model = lod.decompose(dense)

    def loss(m: nn.Module) -> Tensor:
        return sum(m(part.clone()).square().mean() for part in x.split(4))  # type: ignore[return-value]

    replay = Replay(model, loss, memory=2**30)
    for name in ("0", "2", "4"):
        replay.evaluate({name: 3})
    uses = executed(monkeypatch)
    assert replay.evaluate({"4": 2}) == plainly(copy.deepcopy(model), loss, {"4": 2})
    assert uses.count(replay.layers["4"]) == 4
    assert uses.count(replay.layers["0"]) == 0
    walk = Walk(replay, seed=0)
    for _ in range(10):
        ranks, value = walk.step()
        assert value == plainly(model, loss, ranks)


def fed_back(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):  # what a pass gets depends on the pass before
        x = torch.tanh(model(x))
    return x.square().sum()


def by_parts(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.get_submodule("shared")(model.get_submodule("first")(x)))
    return (
        model.get_submodule("last")(hidden).square().sum()
        + model.get_submodule("last").weight.sum()
    )


def through_one_buffer(model: nn.Module, x: Tensor) -> Tensor:
    buffer, total = x.clone(), torch.zeros(())
    for i in range(3):
        buffer.copy_(x * i + total)
        total = total + model(buffer).square().mean()
    return total


@pytest.mark.parametrize("function", [fed_back, by_parts, through_one_buffer])
def test_passes_that_depend_on_each_other(
    function: Callable[[nn.Module, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = lod.decompose(Twice()), torch.randn(5, 8)

    def loss(m: nn.Module) -> Tensor:
        return function(m, x)

    walk = Walk(Replay(model, loss, memory=2**30), seed=2)
    for _ in range(25):
        ranks, value = walk.step()
        assert value == plainly(model, loss, ranks)
    assert not caplog.records


def test_parts_that_are_not_reached_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = lod.decompose(Twice()), torch.randn(5, 8)
    replay = Replay(model, lambda m: by_parts(m, x), memory=2**30)
    uses = executed(monkeypatch)
    replay.evaluate({"last": 2})
    assert set(uses) == {replay.layers["last"]}
    uses.clear()
    replay.evaluate({"shared": 2})
    assert replay.layers["first"] not in uses


def test_without_memory_everything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp()
    replay = Replay(lod.decompose(model), loss_of(x), memory=0)
    uses = executed(monkeypatch)
    replay.evaluate({"4": 2})
    assert len(uses) == 3


@pytest.mark.parametrize("memory", [4_000, 10_000, 20_000])
def test_memory_is_not_exceeded(memory: int) -> None:
    model, x = residual()
    replay = Replay(lod.decompose(model), loss_of(x), memory=memory)
    for name in replay.ranks:
        replay.evaluate({name: 1})
    outputs = [output for output, _ in replay._outputs.values()]
    held = sum(leaf.nbytes for output in outputs for leaf in output.leaves)
    assert 0 < held <= memory


def test_a_layer_that_is_not_used_changes_nothing() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 6), "unused": nn.Linear(6, 6)})
    x = torch.randn(4, 6)
    replay = Replay(lod.decompose(model), lambda m: m["used"](x).sum(), memory=2**30)
    assert replay.evaluate({"unused": 1}) == replay.loss
    assert replay.evaluate({"used": 1}) != replay.loss


class KeepsAside(nn.Module):
    """Hands a value on past its output: what is not run again leaves the last one there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), Inner(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.first(x))
        return self.last(y) + self.inner.aside


class Inner(nn.Module):
    aside: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.aside = x.square()
        return torch.tanh(x)


def test_a_model_that_cannot_be_replayed_is_run_in_full(caplog: pytest.LogCaptureFixture) -> None:
    model, x = lod.decompose(KeepsAside()), torch.randn(5, 6)
    replay = Replay(model, loss_of(x), memory=2**30)
    with caplog.at_level(logging.WARNING):
        for name in ("first", "last", "first", "last"):
            loss = replay.evaluate({name: 2})
            assert loss == plainly(model, loss_of(x), {name: 2})
    assert len(caplog.records) == 1
    assert "runs the whole model" in caplog.text


def test_another_order_of_calls_is_run_in_full() -> None:
    model, x = lod.decompose(Twice()), torch.randn(5, 8)
    order = ["first", "shared", "last"]

    def loss(m: nn.Module) -> Tensor:
        y = x
        for name in order:
            y = torch.tanh(m.get_submodule(name)(y))
        return y.square().sum()

    replay = Replay(model, loss, memory=2**30)
    replay.evaluate({"last": 3})
    order[:] = ["shared", "first", "last"]
    assert replay.evaluate({"last": 3}) == plainly(model, loss, {"last": 3})


def test_inference_mode_inside_the_loss() -> None:
    dense, x = residual()
    model = lod.decompose(dense)

    def loss(m: nn.Module) -> Tensor:
        with torch.inference_mode():
            return loss_of(x)(m)

    replay = Replay(model, loss, memory=2**30)
    walk = Walk(replay, seed=3)
    for _ in range(12):
        ranks, value = walk.step()
        assert value == plainly(model, loss_of(x), ranks)


# -- the mode, and what is restored ------------------------------------------------------------


def test_norms_use_the_batch_and_dropout_is_off(snapshot: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.9)).train()
    model[0].eval()
    x = torch.randn(4, 2, 3, 3) + 5
    before, modes = snapshot(model), [m.training for m in model.modules()]
    with batch_statistics(model):
        y = model(x)
        assert not torch.is_grad_enabled()
        model[1].reset_running_stats()
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    before.assert_unchanged(model)
    assert [m.training for m in model.modules()] == modes
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("failing", [1, 3, 7, 12])
def test_everything_is_restored_when_the_loss_raises(
    failing: int, snapshot: Callable[[nn.Module], Any]
) -> None:
    dense, x = residual()
    model = lod.decompose(dense).train()
    model[3].bn1.eval()
    model[0].activate(2)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    seen = {n: set(vars(m)) for n, m in model.named_modules()}
    calls = 0

    def loss(m: nn.Module) -> Tensor:
        nonlocal calls
        calls += 1
        value = loss_of(x)(m)
        m.train()
        if calls == failing:
            raise ZeroDivisionError
        return value

    with pytest.raises(ZeroDivisionError):
        replay = Replay(model, loss, memory=2**30)
        for name in lod.ranks(model):
            replay.evaluate({name: 1})
    before.assert_unchanged(model)
    assert [m.training for m in model.modules()] == modes
    assert {n: set(vars(m)) for n, m in model.named_modules()} == seen
    assert model[0].active_rank == 2
    assert model[1].conv1.active_rank == model[1].conv1.rank


# -- losses that cannot be searched with -------------------------------------------------------


def test_a_loss_that_is_no_number_is_refused() -> None:
    model, x = lod.decompose(Twice()), torch.randn(5, 8)
    with pytest.raises(OptionError, match=r"shape \(5, 8\)"):
        Replay(model, lambda m: m(x), memory=0)
    with pytest.raises(OptionError, match="a NoneType"):
        Replay(model, lambda m: None, memory=0)  # type: ignore[arg-type,return-value]
    with pytest.raises(OptionError, match="batch is not empty"):
        Replay(model, lambda m: m(x[:0]).mean(), memory=0)


def test_a_random_loss_is_refused() -> None:
    model, x = lod.decompose(Twice()), torch.randn(5, 8)
    with pytest.raises(OptionError, match="differs between two evaluations"):
        Replay(model, lambda m: F.dropout(m(x)).sum(), memory=2**30)


def test_a_loss_that_overflows_is_infinite() -> None:
    model, x = lod.decompose(Twice()), torch.randn(5, 8)
    replay = Replay(
        model, lambda m: m(x).sum() * (1.0 if m.first.active_rank > 2 else math.nan), memory=2**30
    )
    assert replay.evaluate({"first": 2}) == math.inf
    assert math.isfinite(replay.evaluate({"first": 3}))


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(LayerError, match="no low-rank layer"):
        Replay(Twice(), lambda m: 0.0, memory=0)
