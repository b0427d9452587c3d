"""Methods that set weights to zero: IMP and Rare Gems."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.baselines.imp import IMP, IMPSettings, kept_by_round
from maestro_lod.baselines.raregems import (
    RareGems,
    RareGemsSettings,
    freezings,
    frozen_share,
    signed_constants,
)
from maestro_lod.baselines.sparse import INDEX_BITS, largest_kept, prunable_weights
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.train.fit import fit
from maestro_lod.train.method import RunPlan
from maestro_lod.train.schedule import milestones
from tests.support.made import made

IMAGE, SAMPLE = torch.empty(1, 1, 28, 28), torch.empty(1, 6)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def trained(method: Any, epochs: int, watch: Any = None, **options: Any) -> list[Any]:
    """Train by a method, and tell what `watch(method)` saw at the end of each epoch."""
    torch.manual_seed(1)
    batches = [(torch.randn(32, 6), torch.randint(4, (32,))) for _ in range(4)]
    seen: list[Any] = []
    on_epoch_end = method.on_epoch_end

    def watched(*, last: bool) -> None:
        on_epoch_end(last=last)
        if watch is not None:
            seen.append(watch(method))

    method.on_epoch_end = watched
    fit(method.model, batches, optimizer=method.optimizer, epochs=epochs, method=method, **options)
    return seen


# -- masks -----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 2**31))
def test_masks_are_exact_in_number_and_keep_the_largest(keep: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = {  # whole numbers: many of them are equal
        name: torch.randint(-3, 4, shape, generator=draw).float()
        for name, shape in {"a": (4, 5), "b": (2, 3, 3), "c": (2, 1)}.items()
    }
    masks = {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
    masks["a"][0] = False
    kept = largest_kept(scores, masks, keep)
    left = sum(int(mask.sum()) for mask in masks.values())
    assert sum(int(mask.sum()) for mask in kept.values()) == min(keep, left)
    assert all(bool((masks[name] | ~mask).all()) for name, mask in kept.items())
    stay = [scores[name][mask].abs() for name, mask in kept.items()]
    gone = [scores[name][masks[name] & ~mask].abs() for name, mask in kept.items()]
    if 0 < keep < left:
        assert torch.cat(stay).min() >= torch.cat(gone).max()


def test_biases_norms_and_embeddings_are_not_pruned() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    model[3].weight = model[0].weight
    assert list(prunable_weights(model)) == ["1.weight"]
    assert sum(p.numel() for p in prunable_weights(LeNet()).values()) == 44_426 - 236


def test_a_sparse_model_says_what_is_left_and_where() -> None:
    method: IMP = made(IMPSettings(size=0.1), LeNet(), IMAGE)
    method.start(method.model, method.optimizer, plan(20))
    method.masks = largest_kept(method.weights, method.masks, method.target)
    record = method.record()
    assert method.target == int(0.1 * 44_426) - 236
    assert record.params == int(0.1 * 44_426) and record.bits == 32 * record.params
    counts = {name: (mask.numel(), int(mask.sum())) for name, mask in method.masks.items()}
    assert record.index_bits == sum(min(n, INDEX_BITS * left) for n, left in counts.values())
    assert record.macs == 281_640
    positions = {"conv1.weight": 576, "conv2.weight": 64}
    assert record.others["sparse_macs"] == sum(
        positions.get(name, 1) * left for name, (_, left) in counts.items()
    )


def plan(epochs: int) -> RunPlan:
    return RunPlan(epochs, 4)


# -- IMP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("density", "rounds"), [(0.25, 7), (0.01442, 19), (0.8, 1), (0.5, 4)])
def test_rounds_follow_from_the_density(density: float, rounds: int) -> None:
    kept = kept_by_round(1_000_000, int(density * 1_000_000), 0.2, 100)
    assert len(kept) == rounds == math.ceil(math.log(density) / math.log(0.8))
    left = 1_000_000
    for now in kept[:-1]:
        assert now == left - math.ceil(0.2 * left)
        left = now
    assert kept[-1] == int(density * 1_000_000)


def test_a_short_run_prunes_more_at_once() -> None:
    assert kept_by_round(1000, 125, 0.2, 3) == [500, 250, 125]
    assert kept_by_round(1000, 125, 0.2, 1) == [125]
    assert kept_by_round(1000, 1000, 0.2, 1) == []


@pytest.mark.parametrize("rewind", [0.0, 0.25, 0.6])
def test_imp_rewinds_everything_that_is_left_bit_for_bit(rewind: float) -> None:
    model = mlp()
    method: IMP = made(IMPSettings(size=0.62, prune=0.3, rewind=rewind), model, SAMPLE)
    rate = method.optimizer.param_groups[0]["lr"]
    early: list[dict[str, Tensor]] = []
    steps = method.optimizer

    def note(*_: Any) -> None:
        early.append({name: v.detach().clone() for name, v in model.state_dict().items()})

    note()
    steps.register_step_post_hook(note)

    def state(method: IMP) -> Any:
        masks = {name: mask.clone() for name, mask in method.masks.items()}
        weights = {name: v.detach().clone() for name, v in method.model.state_dict().items()}
        return method.round, masks, weights, dict(method.optimizer.state)

    seen = trained(method, epochs=6, watch=state)  # three trainings of two epochs each
    assert len(method.kept) == 2 and method.ends == [2, 4, 6]
    assert [row[0] for row in seen] == [0, 1, 1, 2, 2, 2]
    k = round(rewind * 8)
    for turn in (1, 3):
        _, masks, weights, momentum = seen[turn]
        assert momentum == {}
        for name, value in weights.items():
            mask = masks.get(name, torch.ones_like(value, dtype=torch.bool))
            assert torch.equal(value, early[k][name] * mask), name
        assert sum(int(mask.sum()) for mask in masks.values()) == method.kept[turn // 2]
    final = {name: p for name, p in model.named_parameters() if name in method.masks}
    assert sum(int(p.count_nonzero()) for p in final.values()) == method.target
    assert method.optimizer.param_groups[0]["lr"] == rate


def test_each_training_of_imp_runs_through_the_schedule() -> None:
    method: IMP = made(IMPSettings(size=0.5, prune=0.7, rewind=0.25), mlp(), SAMPLE)
    rates: list[float] = []
    method.optimizer.register_step_post_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    trained(method, epochs=4, schedule=milestones([2], 4))
    # two trainings of eight steps; the second begins where the first was after two
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.1] * 3 + [0.01] * 5)


def test_one_epoch_is_too_short_for_stages() -> None:
    method = made(IMPSettings(size=0.5), mlp(), SAMPLE)
    with pytest.raises(lod.MaestroError, match="needs at least 2 epochs"):
        trained(method, epochs=1)


# -- Rare Gems -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "times", "share"), [(20, 9, 0.283), (5, 39, 0.074)])
def test_the_schedule_of_gem_miner(every: int, times: int, share: float) -> None:
    """Its configurations: 200 epochs of search, 5 % of the weights left."""
    assert freezings(200, every) == times
    assert frozen_share(0.05, times) == pytest.approx(share, abs=5e-4)
    assert (1 - frozen_share(0.05, times)) ** times == pytest.approx(0.05)


def test_weights_are_signed_constants_while_scores_are_learned() -> None:
    conv = nn.Conv2d(3, 4, 5)
    constant = signed_constants(conv.weight)
    assert torch.equal(constant.sign(), conv.weight.sign())
    torch.testing.assert_close(constant.abs(), torch.full_like(constant, math.sqrt(2 / 75)))


def test_gem_miner_freezes_by_its_schedule_down_to_the_target() -> None:
    model = mlp()
    options = {"size": 0.4, "search_share": 0.5, "search_lr": 0.05, "freeze_every": 1}
    method: RareGems = made(RareGemsSettings(**options), model, SAMPLE)
    biases = {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 1}

    def state(method: RareGems) -> Any:
        same = all(torch.equal(model.get_parameter(n), p) for n, p in biases.items())
        return method.searching, method.left, same, method.position()

    seen = trained(method, epochs=8, watch=state)
    share = frozen_share(method.target / method.prunable, 3)
    left = [method.prunable]
    for _ in range(2):
        left.append(left[-1] - math.ceil(share * left[-1]))
    assert [row[1] for row in seen] == [*left[1:], method.target] + 5 * [method.target]
    assert [row[0] for row in seen] == [True] * 3 + [False] * 5
    assert all(row[2] for row in seen[:4]) and not seen[-1][2], "biases train after the search"
    assert seen[3][3] == 0.0 and seen[-1][3] == 1.0


def test_what_survives_begins_at_its_constant() -> None:
    method: RareGems = made(RareGemsSettings(size=0.4, search_share=0.5), mlp(), SAMPLE)

    def weights(method: RareGems) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in method.weights.items()}

    begun = trained(method, epochs=2, watch=weights)[0]
    for name, weight in begun.items():
        assert torch.equal(weight, method.initial[name] * method.masks[name])
    final = sum(int(p.count_nonzero()) for p in method.weights.values())
    assert final == method.target


def test_a_weight_counts_where_its_score_is_above_a_half() -> None:
    method: RareGems = made(RareGemsSettings(size=0.5), mlp(), SAMPLE)
    method.start(method.model, method.optimizer, plan(8))
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    name, weight = next(iter(method.weights.items()))
    initial, score = method.initial[name], method.scores[name]
    assert torch.equal(weight != 0, score > 0.5) and 0.4 < float((weight != 0).float().mean()) < 0.6
    free = initial * (score > 0.5)
    free.requires_grad_()
    expected = torch.func.functional_call(method.model, {name: free}, (x,))
    (by_weight,) = torch.autograd.grad(F.cross_entropy(expected, y), free)
    method.backward(lambda: method.model(x), lambda output: F.cross_entropy(output, y))
    decay = 2 * method.settings.search_decay * score.detach()
    torch.testing.assert_close(score.grad, by_weight * initial + decay)
    assert weight.grad is None
    before = score.detach().clone()
    method.optimizer.step()
    assert not torch.equal(score, before)
    assert bool(((score >= 0.0) & (score <= 1.0)).all())


def test_a_search_that_collapses_ends_at_the_target() -> None:
    method: RareGems = made(RareGemsSettings(size=0.4, search_share=0.75), mlp(), SAMPLE)
    after_step = method.after_step

    def collapse() -> None:
        after_step()
        if method.searching and method.step == 4:
            with torch.no_grad():
                for score in method.scores.values():
                    score.mul_(0.4)

    method.after_step = collapse  # type: ignore[method-assign]
    seen = trained(method, epochs=4, watch=lambda m: (m.searching, m.left, m.search_epochs))
    assert seen == [(False, method.target, 1)] * 4
