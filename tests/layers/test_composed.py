"""Products that are kept for several passes: the same gradients, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from maestro_lod import LoD, at_ranks, decompose
from maestro_lod.errors import TrainingError
from maestro_lod.layers import LowRank, composed_once


class Network(nn.Module):
    """One of each kind that multiplies factors out, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.grouped = nn.Conv2d(6, 4, 3, groups=2)
        self.up = nn.ConvTranspose2d(4, 3, 2, 2)
        self.recurrent = nn.GRU(24, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(torch.tanh(self.grouped(torch.tanh(self.first(x))))))
        return self.head(self.recurrent(y.flatten(2).mT.reshape(len(x), -1, 24))[0][:, -1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return decompose(Network().double())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(5, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (5,), generator=generator),
        )
        for _ in range(3)
    ]


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


class CountProducts:
    """Counts how often a layer multiplies its factors out."""

    def __init__(self, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(layer, LowRank)
        self.count, compose = 0, layer._compose

        def counted(u: Tensor, v: Tensor) -> Tensor:
            self.count += 1
            return compose(u, v)

        monkeypatch.setattr(layer, "_compose", counted)


@pytest.mark.parametrize("fewer", [{}, {"first": 2, "recurrent.*": 3}])
def test_gradients_are_those_of_passes_one_by_one(fewer):
    model, data = network(), batches()

    def passes() -> None:
        for i, (x, y) in enumerate(data):
            with at_ranks(model, fewer if i == 1 else {}):
                loss_of(model, x, y).backward()

    passes()
    expected = gradients(model)
    with composed_once(model, len(data)):
        passes()
        assert model.get_submodule("first").v.grad is None or fewer  # they come at the end
    found = gradients(model)
    assert len(found) == len(expected) == len(list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_products_are_made_once_and_not_kept(monkeypatch):
    model, data = network(), batches()
    counter = CountProducts(model.get_submodule("first"), monkeypatch)
    with composed_once(model, len(data)):
        for x, y in data:
            loss_of(model, x, y).backward()
    assert counter.count == 1
    loss_of(model, *data[0])
    assert counter.count == 2


def test_gradients_that_are_there_already_stay():
    model, (x, y) = network(), batches()[0]
    loss_of(model, x, y).backward()
    once = gradients(model)
    loss_of(model, x, y).backward()
    with composed_once(model, 1):
        loss_of(model, x, y).backward()
    torch.testing.assert_close(gradients(model), [2 * g for g in once])


def test_a_block_in_a_block_leaves_the_gradients_to_the_outer_one():
    model, (x, y) = network(), batches()[0]
    loss_of(model, x, y).backward()
    expected = gradients(model)
    with composed_once(model, 2):
        with composed_once(model, 1):
            loss_of(model, x, y).backward()
        assert model.get_submodule("first").u.grad is None
    torch.testing.assert_close(gradients(model), expected)


def test_frozen_factors_get_no_gradient():
    model, (x, y) = network(), batches()[0]
    first = model.get_submodule("first")
    first.u.requires_grad_(False)
    model.get_submodule("up").requires_grad_(False)
    loss_of(model, x, y).backward()
    expected = gradients(model)
    with composed_once(model, 1):
        loss_of(model, x, y).backward()
    assert first.u.grad is None
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_again_on_the_same_products(reentrant):
    model, (x, y) = network(), batches()[0]
    x.requires_grad_()
    loss_of(model, x, y).backward()
    expected = gradients(model)
    with composed_once(model, 1):
        output = checkpoint(model, x, use_reentrant=reentrant)
        F.cross_entropy(output, y).backward()
    torch.testing.assert_close(gradients(model), expected)


def test_hooks_on_factors_see_every_pass():
    model, data, seen = network(), batches(), []
    model.get_submodule("first").u.register_hook(seen.append)
    with composed_once(model, len(data)):
        for x, y in data:
            loss_of(model, x, y).backward()
    assert len(seen) == len(data)


def test_autocast_compiled_code_and_transforms_do_as_always(monkeypatch):
    model, (x, y) = network().float(), batches()[0]
    x = x.float()
    counter = CountProducts(model.get_submodule("first"), monkeypatch)
    state = {name: p.detach() for name, p in model.named_parameters()}

    def functional(parameters: dict[str, Tensor]) -> Tensor:
        return loss_of(lambda x: torch.func.functional_call(model, parameters, x), x, y)

    with composed_once(model, 4):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(x)
            torch.func.grad(functional)(state)
            with torch.no_grad():
                model(x)
    assert counter.count == 6


def test_weights_that_change_between_passes_are_refused():
    model, (x, y) = network(), batches()[0]
    with pytest.raises(TrainingError, match="after the block"), composed_once(model, 2):
        loss_of(model, x, y).backward()
        with torch.no_grad():
            model.get_submodule("first").u.mul_(2.0)
        model(x)
    model(x)  # nothing of the block is left


def test_an_optimizer_that_steps_last_in_the_block_is_refused():
    model, (x, y) = network(), batches()[0]
    optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    loss_of(model, x, y).backward()  # for a gradient to step by
    with pytest.raises(TrainingError, match="after the block"), composed_once(model, 1):
        loss_of(model, x, y).backward()
        optimizer.step()


def test_a_gradient_that_is_to_be_differentiated_again_is_refused():
    model, (x, y) = network(), batches()[0]
    with (
        pytest.warns(UserWarning, match="create_graph"),
        pytest.raises(TrainingError, match="create_graph"),
        composed_once(model, 1),
    ):
        loss_of(model, x, y).backward(create_graph=True)


def test_what_fails_in_the_block_leaves_no_gradients_behind():
    model, (x, y) = network(), batches()[0]
    with pytest.raises(KeyError), composed_once(model, 1):
        loss_of(model, x, y).backward()
        raise KeyError
    assert model.get_submodule("first").u.grad is None
    loss_of(model, x, y).backward()
    assert model.get_submodule("first").u.grad is not None


def test_a_full_pass_and_a_sampled_one_share_the_products(monkeypatch):
    model, (x, y) = network(), batches()[0]
    train = LoD(model, optim.SGD(model.parameters(), lr=0.1), full_pass=True)
    monkeypatch.setattr(train.sampler, "sample", lambda: {"up": 1})
    loss_of(model, x, y).backward()
    with at_ranks(model, {"up": 1}):
        loss_of(model, x, y).backward()
    expected = gradients(model)
    counter = CountProducts(model.get_submodule("first"), monkeypatch)
    train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))
    assert counter.count == 1
    torch.testing.assert_close(gradients(model), expected)
