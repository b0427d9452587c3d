"""Which layers get the ranks: those that lose the least within any cost."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.sizes.allocation import Allocation, frozen_layers, smallest_cost
from maestro_lod.train.ledger import Ledger


@given(
    tails=st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), min_size=1, max_size=3),
    share=st.floats(0.3, 0.95),
    room=st.floats(1.0, 3.0),
)
def test_ranks_lose_the_least_of_all_that_fit(
    tails: list[list[float]], share: float, room: float
) -> None:
    lost: dict[str, Tensor] = {
        str(i): torch.tensor([1.0, *sorted(tail, reverse=True)[1:], 0.0])
        for i, tail in enumerate(tails)
    }
    rest = 2

    def cost_of(name: str, rank: int) -> int:
        return (3 + int(name)) * rank

    def deployed(ranks: dict[str, int]) -> int:
        return rest + sum(cost_of(name, rank) for name, rank in ranks.items())

    choices = {name: range(1, len(shares)) for name, shares in lost.items()}
    most = deployed({name: len(shares) - 1 for name, shares in lost.items()})
    least = deployed(dict.fromkeys(lost, 1))
    limit = max(round(share * most), least)

    def total(ranks: dict[str, int]) -> float:
        return sum(float(lost[name][rank]) for name, rank in ranks.items())

    combinations: list[dict[str, int]] = [{}]
    for name, choice in choices.items():
        combinations = [{**c, name: rank} for c in combinations for rank in choice]
    fitting = [c for c in combinations if deployed(c) <= limit]
    nearly = [c for c in fitting if deployed(c) >= 0.95 * limit] or fitting
    spent = Allocation(lost, choices, cost_of, most=round(room * limit), rest=rest)
    ranks = spent.within(limit)
    assert deployed(ranks) <= limit
    assert total(ranks) <= min(map(total, nearly)) * (1 + 1e-4) + 1e-9


def test_where_nothing_fits_the_cheapest_ranks_are_given() -> None:
    lost = {"a": torch.tensor([1.0, 0.5, 0.0]), "b": torch.tensor([1.0, 0.1, 0.0])}
    spent = Allocation(lost, {"a": range(1, 3), "b": range(2, 3)}, lambda _, r: 10 * r, most=100)
    assert spent.within(5) == {"a": 1, "b": 2}


def test_frozen_layers_keep_their_ranks() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 30)))
    model[2].requires_grad_(False)
    costs = Ledger.open_for(model, torch.empty(1, 30)).costs(model)
    assert frozen_layers(model) == ["2"]
    assert smallest_cost(model, costs, "macs") == 2 * 60 + 900
