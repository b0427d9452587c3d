"""A budget: the setting of a recipe, and a model that is trained for one size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, OptionError, TrainingError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import count_params
from maestro_lod.train.budget import Budget
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.progress import Progress

SHOWN = torch.empty(1, 20)


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


def elastic(size: float, **options: Any) -> tuple[nn.Module, Any, lod.Elastic]:
    torch.manual_seed(0)
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, lod.Elastic(model, optimizer, sizes=[size], **options)


def trained(size: float, epochs: int = 6, **options: Any) -> tuple[nn.Module, Any, Progress]:
    model, optimizer, train = elastic(size, **options)
    return model, train, lod.fit(model, data(), optimizer=optimizer, method=train, epochs=epochs)


# -- the setting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs either"),
        ({"params": 0.2, "macs": 0.2}, "needs either"),
        ({"params": 1.5}, "1.5"),
        ({"params": -0.1}, "-0.1"),
        ({"params": float("nan")}, "nan"),
        ({"params": True}, "True"),
        ({"params": 25.0}, r"percentage or a count: write '25%' or 25\.$"),
        ({"params": "many"}, "the budget's params 'many' is not a size"),
        ({"params": "1"}, "Write 100% or 1x"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Budget(**given)


@pytest.mark.parametrize("given", [1.0, 1000])
def test_a_budget_is_below_the_dense_model(given: float) -> None:
    with pytest.raises(OptionError, match="not below the dense model's 1,000"):
        Budget(params=given).limit(1000)


@pytest.mark.parametrize(
    ("text", "value"), [("25%", 0.25), ("0.25x", 0.25), ("300k", 300_000), ("1.2M", 1_200_000)]
)
def test_a_budget_may_be_written_as_text(text: str, value: float) -> None:
    assert Budget(params=text) == Budget(params=value)
    assert str(Budget(macs=text)) == str(Budget(macs=value))


# -- a model of one size ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "cost", "limit"),
    [(0.2, "params", 0.2), (0.5, "params", 0.5), (0.3, "macs", 0.3), (1000, "params", None)],
)
def test_a_run_ends_within_its_size_and_close_to_it(
    size: float, cost: Any, limit: float | None
) -> None:
    model, train, progress = trained(size, cost=cost)
    summary = lod.summary(model, SHOWN)
    reached, dense = getattr(summary, f"fused_{cost}"), getattr(summary, f"dense_{cost}")
    allowed = 1000 if limit is None else round(limit * dense)
    assert 0.95 * allowed <= reached <= allowed
    phases = [record.phase for record in progress.history]
    assert phases == ["whole"] * 6 + ["consolidation"] * 2
    assert progress.history[-1].params == summary.fused_params
    assert progress.history[-1].train["accuracy"] > 0.7
    assert all(record.penalty is None for record in progress.history)
    assert lod.ranks(train.teacher) == {}


def test_a_size_costs_what_its_steps_do() -> None:
    """The whole phase costs dense steps, consolidation those of the size and of the teacher."""
    model, train, _ = trained(0.25)
    dense = train.ledger.dense_macs
    own = train.ledger.epoch_cost(model, {}).macs
    assert [epoch.macs for epoch in train.ledger.epochs[:6]] == [dense] * 6
    assert train.ledger.epochs[-1].macs == pytest.approx(own + dense / 3)
    assert own < 0.5 * dense
    assert train.ledger.epochs[-1].params == count_params(model) + count_params(train.teacher)


def test_no_layer_is_left_with_fewer_ranks_than_the_task_needs() -> None:
    """Classes are three directions of the input: no layer may be cut below three."""
    model, _, _ = trained(0.25)
    assert min(lod.ranks(model).values()) >= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_in_half_precision_is_cut_and_trained_on(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = lod.decompose(net().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = lod.Elastic(model, optimizer, sizes=[0.5])
    batches = [(x.to(dtype), y) for x, y in data()]
    done = lod.fit(model, batches, optimizer=optimizer, method=train, epochs=10)
    assert count_params(lod.extract(model)) <= 0.5 * count_params(net())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert done.history[-1].train["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (10**9, r"is not below the dense model's"),
        (0.001, "cannot be reached: with rank 1 in every layer"),
        (25, "cannot be reached: with rank 1 in every layer"),
    ],
)
def test_a_size_that_cannot_be_reached_is_refused_at_once(size: float, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        elastic(size)
    with pytest.raises(OptionError, match=words):
        elastic(size, cost="macs", example=SHOWN)


def test_frozen_layers_are_named_where_they_keep_a_budget_from_being_met() -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name, layer = next(iter(low_rank_layers(model).items()))
    layer.requires_grad_(False)
    with pytest.raises(OptionError, match=rf"frozen layers keep all their ranks \({name}\)"):
        lod.Elastic(model, optimizer, sizes=[0.1])
    model.requires_grad_(False)
    with pytest.raises(lod.MaestroError, match=r"requires_grad_\(True\)"):
        lod.Elastic(model, optimizer, sizes=[0.1])


def test_costs_are_those_of_the_deployed_model() -> None:
    model = lod.decompose(net(), ranks={"0": 3, "2": 30, "4": 2})
    ledger, summary = Ledger.open_for(model, SHOWN), lod.summary(model, SHOWN)
    deployed = ledger.costs(model).at(lod.ranks(model))
    assert deployed.params == summary.fused_params
    assert deployed.macs == summary.fused_macs


def test_macs_that_no_rank_can_save_are_not_counted_as_saved() -> None:
    """Torch's recurrent kernels multiply factors out: a size in MACs has to come from others."""

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
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(lod.MaestroError, match="cannot be reached"):
        lod.Elastic(model, optimizer, sizes=[0.5], cost="macs", example=example)


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
    dense = count_params(Upsampling())
    batches = [(torch.randn(4, 16, 3, 3), torch.randn(4, 64)) for _ in range(4)]
    model(batches[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = lod.Elastic(model, optimizer, sizes=[0.7])
    lod.fit(model, batches, optimizer=optimizer, method=train, epochs=2, loss=nn.MSELoss())
    assert count_params(lod.extract(model)) <= 0.7 * dense


# -- states of other methods -----------------------------------------------------------------------


def test_a_state_of_another_method_is_refused_and_named() -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampled, sized = lod.LoD(model, optimizer), lod.Elastic(model, optimizer, sizes=[0.2])
    for method, other in ((sampled, sized), (sized, sampled)):
        before = method.state_dict()
        kind, saved_by = type(method).__name__, type(other).__name__
        words = f"saved by {saved_by}, but this is {kind}. Create {saved_by}"
        with pytest.raises(TrainingError, match=words):
            method.load_state_dict(other.state_dict())
        assert repr(method.state_dict()) == repr(before)
        method.load_state_dict(before)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"epoch": 1, "budget": {"kind": "params"}}, "BudgetTraining"),
        ({"epoch": 1, "sampler": {"strategy": "elastic"}}, "ElasticTraining"),
    ],
)
def test_a_state_of_a_method_that_is_gone_says_so(state: dict[str, Any], name: str) -> None:
    _, optimizer, train = elastic(0.3)
    for method in (train, lod.LoD(train.model, optimizer)):
        with pytest.raises(CheckpointError, match=f"saved by {name}, which Elastic has replaced"):
            method.load_state_dict(state)


def test_a_subclass_goes_on_from_a_state_of_its_method() -> None:
    class Mine(lod.Elastic):
        pass

    model, optimizer, train = elastic(0.3)
    Mine(model, optimizer, sizes=[0.4]).load_state_dict(train.state_dict())


# -- what is gone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Budget", "BudgetTraining", "ElasticTraining", "Pressure"])
def test_names_that_are_gone_say_what_to_use_instead(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}'\. Use .*lod\.Elastic\(model, optimizer"):
        getattr(lod, name)
