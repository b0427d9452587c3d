"""A budget: the model lands within it and close to it, stays there, and is trained there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maestro_lod as lod
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import count_params
from maestro_lod.train.budget import Budget
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.progress import Progress


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 6)
    )


def data() -> DataLoader[Any]:
    """Samples whose class depends on three directions alone."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(256, 20, generator=draw)
    y = (x[:, :3] @ torch.randn(3, 6, generator=draw)).argmax(1)
    return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)


def trained(
    budget: dict[str, float], *, adam: bool = False, epochs: int = 12, **options: Any
) -> tuple[nn.Module, lod.BudgetTraining, Progress]:
    torch.manual_seed(0)
    model = lod.decompose(net())
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.003 if adam else 0.05, **options)
    train = lod.BudgetTraining(model, optimizer, **budget, example=torch.empty(1, 20))
    return model, train, lod.fit(model, data(), optimizer=optimizer, method=train, epochs=epochs)


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        ({"params": 0.2}, 0.2),
        ({"params": 0.5}, 0.5),
        ({"macs": 0.3}, 0.3),
        ({"params": 1000}, None),
    ],
)
def test_a_run_ends_within_its_budget_and_close_to_it(
    budget: dict[str, float], limit: float | None, adam: bool
) -> None:
    options: dict[str, Any] = {"weight_decay": 1e-3} if adam else {"momentum": 0.9}
    model, train, progress = trained(budget, adam=adam, **options)
    summary = lod.summary(model, torch.empty(1, 20))
    kind = next(iter(budget))
    cost, dense = getattr(summary, f"fused_{kind}"), getattr(summary, f"dense_{kind}")
    allowed = 1000 if limit is None else round(limit * dense)
    assert 0.95 * allowed <= cost <= allowed
    assert train.schedule.phase == "landed"
    phases = [record.phase for record in progress.history]
    assert phases.index("landed") == 3  # three tenths of the run, and the rest of that epoch
    ranks = [record.ranks for record in progress.history[phases.index("landed") :]]
    assert all(rank == ranks[0] for rank in ranks)
    assert progress.history[-1].train["accuracy"] > 0.4
    assert all(record.penalty is None for record in progress.history)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_a_model_in_half_precision_lands_and_goes_on_learning(
    adam: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = lod.decompose(net().to(dtype))
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    more = {"lr": 0.003, "eps": 1e-4} if adam else {"lr": 0.05, "momentum": 0.9}
    optimizer = kind(model.parameters(), **more)
    train = lod.BudgetTraining(model, optimizer, params=0.5)
    batches = [(x.to(dtype), y) for x, y in data()]
    done = lod.fit(model, batches, optimizer=optimizer, method=train, epochs=12)
    assert count_params(lod.extract(model)) <= 0.5 * count_params(net())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    landed = next(record for record in done.history if record.phase == "landed")
    assert done.history[-1].train["loss"] < 0.8 * landed.train["loss"]


def test_the_last_epoch_lands_whatever_was_planned() -> None:
    model, train, _ = trained({"params": 0.2, "steps": 10**6}, epochs=2, momentum=0.9)
    summary = lod.summary(model, torch.empty(1, 20))
    assert summary.fused_params <= round(0.2 * summary.dense_params)
    assert train.schedule.phase == "landed"


@pytest.mark.parametrize("planned", [None, 20])
def test_a_loop_of_ones_own_lands_after_its_first_epoch_or_as_planned(planned: int | None) -> None:
    torch.manual_seed(0)
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = lod.BudgetTraining(model, optimizer, params=0.3, steps=planned)
    phases = []
    for _ in range(3):
        for x, y in data():
            with train.step():
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        train.end_epoch()
        phases.append(train.record().phase)
    assert phases == (["landed"] * 3 if planned is None else ["whole", "landed", "landed"])
    assert lod.summary(model, torch.empty(1, 20)).fused_params <= train.schedule.limit


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({}, "needs either"),
        ({"params": 0.2, "macs": 0.2}, "needs either"),
        ({"params": 1.0}, "not below the dense"),
        ({"params": 10**9}, "not below the dense"),
        ({"params": 0.001}, "too small: rank 1"),
        ({"params": 1.5}, "1.5"),
        ({"params": -0.1}, "-0.1"),
        ({"params": float("nan")}, "nan"),
        ({"params": True}, "True"),
        ({"params": 25.0}, r"percentage or a count: write '25%' or 25\.$"),
        ({"params": 25}, r"too small: .*Did you mean params='25%'\?$"),
        ({"params": "many"}, "the budget's params 'many' is not a size"),
        ({"params": "1"}, "Write 100% or 1x"),
        ({"params": 0.2, "steps": 0}, "at least 1"),
        ({"params": 0.2, "steps": -1}, "-1"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused(budget: dict[str, Any], words: str) -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=words):
        lod.BudgetTraining(model, optimizer, **budget, example=torch.empty(1, 20))


@pytest.mark.parametrize(
    ("text", "value"), [("25%", 0.25), ("0.25x", 0.25), ("300k", 300_000), ("1.2M", 1_200_000)]
)
def test_a_budget_may_be_written_as_text(text: str, value: float) -> None:
    assert Budget(params=text) == Budget(params=value)
    assert str(Budget(macs=text)) == str(Budget(macs=value))


def test_frozen_layers_are_named_where_they_keep_a_budget_from_being_met() -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name, layer = next(iter(low_rank_layers(model).items()))
    layer.requires_grad_(False)
    with pytest.raises(OptionError, match=rf"frozen layers keep all their ranks \({name}\)"):
        lod.BudgetTraining(model, optimizer, params=0.1)
    model.requires_grad_(False)
    with pytest.raises(OptionError, match=r"nothing for BudgetTraining to train.*frozen"):
        lod.BudgetTraining(model, optimizer, params=0.1)


def test_a_budget_of_macs_needs_an_example() -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="needs an example"):
        lod.BudgetTraining(model, optimizer, macs=0.2)


def test_a_state_of_a_budget_that_pressed_ranks_goes_on_and_lands() -> None:
    torch.manual_seed(0)
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = lod.BudgetTraining(model, optimizer, params=0.4, example=torch.empty(1, 20))
    state = train.state_dict()
    state["budget"] |= {"phase": "pressing", "steps": 8, "step": 20, "pace": 0.1, "spared": ["0"]}
    train.load_state_dict(state)
    assert train.schedule.phase == "whole"
    lod.fit(model, data(), optimizer=optimizer, method=train, epochs=2)
    assert train.schedule.phase == "landed"
    assert count_params(lod.extract(model)) <= 0.4 * count_params(net())


def test_a_state_of_another_method_is_refused_and_named() -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    methods = [
        lod.LoD(model, optimizer),
        lod.BudgetTraining(model, optimizer, params=0.2),
        lod.ElasticTraining(model, optimizer, smallest=0.2),
    ]
    for method in methods:
        before = method.state_dict()
        for other in methods:
            if other is not method:
                saved_by, kind = type(other).__name__, type(method).__name__
                words = f"saved by {saved_by}, but this is a {kind}. Create a {saved_by}"
                with pytest.raises(TrainingError, match=words):
                    method.load_state_dict(other.state_dict())
        assert repr(method.state_dict()) == repr(before)
        method.load_state_dict(before)


def test_a_subclass_goes_on_from_a_state_of_its_method() -> None:
    class Mine(lod.BudgetTraining):
        pass

    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = lod.BudgetTraining(model, optimizer, params=0.2).state_dict()
    mine = Mine(model, optimizer, params=0.4)
    mine.load_state_dict(state)
    assert repr(mine.state_dict()) == repr(state)


@pytest.mark.parametrize("name", ["Budget", "Pressure"])
def test_names_that_are_gone_say_what_to_use_instead(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'. Use .*Training|'Pressure'. Use LoD"):
        getattr(lod, name)


def test_costs_are_those_of_the_deployed_model() -> None:
    model = lod.decompose(net(), ranks={"0": 3, "2": 30, "4": 2})
    example = torch.empty(1, 20)
    ledger, summary = Ledger.open_for(model, example), lod.summary(model, example)
    ranks = lod.ranks(copy.deepcopy(model))
    deployed = ledger.costs(model).at(ranks)
    assert deployed.params == summary.fused_params
    assert deployed.macs == summary.fused_macs


def test_macs_that_no_rank_can_save_are_not_counted_as_saved() -> None:
    """Torch's recurrent kernels multiply factors out: a budget of MACs has to come from others."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 16), nn.Linear(16, 30)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0])
            return out

    model = lod.decompose(Tagger())
    example = torch.empty(3, 1, 8)
    ledger = Ledger.open_for(model, example)
    ranks = dict.fromkeys(lod.ranks(model), 1)
    assert ledger.costs(model).at(ranks).macs == 3 * (4 * 16 * (8 + 16) + 16 + 30)
    with pytest.raises(lod.MaestroError, match="too small"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        lod.BudgetTraining(model, optimizer, macs=0.5, example=example)


def test_every_step_trains_the_whole_model_and_costs_what_it_does() -> None:
    model, train, _ = trained({"params": 0.3}, epochs=6, momentum=0.9)
    x, _ = next(iter(data()))
    with train.step() as drawn:
        model(x).sum().backward()
    assert drawn == lod.ranks(model)
    train.optimizer.zero_grad()
    train.optimizer.step()
    train.end_epoch()
    whole = train.ledger.epoch_cost(model, {}).macs
    assert [cost.macs for cost in train.ledger.epochs[-2:]] == [whole, whole]
    first = train.ledger.epochs[0].macs
    assert first is not None and whole is not None and first > whole


def test_no_layer_is_left_with_fewer_ranks_than_the_task_needs() -> None:
    """Classes are three directions of the input: no layer may be cut below three."""
    model, _, _ = trained({"params": 0.25}, epochs=6, momentum=0.9)
    assert min(lod.ranks(model).values()) >= 3


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_the_optimizer_goes_on_with_its_moments(adam: bool) -> None:
    torch.manual_seed(0)
    model = lod.decompose(net())
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    options = {} if adam else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=0.003 if adam else 0.05, **options)
    train = lod.BudgetTraining(model, optimizer, params=0.3, steps=16)
    lod.fit(model, data(), optimizer=optimizer, method=train, epochs=1)
    for layer in low_rank_layers(model).values():
        for factor in (layer.u, layer.v):
            for moment in optimizer.state[factor].values():
                if moment.ndim:
                    assert moment.shape == factor.shape and bool((moment != 0).any())


class Upsampling(nn.Module):
    """A layer whose output size only the dense form can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.ConvTranspose2d(16, 16, 3, stride=2), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(x, output_size=[8, 8]).flatten(1)[:, :64])


def test_layers_that_are_deployed_dense_count_as_dense() -> None:
    torch.manual_seed(0)
    model = lod.decompose(Upsampling())
    x = torch.randn(2, 16, 3, 3)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = lod.BudgetTraining(model, optimizer, params=0.7, steps=3)
    for _ in range(4):
        with train.step():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    train.end_epoch()
    assert count_params(lod.extract(model)) <= train.schedule.limit
