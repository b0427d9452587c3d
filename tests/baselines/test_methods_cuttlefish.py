"""Cuttlefish: when ranks have settled, which layers pay, at which ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.baselines.cuttlefish import Cuttlefish, CuttlefishSettings, faster
from maestro_lod.baselines.stable_rank import StableRanks, slopes, smoothed, stable_rank
from maestro_lod.train.method import RunPlan
from tests.support.made import made


def test_the_stable_rank_is_the_share_of_energy_in_the_first_direction() -> None:
    values = torch.tensor([2.0, 2.0, 1.0, 1.0])
    left, right = (torch.linalg.qr(torch.randn(n, 4)).Q for n in (9, 7))
    assert stable_rank((left * values @ right.T)[None]) == math.floor(10 / 4)
    assert stable_rank(torch.eye(5)[None]) == 5
    assert stable_rank(torch.zeros(1, 3, 4)) == 1


def test_slopes_are_those_of_numpy() -> None:
    import numpy

    values = [4.0, 7.0, 1.0, 1.0, 2.5]
    assert slopes(values) == numpy.gradient(values).tolist()
    assert smoothed([1.0, 2.0, 3.0], 3) == [1.0, 1.5, 2.25]


def first_switch(trace: list[list[int]], **options: Any) -> int | None:
    """The epoch at which a trace switches: the first after that all layers are stable."""
    watched = StableRanks(**{"window": 4, "last": 3, "epsilon": 0.1, **options})
    for epoch, ranks in enumerate(trace, 1):
        if watched.add({f"layer{i}": rank for i, rank in enumerate(ranks)}):
            return epoch
    return None


def test_the_switch_comes_when_every_layer_is_stable_and_not_before() -> None:
    still = [[9, 9, 9]] * 10
    assert first_switch(still) == 4  # not before the window is full
    assert first_switch(still, window=7) == 7
    falling = [[90 - 9 * t, 9, 9] for t in range(10)]
    assert first_switch(falling) is None
    settling = [[max(30 - 5 * t, 10), 9, 9] for t in range(20)]  # still from the fifth epoch on

    def mean_slope(epochs: int) -> float:
        values = smoothed([row[0] for row in settling[:epochs]], 4)
        return sum(abs(s) for s in slopes(values)[-3:]) / 3

    expected = next(t for t in range(4, 21) if mean_slope(t) <= 0.5)  # 0.1 · 5: the last layer
    assert first_switch(settling) == expected > 5


def test_the_last_layers_may_still_move_a_little() -> None:
    def switches(layers: int, slope: float) -> bool:
        trace: Any = [[slope * t] * layers + [9.0] * 3 for t in range(10)]
        return first_switch(trace, window=1, last=2) is not None  # nothing is smoothed

    assert switches(1, 0.49) and not switches(1, 0.51)
    assert switches(2, 0.24) and not switches(2, 0.26)
    assert switches(3, 0.09) and not switches(3, 0.11)


def test_a_layer_that_was_stable_once_counts_as_such() -> None:
    watched = StableRanks(2, 2, 0.1)
    assert not any(watched.add({"a": 5, "b": 5 * t, "c": 7 * t}) for t in range(4))
    assert watched.stable == ["a"]
    watched.add({"a": 50, "b": 20, "c": 28})
    assert watched.stable == ["a"]


def test_layers_that_do_not_become_faster_stay_dense() -> None:
    costs = {"a": (10.0, 9.0), "b": (20.0, 9.0), "c": (30.0, 10.0), "d": (8.0, 8.0)}
    width = {"a": 4, "b": 4, "c": 8, "d": 8}.__getitem__
    assert [*faster(costs, width, 1.5)] == ["a", "b", "c", "d"]  # stack by stack
    assert [*faster(costs, width, 1.9)] == ["c", "d"]
    assert [*faster(costs, width, 3.0)] == []


def cuttlefish(model: nn.Module, **options: Any) -> Cuttlefish:
    settings = CuttlefishSettings(keep_ends=False, **options)
    found: Cuttlefish = made(settings, model, torch.randn(1, 8))
    found.start(model, found.optimizer, RunPlan(20, 1))
    return found


def test_cuttlefish_takes_scaled_stable_ranks_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 24))
    method = cuttlefish(model, speedup=0.0, window=2)
    first = {"0": stable_rank(model[0].weight[None]), "1": stable_rank(model[1].weight[None])}
    assert method.scales == {"0": 8 / first["0"], "1": 24 / first["1"]}
    with torch.no_grad():  # as a training would leave it
        left, _, right = torch.linalg.svd(model[1].weight, full_matrices=False)
        model[1].weight.copy_(left * 0.4 ** torch.arange(24) @ right)
    now = stable_rank(model[1].weight[None])
    method.end_epoch(last=False)
    assert not method.factorized
    method.end_epoch(last=False)
    assert lod.ranks(model) == {"0": 8, "1": math.ceil(24 / first["1"] * now)}
    assert {g["weight_decay"] for g in method.optimizer.param_groups} == {0.0, 1e-3}
    assert method.ledger.epochs[-1].params == 8 * 32 + 32 + 32 * 24 + 24


def test_cuttlefish_never_switches_while_ranks_move() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 24))
    method = cuttlefish(model, speedup=0.0, window=2, epsilon=0.0)
    for t in range(6):
        with torch.no_grad():
            left, _, right = torch.linalg.svd(model[1].weight, full_matrices=False)
            model[1].weight.copy_(left * 0.99 ** (t * torch.arange(24)) @ right)
        method.end_epoch(last=t == 5)
    assert not method.factorized and method.stage == "dense"


@pytest.mark.parametrize("profile", ["macs", "time"])
def test_cuttlefish_profiles_by_arithmetic_or_by_the_clock(profile: str) -> None:
    model = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 8))
    method = cuttlefish(model, profile=profile, speedup=1.9 if profile == "macs" else 0.0)
    # a square layer at a quarter of its rank has half of its MACs, the others 1/0.27
    assert set(method.scales) == {"0", "2", "3"}
    assert set(cuttlefish(model, profile=profile, speedup=1e6).scales) == set()
