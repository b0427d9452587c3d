"""Which rank of which layer is drawn: distributions, shrinking models, exact resume."""

from __future__ import annotations

import io
import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from maestro_lod import MaestroError, RankSampler, decompose, ranks, shrink
from maestro_lod.layers import LowRank
from maestro_lod.train.sampling import STRATEGIES

WIDTHS = {"0": 2, "1": 5, "2": 3}


def low_rank_model() -> nn.Module:
    """Layers of rank 2, 5 and 3."""
    return decompose(nn.Sequential(*[nn.Linear(w, w + 4) for w in WIDTHS.values()]))


def layer(model: nn.Module, name: str) -> LowRank:
    found = model.get_submodule(name)
    assert isinstance(found, LowRank)
    return found


def cut(model: nn.Module, **keep: int) -> None:
    """Shrink layers, given as _0=2 for layer "0", by zeroing their tails."""
    with torch.no_grad():
        for name, rank in keep.items():
            layer(model, name[1:]).u[:, rank:] = 0
    shrink(model, threshold=0.0)


def live_pairs(model: nn.Module) -> set[tuple[str, int]]:
    return {(n, b) for n, r in ranks(model).items() for b in range(1, r + 1)}


def draw_pairs(sampler: RankSampler, count: int) -> list[tuple[str, int]]:
    draws = []
    for _ in range(count):
        ((name, rank),) = sampler.sample().items()
        draws.append((name, rank))
    return draws


def assert_uniform(observed: Counter, expected: dict) -> None:
    """Chi-square test at about four standard deviations."""
    assert observed.keys() <= expected.keys()
    statistic = sum((observed[key] - e) ** 2 / e for key, e in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


# -- pairs -------------------------------------------------------------------------------------


def test_pairs_is_the_default():
    assert RankSampler(low_rank_model()).strategy == "pairs"


def test_every_pair_comes_exactly_once_per_round():
    model = low_rank_model()
    sampler = RankSampler(model, seed=1)
    rounds = [draw_pairs(sampler, 10) for _ in range(20)]
    assert all(set(one) == live_pairs(model) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 20


def test_the_order_within_a_round_is_uniform():
    model = low_rank_model()
    sampler = RankSampler(model, seed=2)
    rounds = 3000
    at = Counter()
    for _ in range(rounds):
        at.update(enumerate(draw_pairs(sampler, 10)))
    pairs = sorted(live_pairs(model))
    assert_uniform(at, dict.fromkeys(itertools.product(range(10), pairs), rounds / 10))


def test_neighbours_within_a_round_are_uniform():
    sampler = RankSampler(decompose(nn.Linear(4, 4)), seed=3)
    rounds = 2000
    follows = Counter()
    for _ in range(rounds):
        drawn = [b for _, b in draw_pairs(sampler, 4)]
        follows.update(itertools.pairwise(drawn))
    expected = {(a, b): rounds / 4 for a in range(1, 5) for b in range(1, 5) if a != b}
    assert_uniform(follows, expected)


@pytest.mark.parametrize("seed", range(5))
def test_pairs_that_vanish_in_a_round_are_skipped_and_the_rest_still_comes_once(seed):
    model = low_rank_model()
    sampler = RankSampler(model, seed=seed)
    drawn = draw_pairs(sampler, 4)
    cut(model, _0=0, _1=2, _2=2)
    remaining = live_pairs(model) - set(drawn)
    rest = draw_pairs(sampler, len(remaining))
    assert len(rest) == len(set(rest))
    assert set(rest) == remaining
    assert set(draw_pairs(sampler, 4)) == live_pairs(model)


def test_a_shrink_between_rounds_needs_no_rebuild():
    model = low_rank_model()
    sampler = RankSampler(model)
    draw_pairs(sampler, 10)
    cut(model, _1=1)
    for _ in range(3):
        assert set(draw_pairs(sampler, 6)) == live_pairs(model)


# -- probabilities ----------------------------------------------------------------------------


CHANCES = {"0": [0.1, 0.9], "1": [0.1] * 4 + [0.6], "2": [0.1, 0.1, 0.8]}
"""With pairs of the layers of ranks 2, 5 and 3."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chances_say_at_which_rank_each_layer_is_left(strategy):
    sampler = RankSampler(low_rank_model(), strategy=strategy, seed=7)
    chances = sampler.chances()
    assert {name: len(of_ranks) for name, of_ranks in chances.items()} == WIDTHS
    for of_ranks in chances.values():
        assert sum(of_ranks) == pytest.approx(1.0)
    expected = CHANCES if strategy == "pairs" else {}
    for name, of_ranks in expected.items():
        assert chances[name] == pytest.approx(of_ranks)
    draws = 4000
    seen = Counter()
    for _ in range(draws):
        drawn = sampler.sample()
        seen.update((name, drawn.get(name, width)) for name, width in WIDTHS.items())
    for name, of_ranks in chances.items():
        for rank, chance in enumerate(of_ranks, 1):
            assert seen[name, rank] / draws == pytest.approx(chance, abs=0.03)


def test_several_cuts_up_to_all_layers_together():
    sampler = RankSampler(low_rank_model(), strategy="several", seed=8)
    counts = Counter(len(sampler.sample()) for _ in range(600))
    assert set(counts) == {1, 2, 3}
    alone = 1 / 3 + (0.2**2 + 0.5**2 + 0.3**2) / 3 + (0.2**3 + 0.5**3 + 0.3**3) / 3
    assert counts[1] / 600 == pytest.approx(alone, abs=0.06)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_are_integers_from_one_to_the_rank(strategy):
    model = low_rank_model()
    sampler = RankSampler(model, strategy=strategy)
    seen = {pair for _ in range(400) for pair in sampler.sample().items()}
    assert seen == live_pairs(model)
    assert all(type(rank) is int for _, rank in seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_live_ranks_are_read_at_every_draw(strategy):
    model = low_rank_model()
    sampler = RankSampler(model, strategy=strategy)
    sampler.sample()
    cut(model, _0=1, _1=3)
    seen = {pair for _ in range(400) for pair in sampler.sample().items()}
    assert seen == live_pairs(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_of_rank_zero_and_frozen_layers_are_passed_over(strategy):
    model = low_rank_model()
    cut(model, _1=0)
    layer(model, "2").requires_grad_(False)
    sampler = RankSampler(model, strategy=strategy)
    assert sampler.live_ranks() == {"0": 2}
    assert list(sampler.chances()) == ["0"]
    assert {pair for _ in range(50) for pair in sampler.sample().items()} == {("0", 1), ("0", 2)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["gone", "frozen"])
def test_a_model_with_nothing_to_sample_is_refused(strategy, how):
    model = low_rank_model()
    sampler = RankSampler(model, strategy=strategy)
    sampler.sample()
    if how == "gone":
        cut(model, _0=0, _1=0, _2=0)
    else:
        model.requires_grad_(False)
    with pytest.raises(MaestroError, match="no rank is left"):
        sampler.sample()
    assert sampler.chances() == {}


def test_an_unknown_strategy_is_refused_with_the_nearest_one():
    with pytest.raises(MaestroError, match=r"'severl'.*'several'"):
        RankSampler(low_rank_model(), strategy="severl")


def test_a_model_without_low_rank_layers_is_refused():
    with pytest.raises(MaestroError, match="decompose"):
        RankSampler(nn.Linear(3, 3))


# -- randomness --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_draws_neither_touch_nor_read_the_global_generator(strategy):
    model = low_rank_model()

    def draws(global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        sampler = RankSampler(model, strategy=strategy, seed=8)
        drawn = [sampler.sample() for _ in range(30)]
        assert torch.equal(torch.get_rng_state(), before)
        return drawn

    assert draws(1) == draws(2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seeds_decide(strategy):
    model = low_rank_model()
    first, same, other = (RankSampler(model, strategy=strategy, seed=s) for s in (1, 1, 2))
    drawn = [first.sample() for _ in range(30)]
    assert [same.sample() for _ in range(30)] == drawn
    assert [other.sample() for _ in range(30)] != drawn


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("after", [0, 4, 10, 13])
def test_a_saved_state_goes_on_exactly_where_it_was(strategy, after):
    model = low_rank_model()
    sampler = RankSampler(model, strategy=strategy, seed=9)
    for _ in range(after):
        sampler.sample()
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    expected = [sampler.sample() for _ in range(40)]
    file.seek(0)
    restored = RankSampler(low_rank_model(), strategy=strategy, seed=123)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert [restored.sample() for _ in range(40)] == expected


def test_a_state_saved_before_and_loaded_after_a_shrink_skips_what_is_gone():
    model = low_rank_model()
    sampler = RankSampler(model, seed=10)
    drawn = draw_pairs(sampler, 3)
    state = sampler.state_dict()
    cut(model, _1=1)
    restored = RankSampler(model)
    restored.load_state_dict(state)
    remaining = live_pairs(model) - set(drawn)
    assert set(draw_pairs(restored, len(remaining))) == remaining


def test_a_saved_state_does_not_change_with_later_draws():
    sampler = RankSampler(low_rank_model(), seed=11)
    draw_pairs(sampler, 3)
    state = sampler.state_dict()
    expected = draw_pairs(sampler, 25)
    sampler.load_state_dict(state)
    assert draw_pairs(sampler, 25) == expected


def test_a_state_of_another_strategy_is_refused():
    model = low_rank_model()
    state = RankSampler(model, strategy="several").state_dict()
    with pytest.raises(MaestroError, match="'several'"):
        RankSampler(model).load_state_dict(state)
