"""A budget: λ is steered, the model lands within it and close to it, and stays there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maestro_lod as lod
from maestro_lod.cost import count_params
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.state import load_state, save_state
from maestro_lod.train.budget import fitting_ranks
from maestro_lod.train.fit import Watch
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
) -> tuple[nn.Module, lod.LoD, Progress]:
    torch.manual_seed(0)
    model = lod.decompose(net())
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.003 if adam else 0.05, **options)
    train = lod.LoD(model, optimizer, penalty=lod.Budget(**budget), example=torch.empty(1, 20))
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
    assert train.landing is not None and train.landing.phase == "landed" and train.penalty == 0.0
    phases = [record.phase for record in progress.history]
    assert phases.index("landed") < len(phases) - 3  # there is time to heal
    ranks = [record.ranks for record in progress.history[phases.index("landed") :]]
    assert all(rank == ranks[0] for rank in ranks)
    assert progress.history[-1].train["accuracy"] > 0.5
    assert max(record.penalty for record in progress.history) > 0.0


def test_the_last_epoch_lands_whatever_was_planned() -> None:
    model, train, _ = trained({"params": 0.2, "steps": 10**6}, epochs=2, momentum=0.9)
    summary = lod.summary(model, torch.empty(1, 20))
    assert summary.fused_params <= round(0.2 * summary.dense_params)
    assert train.landing is not None and train.landing.phase == "landed"


def test_a_loop_of_ones_own_lands_after_the_first_epoch_has_told_its_length() -> None:
    torch.manual_seed(0)
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = lod.LoD(model, optimizer, penalty=lod.Budget(params=0.3))
    for _ in range(11):
        for x, y in data():
            with train.step():
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        train.end_epoch()
    assert train.landing is not None and train.landing.phase == "landed"
    assert lod.summary(model, torch.empty(1, 20)).fused_params <= train.landing.limit


class Stop(Exception):
    pass


@pytest.mark.parametrize("step", [1, 37, 90, 101, 150])
def test_a_run_goes_on_exactly_from_any_phase(step: int, tmp_path: Any) -> None:
    whole, _, expected = trained({"params": 0.3}, epochs=12, momentum=0.9)
    torch.manual_seed(0)
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    example = torch.empty(1, 20)
    train = lod.LoD(model, optimizer, penalty=lod.Budget(params=0.3), example=example)

    def save(progress: Progress) -> None:
        if progress.step == step:
            parts = (model, optimizer, train, progress)
            save_state([part.state_dict() for part in parts], tmp_path / "state")
            raise Stop

    with pytest.raises(Stop):
        lod.fit(model, data(), optimizer=optimizer, method=train, epochs=12, watch=Watch(step=save))
    state = load_state(tmp_path / "state")
    model = lod.decompose(net())
    model.load_state_dict(state[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(state[1])
    train = lod.LoD(model, optimizer, penalty=lod.Budget(params=0.3), example=example)
    train.load_state_dict(state[2])
    progress = Progress.from_state(state[3])
    lod.fit(model, data(), optimizer=optimizer, method=train, epochs=12, progress=progress)
    for (name, one), other in zip(
        whole.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    assert [r.penalty for r in progress.history] == [r.penalty for r in expected.history]


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
        ({"params": 0.2, "steps": 0}, "at least 1"),
        ({"params": 0.2, "steps": -1}, "-1"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused(budget: dict[str, float], words: str) -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=words):
        lod.LoD(model, optimizer, penalty=lod.Budget(**budget), example=torch.empty(1, 20))


def test_a_budget_needs_ranks_to_remove_and_macs_to_count() -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="has to remove ranks"):
        lod.LoD(model, optimizer, penalty=lod.Budget(params=0.2), threshold=None)
    with pytest.raises(OptionError, match="example"):
        lod.LoD(model, optimizer, penalty=lod.Budget(macs=0.2))


def test_a_state_without_a_budget_is_refused() -> None:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = lod.LoD(model, optimizer).state_dict()
    with pytest.raises(TrainingError, match="no budget"):
        lod.LoD(model, optimizer, penalty=lod.Budget(params=0.2)).load_state_dict(state)
    with pytest.raises(OptionError, match="no budget to land on"):
        lod.LoD(model, optimizer).land()


@given(
    tails=st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), min_size=1, max_size=3),
    share=st.floats(0.3, 0.95),
)
def test_fitting_ranks_lose_the_least_of_all_that_fit(
    tails: list[list[float]], share: float
) -> None:
    values: dict[str, Tensor] = {
        str(i): torch.tensor(sorted(tail, reverse=True)) for i, tail in enumerate(tails)
    }
    rest = 2

    def cost_of(name: str, rank: int) -> int:
        return (3 + int(name)) * rank

    def deployed(ranks: dict[str, int]) -> int:
        return rest + sum(cost_of(name, rank) for name, rank in ranks.items())

    choices = {name: range(1, len(value) + 1) for name, value in values.items()}
    most = deployed({name: len(value) for name, value in values.items()})
    least = deployed(dict.fromkeys(values, 1))
    limit = max(round(share * most), least)

    def kept(ranks: dict[str, int]) -> float:
        total = 1.0
        for name, rank in ranks.items():
            tail = torch.cat([values[name], torch.zeros(1)])
            total *= max(1 - float(tail[rank] / tail[0]) ** 2, 1e-12)
        return total

    combinations: list[dict[str, int]] = [{}]
    for name, choice in choices.items():
        combinations = [{**c, name: rank} for c in combinations for rank in choice]
    fitting = [c for c in combinations if deployed(c) <= limit]
    nearly = [c for c in fitting if deployed(c) >= 0.95 * limit] or fitting
    ranks = fitting_ranks(values, choices, cost_of, limit=limit, rest=rest)
    assert deployed(ranks) <= limit
    assert kept(ranks) >= max(map(kept, nearly)) * (1 - 1e-4) - 1e-9


def test_costs_are_those_of_the_deployed_model() -> None:
    model = lod.decompose(net(), ranks={"0": 3, "2": 30, "4": 2})
    example = torch.empty(1, 20)
    ledger, summary = Ledger.of(model, example), lod.summary(model, example)
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
    ledger = Ledger.of(model, example)
    ranks = dict.fromkeys(lod.ranks(model), 1)
    assert ledger.costs(model).at(ranks).macs == 3 * (4 * 16 * (8 + 16) + 16 + 30)
    with pytest.raises(lod.MaestroError, match="too small"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        lod.LoD(model, optimizer, penalty=lod.Budget(macs=0.5), example=example)


def test_once_landed_every_other_step_trains_the_whole_model() -> None:
    model, train, _ = trained({"params": 0.3}, epochs=6, momentum=0.9)
    ranks = lod.ranks(model)
    seen = []
    for x, _ in [next(iter(data())) for _ in range(40)]:
        with train.step() as drawn:
            model(x).sum().backward()
        seen.append(drawn)
    assert all(drawn[name] == ranks[name] for drawn in seen[1::2] for name in drawn)
    assert any(drawn[name] < ranks[name] for drawn in seen[::2] for name in drawn)
    train.optimizer.zero_grad()
    train.optimizer.step()
    train.end_epoch()
    sampled = train.ledger.epoch_cost(model, train.sampler.chances()).macs
    whole = train.ledger.epoch_cost(model, {}).macs
    booked = train.ledger.epochs[-1].macs
    assert sampled is not None and whole is not None
    assert booked == pytest.approx((sampled + whole) / 2)


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
    train = lod.LoD(model, optimizer, penalty=lod.Budget(params=0.7, steps=3))
    for _ in range(4):
        with train.step():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    train.end_epoch()
    assert train.landing is not None
    assert count_params(lod.extract(model)) <= train.landing.limit
