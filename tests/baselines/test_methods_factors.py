"""Methods with factors: what their papers count, and how each of them works."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.baselines.frobenius import (
    FrobeniusDecay,
    Pair,
    frobenius_gradients,
    low_rank_pairs,
)
from maestro_lod.baselines.pufferfish import PufferfishSettings
from maestro_lod.baselines.spectral import FactorPair, SpectralSettings, factorized
from maestro_lod.baselines.stages import epochs_of, exchange
from maestro_lod.baselines.svd import SVDSettings
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.registry import MODELS
from maestro_lod.layers import LowRankConv, LowRankConvTranspose
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import count_params, summary
from maestro_lod.model.structure import restructure, uninitialized
from maestro_lod.model.survey import Plan
from maestro_lod.train.fit import fit
from maestro_lod.train.lod_settings import Decomposition
from maestro_lod.train.method import RunPlan
from paper.counts import spectral, vgg19_wide
from tests.support.made import made

IMAGE = torch.empty(1, 3, 32, 32)


# -- counts of the papers --------------------------------------------------------------------------


def tied_transformer() -> nn.Module:
    return MODELS["transformer"](tie_output=True)


def vgg_skip() -> list[str]:
    names = [n for n, m in vgg19_wide().named_modules() if isinstance(m, nn.Conv2d)]
    return [*names[:9], "fc.4"]


@pytest.mark.parametrize(
    ("build", "skip", "layers", "params"),
    [
        # its ResNet-18 has no norm behind the stem, ours two times 64 numbers
        (MODELS["resnet18"], ["stem", "layer1.0", "*.shortcut", "fc"], 14, 3_336_138 + 2 * 64),
        (vgg19_wide, vgg_skip(), 9, 8_370_634),
        (
            lambda: MODELS["transformer"](tie_output=True),
            ["encoder.0", "decoder.0"],
            80,
            26_696_192,
        ),
    ],
    ids=["ResNet-18", "VGG-19", "Transformer"],
)
def test_pufferfish_has_the_parameters_of_its_paper(
    build: Any, skip: list[str], layers: int, params: int
) -> None:
    with torch.device("meta"):
        model = build()
        settings = PufferfishSettings(decompose=Decomposition(skip=skip), keep_ends=False)
        ranks = settings.ranks(model, None)
        full = Plan(model, **settings.choice(model)).planned()
        plan = Plan(model, **settings.choice(model) | {"ranks": ranks})
        restructure(model, plan.structure(), fill=uninitialized)
    assert ranks == {name: rank // 4 for name, rank in full.items()} and len(ranks) == layers
    assert count_params(model) == params


def test_spectral_vgg_has_what_the_arithmetic_of_its_paper_gives() -> None:
    with torch.device("meta"):
        model = MODELS["vgg19"]()
        budget = 0.02 * count_params(model)
        ranks = SpectralSettings(size=0.02).ranks(model)
        expected: Any = spectral(budget)
    assert len(ranks) == 15  # every convolution but the first, and not the classifier
    assert ranks == {name: expected.get_submodule(name)[0].out_channels for name in ranks}
    assert round(count_params(expected), -5) == 400_000  # "about 0.4 M"


@pytest.mark.parametrize("measure", ["params", "macs"])
@pytest.mark.parametrize("size", [0.1, 0.25, 0.6])
def test_pufferfish_is_as_large_as_a_size_allows(measure: Any, size: float) -> None:
    model = MODELS["resnet18_small"]()
    settings = PufferfishSettings(size=size, size_in=measure)
    ranks = settings.ranks(model, IMAGE)
    dense = summary(model, IMAGE)

    def share(ranks: dict[str, int]) -> float:
        low = lod.decompose(copy.deepcopy(model), only=list(ranks), ranks=ranks)
        found = summary(low, IMAGE)
        return (
            found.fused_params / dense.params if measure == "params" else
            found.fused_macs / dense.macs
        )  # fmt: skip

    full = {name: row.full_rank for name, row in Plan(
        model, only=None, skip=None, ranks=None, tied="keep").rows.items()}  # fmt: skip
    assert share(ranks) <= size
    assert share({name: min(r + 1, full[name]) for name, r in ranks.items()}) > size


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "epochs", "expected"),
    [(0.0, 10, 0), (0.25, 20, 5), (0.01, 20, 1), (0.99, 20, 19), (0.5, 1, 1), (0.5, 2, 1)],
)
def test_a_share_of_a_run(share: float, epochs: int, expected: int) -> None:
    assert epochs_of(share, epochs) == expected


def test_an_exchange_keeps_groups_and_order() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    flat, matrices = (
        [p for p in model.parameters() if (p.ndim < 2) == low] for low in (True, False)
    )
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": 0.1}, {"params": flat[:-1]}], 0.1, 0.9
    )
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    exchange(model, optimizer, lambda: lod.decompose(model, only="0", ranks=2))
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert [id(p) for p in decayed] == [id(p) for p in (model[0].u, model[0].v, model[2].weight)]
    assert [id(p) for p in others] == [id(p) for p in (model[0].bias, model[1].bias)]
    assert not optimizer.state and optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_bare_layer_cannot_change_while_it_trains() -> None:
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with pytest.raises(lod.MaestroError, match=r"Wrap it: nn.Sequential"):
        exchange(layer, optimizer, lambda: lod.decompose(layer, ranks=2))


def test_pufferfish_without_a_warm_up_begins_low_rank() -> None:
    model = LeNet()
    method = made(PufferfishSettings(warmup=0.0), model, torch.empty(1, 1, 28, 28))
    method.start(model, method.optimizer, RunPlan(4, 2))
    assert lod.ranks(model) == {"conv2": 4, "fc1": 30, "fc2": 21}


def test_svd_finds_what_a_search_of_the_trained_model_finds() -> None:
    """Its ranks are those that `frontier` gives, and its factors the leading directions."""
    torch.manual_seed(0)
    batches = [(torch.randn(64, 6), torch.randint(4, (64,))) for _ in range(3)]
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Linear(12, 4))
    method = made(SVDSettings(size=0.6), model, torch.randn(1, 6))
    trained: list[nn.Module] = []
    searched = method._searched
    method._searched = lambda: trained.append(copy.deepcopy(model)) or searched()
    fit(model, batches, optimizer=method.optimizer, epochs=2, method=method)
    whole = lod.decompose(trained[0])
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    found = lod.frontier(
        whole,
        lambda m: F.cross_entropy(m(x), y),
        cost="params",
        example=x[:1],
        until=0.6,
        method="look-ahead",
    )
    ranks = found.pick(max_params=0.6)
    assert lod.ranks(model) == ranks
    with lod.at_ranks(whole, ranks):
        torch.testing.assert_close(model(x), whole(x))


# -- Frobenius decay -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 5), nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, (1, 3), groups=2),
        nn.ConvTranspose2d(4, 6, 3), nn.ConvTranspose1d(4, 6, 2, groups=2),
    ],
    ids=str,
)  # fmt: skip
def test_the_gradient_of_frobenius_decay_is_that_of_autograd(layer: nn.Module) -> None:
    model = lod.decompose(nn.Sequential(layer.double()), ranks=2)
    (pair,) = low_rank_pairs(model)
    (0.5 * low_rank_layers(model)["0"].weight.square().sum()).backward()
    for ours, parameter in zip(frobenius_gradients(pair), (pair.u, pair.v), strict=True):
        torch.testing.assert_close(ours, parameter.grad)
    assert isinstance(model[0], LowRankConv | LowRankConvTranspose) or pair.groups == 1


def test_factors_are_decayed_as_a_product_and_not_each() -> None:
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.2)
    pair = Pair(model[1].weight, model[0].weight)
    decay = FrobeniusDecay(optimizer, [pair])
    assert decay.strengths == [0.2]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]
    before = [p.detach().clone() for p in pair[:2]]
    expected = [p - 0.1 * 0.2 * g for p, g in zip(before, frobenius_gradients(pair), strict=True)]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    decay.add_gradients(0.5)
    decay.add_gradients(0.5)
    optimizer.step()
    for p, wanted in zip(pair[:2], expected, strict=True):
        torch.testing.assert_close(p.detach(), wanted)
    assert FrobeniusDecay(optimizer, [pair], 0.3).strengths == [0.3]


# -- spectral initialization -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(4, 2, (3, 5), stride=(2, 3), padding=(0, 2)),
        nn.Conv2d(2, 6, 3, dilation=2, bias=False), nn.Conv2d(4, 4, 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_pair_at_full_rank_is_the_convolution(conv: nn.Conv2d) -> None:
    out, into, k1, k2 = conv.weight.shape
    model, x = nn.Sequential(conv), torch.randn(2, into, 11, 13)
    expected = conv(x)
    factorized(model, {"0": min(out * k1, into * k2)})
    assert isinstance(model[0], FactorPair) and model[0][0].kernel_size == (1, k2)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_factors_begin_balanced() -> None:
    model = nn.Sequential(nn.Linear(8, 6))
    weight = model[0].weight.detach().clone()
    factorized(model, {"0": 3})
    u, v = model[0][1].weight, model[0][0].weight
    left, values, right = torch.linalg.svd(weight)
    torch.testing.assert_close(u @ v, left[:, :3] @ values[:3].diag() @ right[:3])
    torch.testing.assert_close(u.T @ u, values[:3].diag(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(v @ v.T, values[:3].diag(), atol=1e-5, rtol=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.15, 0.9))
def test_spectral_meets_any_size(size: float) -> None:
    model = LeNet()
    dense = count_params(model)
    small = count_params(SpectralSettings(size=size).prepare(model))
    assert 0.9 * size < small / dense <= size
