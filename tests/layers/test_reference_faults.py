"""Pitfalls of ordered low-rank training, each shown not to be here.

The first public implementation of the method taught where it is easy to go wrong. Every test states
what holds in this one.
"""

from __future__ import annotations

import copy
import io
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.errors import LayerError, TrainingError
from maestro_lod.layers import LowRank, LowRankConv, LowRankLinear, lowrank

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def drop_ranks(layer: LowRank, rank: int) -> None:
    """Make the ranks from `rank` on useless, as training would."""
    with torch.no_grad():
        layer.u[:, rank:] = 0
        layer.v[rank:] = 0


# -- finding and replacing layers --------------------------------------------------------------


def test_skipping_a_layer_by_name_leaves_exactly_that_one_dense() -> None:
    model = lod.decompose(LeNet(), skip="fc3")
    assert list(lod.ranks(model)) == ["conv1", "conv2", "fc1", "fc2"]
    assert type(model.fc3) is nn.Linear


def test_a_wrong_name_is_an_error_and_nothing_is_attached() -> None:
    model = LeNet()
    names = list(model._modules)
    with pytest.raises(LayerError, match="fc4"):
        lod.decompose(model, only="fc4")
    assert list(model._modules) == names


def test_a_bare_linear_is_replaced_and_gets_no_child() -> None:
    layer = lod.decompose(nn.Linear(6, 5))
    assert type(layer) is LowRankLinear
    assert list(layer.children()) == []


def test_a_layer_under_two_names_is_replaced_under_both() -> None:
    inner = nn.Linear(6, 6)
    model = lod.decompose(nn.ModuleDict({"a": inner, "b": inner}))
    assert model["a"] is model["b"]
    assert isinstance(model["a"], LowRankLinear)


def test_decomposing_twice_does_not_nest() -> None:
    model = lod.decompose(lod.decompose(nn.Sequential(nn.Linear(6, 6), nn.Conv1d(6, 6, 3))))
    assert [name for name, _ in model.named_modules()] == ["", "0", "1"]
    assert [type(module) for module in model] == [LowRankLinear, LowRankConv]


def test_a_module_with_similar_attributes_is_not_taken_for_a_low_rank_layer() -> None:
    class Lookalike(nn.Module):
        rank = inner_dim = full_rank = 3

    model = lod.decompose(nn.Sequential(nn.Linear(6, 6), Lookalike()))
    assert lod.ranks(model) == {"0": 6}
    torch.testing.assert_close(lod.group_lasso(model), lod.group_lasso(model[0]))


def test_a_model_is_used_as_it_is_without_a_sampler_in_its_forward() -> None:
    model = lod.decompose(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.randn(2, 5, 8)
    with lod.at_ranks(model, lod.RankSampler(model).sample()):
        assert model(x).shape == x.shape
    with torch.no_grad():  # the fast path reads `weight`
        assert model(x).shape == x.shape


def test_tied_embedding_and_head_stay_tied_and_do_not_grow() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "fc": nn.Linear(4, 4), "head": nn.Linear(4, 10, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    lod.decompose(model, ranks=1)
    assert model["head"].weight is model["embed"].weight
    assert sum(p.numel() for p in model.parameters()) == 40 + 8 + 4


# -- options and dtypes of the dense layer -----------------------------------------------------


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_the_padding_mode_is_kept(mode: str) -> None:
    dense = nn.Conv2d(3, 6, 3, padding=1, padding_mode=mode)
    x = torch.randn(2, 3, 5, 5)
    layer = lod.decompose(copy.deepcopy(dense))
    assert layer.padding_mode == mode
    torch.testing.assert_close(layer(x), dense(x), **CLOSE)
    with lod.at_ranks(layer, 2):
        torch.testing.assert_close(lod.extract(layer, 2)(x), layer(x), **CLOSE)


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_convolutions_are_supported(groups: int) -> None:
    dense = nn.Conv2d(8, 16, 3, groups=groups)
    x = torch.randn(2, 8, 5, 5)
    layer = lod.decompose(copy.deepcopy(dense))
    assert layer.rank == 16 // groups
    torch.testing.assert_close(layer(x), dense(x), **CLOSE)


def test_a_depthwise_convolution_is_left_alone_and_said_to_be() -> None:
    model = lod.decompose(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)))
    assert type(model[0]) is nn.Conv2d
    assert "no rank saves anything" in lod.survey(model).left_alone["0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dense", [nn.Linear(8, 8), nn.Conv2d(4, 8, 3)], ids=["linear", "conv"])
def test_half_precision_layers_decompose(dense: nn.Module, dtype: torch.dtype) -> None:
    layer = lod.decompose(copy.deepcopy(dense).to(dtype))
    assert layer.u.dtype == layer.v.dtype == dtype
    difference = (layer.weight.float() - dense.weight).abs().max()
    assert difference < 0.02 * dense.weight.abs().max()


def test_a_frozen_layer_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6))
    lod.decompose(model)
    assert [p.requires_grad for p in model.parameters()] == [False] * 3 + [True] * 3


def test_making_a_low_rank_layer_shares_no_memory_with_the_dense_one() -> None:
    dense = nn.Linear(6, 6)
    weight, bias = dense.weight.detach().clone(), dense.bias.detach().clone()
    layer = LowRankLinear.from_dense(dense)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    assert torch.equal(dense.weight, weight) and torch.equal(dense.bias, bias)


def test_plain_copies_share_no_bias_with_the_low_rank_layer() -> None:
    layer = lod.decompose(nn.Linear(6, 6))
    plain = lod.extract(layer, 2)
    plain[1].bias.data.fill_(7.0)
    assert not (layer.bias == 7.0).any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "kind", [lambda b: nn.Linear(6, 6, bias=b), lambda b: nn.Conv2d(4, 6, 3, bias=b)]
)
def test_the_bias_is_a_parameter_or_none_and_repr_says_which(kind: object, bias: bool) -> None:
    layer = lod.decompose(kind(bias))
    assert isinstance(layer.bias, nn.Parameter) if bias else layer.bias is None
    assert f"bias={bias}" in repr(layer)


# -- ranks are whole numbers -------------------------------------------------------------------


def test_every_rank_of_every_width_is_used_exactly() -> None:
    for width in (84, 100, 120, 127):
        layer = LowRankLinear(torch.zeros(1, width), torch.zeros(width, 1), None)
        for rank in range(width + 1):
            layer.activate(rank)
            assert layer.active_rank == rank


def test_a_round_of_samples_visits_every_rank_once() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(100, 84), nn.Linear(84, 10)))
    sampler = lod.RankSampler(model)
    drawn = [next(iter(sampler.sample().items())) for _ in range(94)]
    assert sorted(drawn) == sorted(
        [("0", b) for b in range(1, 85)] + [("1", b) for b in range(1, 11)]
    )


def test_rank_zero_is_not_the_same_as_no_rank() -> None:
    layer, x = lod.decompose(nn.Linear(6, 6)), torch.randn(3, 6)
    full = layer(x)
    layer.activate(0)
    torch.testing.assert_close(layer(x), layer.bias.expand(3, 6))
    layer.activate(None)
    assert torch.equal(layer(x), full)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "active"])
def test_a_convolution_at_rank_zero_has_the_shape_of_its_output(stored: bool) -> None:
    layer, x = lod.decompose(nn.Conv2d(3, 8, 3, padding=1)), torch.randn(2, 3, 8, 8)
    if stored:
        drop_ranks(layer, 0)
        lod.shrink(layer, threshold=1e-7)
        assert layer.rank == 0
    layer.activate(0)
    output = layer(x)
    torch.testing.assert_close(output, layer.bias.view(1, 8, 1, 1).expand(2, 8, 8, 8))


def test_a_small_rank_costs_little_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors are cut, not masked: work falls in proportion to the rank."""
    monkeypatch.setattr(lowrank, "compose_is_cheaper", lambda *_: False)
    layer, x = lod.decompose(nn.Conv2d(8, 16, 3)), torch.randn(1, 8, 6, 6)
    flops = []
    for rank in (2, 4, 8, 16):
        counter = FlopCounterMode(display=False)
        with lod.at_ranks(layer, rank), counter:
            layer(x)
        flops.append(counter.get_total_flops())
    assert [f // flops[0] for f in flops] == [1, 2, 4, 8]


# -- shrinking ---------------------------------------------------------------------------------


def test_shrinking_makes_parameters_and_momentum_smaller() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    drop_ranks(model[0], 9)
    lod.shrink(model, optimizer, threshold=1e-7)
    assert sum(p.numel() for p in model.parameters()) == 9 * 32 + 16
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    momentum = [optimizer.state[p]["momentum_buffer"].numel() for p in held]
    assert sum(momentum) == 9 * 32 + 16


def test_training_goes_on_after_a_shrink() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    drop_ranks(model[0], 9)
    lod.shrink(model, optimizer, threshold=1e-7)
    before = model[0].v.detach().clone()
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].v, before)


def test_the_state_dict_carries_the_ranks() -> None:
    trained = lod.decompose(nn.Sequential(nn.Linear(8, 8)))
    drop_ranks(trained[0], 5)
    lod.shrink(trained, threshold=1e-7)
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    fresh = lod.decompose(nn.Sequential(nn.Linear(8, 8)))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert lod.ranks(fresh) == {"0": 5}
    x = torch.randn(3, 8)
    assert torch.equal(fresh(x), trained(x))


@pytest.mark.parametrize("turned", [lod.fuse, lod.extract], ids=["fuse", "extract"])
def test_the_dense_model_is_the_one_that_was_evaluated(turned: object) -> None:
    model, x = lod.decompose(nn.Sequential(nn.Linear(8, 8))), torch.randn(3, 8)
    with torch.no_grad():
        model[0].u[:, 6:] *= 1e-3
        model[0].v[6:] *= 1e-3
    lod.shrink(model, threshold=1e-4)
    assert lod.ranks(model) == {"0": 6}
    evaluated = model(x)
    dense = turned(model)
    assert type(dense[0]) is nn.Linear
    torch.testing.assert_close(dense(x), evaluated, **CLOSE)


# -- the penalty -------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_zero_ranks_give_zero_gradients_instead_of_nan(rank: int) -> None:
    layer = lod.decompose(nn.Linear(8, 8))
    drop_ranks(layer, rank)
    lod.group_lasso(layer).backward()
    for gradient in (layer.u.grad, layer.v.grad):
        assert gradient.isfinite().all()
    assert not layer.u.grad[:, rank:].any() and not layer.v.grad[rank:].any()
    assert bool(layer.u.grad[:, :rank].any()) is (rank > 0)


def test_the_penalty_is_that_of_the_definition() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 6), nn.Conv2d(4, 6, 3)))
    expected = sum(
        layer.u[:, b:].norm() + layer.v[b:].norm() for layer in model for b in range(layer.rank)
    )
    torch.testing.assert_close(lod.group_lasso(model), expected)
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    lod.group_lasso(model).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient)


def test_removed_ranks_no_longer_count_in_the_penalty() -> None:
    layer = lod.decompose(nn.Linear(8, 8))
    with torch.no_grad():
        layer.u[:, 5:] *= 1e-4
        layer.v[5:] *= 1e-4
    short = lod.decompose(nn.Linear(8, 8), ranks=5)
    with torch.no_grad():
        short.u.copy_(layer.u[:, :5])
        short.v.copy_(layer.v[:5])
    assert lod.group_lasso(layer) > lod.group_lasso(short)
    lod.shrink(layer, threshold=1e-5)
    assert torch.equal(lod.group_lasso(layer), lod.group_lasso(short))


def test_the_penalty_of_a_model_without_low_rank_layers_is_an_error() -> None:
    with pytest.raises(LayerError, match=r"no low-rank layer.*decompose"):
        lod.group_lasso(nn.Sequential(nn.Linear(4, 4)))


# -- sampling ----------------------------------------------------------------------------------


class Winding(nn.Module):
    """Calls its layers in another order than it lists them, one twice and one only at times."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.twice, self.rare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, rarely: bool = False) -> Tensor:
        x = self.twice(self.twice(x))
        if rarely:
            x = self.rare(x)
        return self.last(x)


@pytest.mark.parametrize("rarely", [False, True])
def test_each_layer_gets_the_rank_that_was_drawn_for_it(rarely: bool) -> None:
    model, x = lod.decompose(Winding()), torch.randn(3, 6)
    drawn = {"last": 1, "twice": 2, "rare": 3}
    with lod.at_ranks(model, drawn):
        output = model(x, rarely)
    plain = lod.extract(model, drawn)
    torch.testing.assert_close(output, plain(x, rarely), **CLOSE)


@pytest.mark.parametrize("strategy", ["pairs", "iid", "layer_uniform", "independent"])
def test_sampling_leaves_global_randomness_alone_and_repeats_from_its_seed(strategy: str) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 7)))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    runs = []
    for seed in (3, 3, 4):
        sampler = lod.RankSampler(model, strategy=strategy, seed=seed)
        runs.append([sampler.sample() for _ in range(20)])
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()  # noqa: NPY002


@pytest.mark.parametrize("strategy", ["pairs", "iid", "layer_uniform", "independent"])
def test_sampling_passes_over_layers_of_rank_zero(strategy: str) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    drop_ranks(model[0], 0)
    lod.shrink(model, threshold=1e-7)
    sampler = lod.RankSampler(model, strategy=strategy)
    for _ in range(20):
        assert list(sampler.sample()) == ["1"]


@pytest.mark.parametrize("strategy", ["pairs", "iid", "layer_uniform", "independent"])
def test_sampling_ends_with_an_error_when_no_rank_is_left(strategy: str) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8)))
    sampler = lod.RankSampler(model, strategy=strategy)
    drop_ranks(model[0], 0)
    lod.shrink(model, threshold=1e-7)
    with pytest.raises(TrainingError, match="no rank is left"):
        sampler.sample()


@pytest.mark.parametrize("strategy", ["pairs", "iid", "layer_uniform", "independent"])
def test_nothing_is_rebuilt_after_a_shrink(strategy: str) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    sampler = lod.RankSampler(model, strategy=strategy)
    sampler.sample()
    drop_ranks(model[0], 2)
    lod.shrink(model, threshold=1e-7)
    for _ in range(40):
        drawn = sampler.sample()
        assert drawn.get("0", 1) in (1, 2)
        with lod.at_ranks(model, drawn):
            model(torch.randn(1, 8))


def test_pending_samples_take_two_numbers_per_pair() -> None:
    model = lod.decompose(nn.Sequential(*[nn.Linear(16, 16) for _ in range(20)]))
    sampler = lod.RankSampler(model)
    sampler.sample()
    assert sampler.state_dict()["pending"].numel() == 2 * (20 * 16 - 1)
