"""Elastic training: sizes drawn by cost, along the weights' own order, and taught by the whole."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import cost_of
from maestro_lod.train.elastic import SizeSampler
from maestro_lod.train.ledger import Ledger


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm, self.head = nn.LSTM(6, 12), nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.rnn(x.transpose(0, 1))[0][-1]))
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)),
        (6,),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
        ),
        (2, 6, 6),
    ),
    "lstm": (Tagger, (5, 6)),
    "transformer": (Attending, (5, 8)),
}


def batches(shape: tuple[int, ...], count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, 16, *shape, generator=draw)
    y = x.flatten(2)[..., :4].argmax(-1)
    return [*zip(x, y, strict=True)]


def made(
    kind: str, *, adam: bool = False, least: float = 0.2, warmup: int | None = None, seed: int = 0
) -> tuple[nn.Module, Any, lod.ElasticTraining]:
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model = lod.decompose(make())
    parameters = model.parameters()
    optimizer: Any = (
        torch.optim.AdamW(parameters, lr=0.01)
        if adam
        else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    )
    train = lod.ElasticTraining(
        model, optimizer, smallest=least, warmup_epochs=warmup, example=torch.empty(1, *shape),
        seed=seed,
    )  # fmt: skip
    return model, optimizer, train


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_trains_and_its_submodels_with_it(kind: str, adam: bool) -> None:
    model, optimizer, train = made(kind, adam=adam)
    data = batches(MODELS[kind][1])
    progress = lod.fit(model, data, optimizer=optimizer, method=train, epochs=10)
    assert progress.history[-1].train["loss"] < 0.9 * progress.history[0].train["loss"]
    assert train.sampler.chances().keys() == lod.ranks(model).keys()
    submodel = train.sampler.sample()
    assert any(rank < lod.ranks(model)[name] for name, rank in submodel.items())


@given(least=st.floats(0.15, 0.6), seed=st.integers(0, 50))
def test_sizes_are_spread_evenly_over_the_logarithm_of_the_cost(least: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = lod.decompose(nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 50)))
    costs = Ledger.open_for(model).costs(model)  # no MACs: one ladder
    sampler = SizeSampler(model, least, seed=seed)
    sampler.build(costs)
    (ladder,) = sampler._ladders
    shares = [
        costs.at(dict(zip(sampler._names, rung, strict=True))).params / costs.dense.params
        for rung in ladder
    ]
    assert shares[-1] <= least * 1.001 and shares[-1] > 0.85 * least
    assert all(b <= a for a, b in pairwise(shares))
    middle = shares[len(shares) // 2 - 1]
    assert middle == pytest.approx(least**0.5, rel=0.1)


def test_draws_are_as_likely_as_the_ledger_takes_them_to_be() -> None:
    model, _, train = made("mlp", warmup=0)
    with pytest.raises(OptionError, match="two passes"), train.step():
        pass
    x, y = batches((6,))[0]
    train.backward(lambda: model(x), lambda out: F.cross_entropy(out, y))
    draws = 4000
    seen = Counter(pair for _ in range(draws) for pair in train.sampler.sample().items())
    for name, chances in train.sampler.chances().items():
        assert sum(chances) == pytest.approx(1)
        for rank, chance in enumerate(chances, 1):
            assert seen[name, rank] / draws == pytest.approx(chance, abs=0.03)


def test_the_ledger_counts_both_passes() -> None:
    model, optimizer, train = made("cnn")
    lod.fit(model, batches((2, 6, 6)), optimizer=optimizer, method=train, epochs=5)
    whole = train.ledger.epoch_cost(model, {}).macs
    drawn = train.ledger.epoch_cost(model, train.sampler.chances()).macs
    assert whole is not None and drawn is not None and drawn < 0.9 * whole
    macs = [epoch.macs for epoch in train.ledger.epochs]
    assert macs[:2] == [whole] * 2  # three tenths of the run
    assert all(cost is not None and whole < cost < 1.9 * whole for cost in macs[2:])


def test_it_costs_at_most_six_tenths_more_than_training_by_pairs() -> None:
    model, example = lod.decompose(LeNet()), torch.empty(1, 1, 28, 28)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = lod.LoD(model, optimizer, example=example)
    by_pairs = pairs.ledger.epoch_cost(model, pairs.sampler.chances()).macs
    sampler = SizeSampler(model, 0.1)
    sampler.build(pairs.ledger.costs(model))
    whole = pairs.ledger.epoch_cost(model, {}).macs
    both = pairs.ledger.epoch_cost(model, sampler.chances(), full_pass=1.0).macs
    assert by_pairs is not None and whole is not None and both is not None
    assert 0.3 * whole + 0.7 * both <= 1.6 * by_pairs


def test_a_kind_of_cost_that_no_rank_saves_is_not_drawn_by() -> None:
    """Torch's recurrent kernels multiply factors out: sizes differ in params alone."""
    model, optimizer, train = made("lstm", warmup=0)
    lod.fit(model, batches((5, 6), 1), optimizer=optimizer, method=train, epochs=1)
    assert len(train.state_dict()["sampler"]["ladders"]) == 1


def test_ranks_are_in_order_once_sizes_are_trained() -> None:
    model, optimizer, train = made("mlp", warmup=2)
    data = batches((6,))
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=2)
    for layer in low_rank_layers(model).values():
        gram = (layer.v @ layer.v.T).detach()
        assert float((gram - gram.diag().diag()).abs().max()) < 1e-4


def test_a_run_that_goes_on_for_longer_does_not_begin_alone_again() -> None:
    data = batches((6,))
    model, optimizer, train = made("mlp")
    first = lod.fit(model, data, optimizer=optimizer, method=train, epochs=4)  # one of them alone
    state, weights = train.state_dict(), model.state_dict()
    model, optimizer, train = made("mlp")
    model.load_state_dict(weights)
    train.load_state_dict(state)
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=40, progress=first)
    alone, with_sizes = state["ledger"]["epochs"][0], train.ledger.epochs[4]
    assert with_sizes.executed_macs > 1.1 * alone["executed_macs"]  # a second pass in every step


def test_draws_depend_on_the_seed_and_the_weights_alone() -> None:
    """What processes with other data draw is the same, and is compared."""
    samplers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed * 100)
        _, _, train = made("mlp", warmup=0, seed=seed)
        train.sampler.build(train.ledger.costs(train.model))
        torch.rand(seed)
        samplers.append(train.sampler)
    one, same, other = samplers
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert [one.sample() for _ in range(9)] == [same.sample() for _ in range(9)]


def test_the_whole_model_teaches_where_outputs_can_be_compared() -> None:
    model, _, train = made("mlp", warmup=0)
    x, y = batches((6,))[0]
    asked = []

    def soft(output: Tensor, teacher: Tensor) -> Tensor:
        asked.append(teacher.requires_grad)
        return F.mse_loss(output, teacher)

    train.backward(lambda: model(x), lambda out: F.cross_entropy(out, y), soft_loss=soft)
    assert asked == [False]
    targets = []

    def regression(output: Tensor) -> Tensor:
        targets.append(output)
        return output.square().mean()

    train.backward(lambda: model(x)[:, 0], regression)  # no classes: both learn from the target
    assert len(targets) == 2


def test_a_compiled_model_trains_as_the_model_does() -> None:
    data = batches((6,))
    models = []
    for compiled in (False, True):
        model, optimizer, train = made("mlp")
        run = torch.compile(model, backend="eager") if compiled else model
        lod.fit(run, data, optimizer=optimizer, method=train, epochs=6)
        models.append(model)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_ranks_that_save_nothing_leave_the_whole_model_to_train() -> None:
    torch.manual_seed(0)
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    train = lod.ElasticTraining(model, optimizer, smallest=0.1, warmup_epochs=0)
    x = torch.randn(8, 8)
    train.backward(lambda: model(x), lambda out: out.square().mean())
    assert train.sampler.sample() == {"1": 2}


@pytest.mark.parametrize("least", [0.0, 1.0, -0.1, float("nan"), 2])
def test_a_share_that_is_none_is_refused(least: float) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="elastic"):
        lod.ElasticTraining(model, optimizer, smallest=least)
    with pytest.raises(OptionError, match="warmup_epochs"):
        lod.ElasticTraining(model, optimizer, warmup_epochs=-1)


def test_a_recipe_chooses_it_in_place_of_its_penalty() -> None:
    settings: Any = load_recipe("lenet-mnist", ["elastic=0.1"]).settings
    assert (settings.elastic, settings.penalty) == (0.1, 0.0)
    model = settings.prepare(LeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = torch.empty(1, 1, 28, 28)
    dense = cost_of(LeNet(), example)
    train = settings.make(model, optimizer, example=example, seed=0, dense=dense)
    assert isinstance(train, lod.ElasticTraining) and train.sampler.smallest == 0.1
    with pytest.raises(OptionError, match="elastic=2"):
        load_recipe("lenet-mnist", ["elastic=2"])
    with pytest.raises(OptionError, match="cannot be combined"):
        load_recipe("lenet-mnist", ["elastic=0.1", "penalty=0.1"])
