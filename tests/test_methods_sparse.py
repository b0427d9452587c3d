"""Methods that leave weights out, or bits of them: IMP, Rare Gems, XNOR-Net."""

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
from maestro_lod.app.models import MODELS, LeNet
from maestro_lod.cost import Cost, count_params, summary
from maestro_lod.methods.binary import Binarized, Binary, Sign, center_and_clamp, relaxed_gradient
from maestro_lod.methods.imp import IMP, IMPSettings, kept_by_round
from maestro_lod.methods.raregems import (
    RareGems,
    RareGemsSettings,
    freezings,
    frozen_share,
    signed_constants,
)
from maestro_lod.methods.sparse import INDEX_BITS, largest_kept, prunable_weights
from maestro_lod.methods.xnor import XNORSettings
from maestro_lod.train.fit import fit
from maestro_lod.train.method import RunPlan
from maestro_lod.train.schedule import milestones
from paper.counts import vgg19_wide

IMAGE = torch.empty(1, 1, 28, 28)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def made(settings: Any, model: nn.Module, example: Any = None) -> Any:
    """The method of some settings, for a dense model."""
    example = torch.randn(1, 6) if example is None else example
    found = summary(model, example)
    dense = Cost(found.params, found.macs, 0)
    model = settings.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-3)
    return settings.make(model, optimizer, example=example, seed=3, dense=dense)


def trained(method: Any, epochs: int, watch: Any = None, **options: Any) -> list[Any]:
    """Train by a method, and tell what `watch(method)` saw at the end of each epoch."""
    torch.manual_seed(1)
    batches = [(torch.randn(32, 6), torch.randint(4, (32,))) for _ in range(4)]
    seen: list[Any] = []
    turn = method.turn

    def watched(*, last: bool) -> None:
        turn(last=last)
        if watch is not None:
            seen.append(watch(method))

    method.turn = watched
    fit(method.model, batches, optimizer=method.optimizer, epochs=epochs, method=method, **options)
    return seen


# -- masks ---------------------------------------------------------------------------------------


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


# -- IMP -----------------------------------------------------------------------------------------


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
    method: IMP = made(IMPSettings(size=0.62, prune=0.3, rewind=rewind), model)
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
    method: IMP = made(IMPSettings(size=0.5, prune=0.7, rewind=0.25), mlp())
    rates: list[float] = []
    method.optimizer.register_step_post_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    trained(method, epochs=4, schedule=milestones([2], 4))
    # two trainings of eight steps; the second begins where the first was after two
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.1] * 3 + [0.01] * 5)


def test_one_epoch_is_too_short_for_stages() -> None:
    method = made(IMPSettings(size=0.5), mlp())
    with pytest.raises(lod.MaestroError, match="give it 2 epochs or more"):
        trained(method, epochs=1)


# -- Rare Gems -----------------------------------------------------------------------------------


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
    method: RareGems = made(RareGemsSettings(**options), model)
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
    method: RareGems = made(RareGemsSettings(size=0.4, search_share=0.5), mlp())

    def weights(method: RareGems) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in method.weights.items()}

    begun = trained(method, epochs=2, watch=weights)[0]
    for name, weight in begun.items():
        assert torch.equal(weight, method.initial[name] * method.masks[name])
    final = sum(int(p.count_nonzero()) for p in method.weights.values())
    assert final == method.target


def test_a_weight_counts_where_its_score_is_above_a_half() -> None:
    method: RareGems = made(RareGemsSettings(size=0.5), mlp())
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
    method: RareGems = made(RareGemsSettings(size=0.4, search_share=0.75), mlp())
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


# -- XNOR-Net ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 3, 2)])
def test_the_gradient_of_binary_weights_is_that_of_their_relaxed_form(shape: Any) -> None:
    """By finite differences of α(w)·s(w), where s is the sign with slope 1 inside [−1, 1]."""
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64) * 0.8
    gradient = torch.randn(shape, dtype=torch.float64)
    assert bool((weight.abs() > 1).any()) and bool((weight.abs() < 1).any())
    others = [*range(1, len(shape))]

    def relaxed(w: Tensor) -> float:
        signs = weight.sign() + w.clamp(-1, 1) - weight.clamp(-1, 1)
        return float((gradient * w.abs().mean(others, keepdim=True) * signs).sum())

    expected, step = torch.empty_like(weight), 1e-6
    for i in range(weight.numel()):
        apart = torch.zeros_like(weight).view(-1)
        apart[i] = step
        change = relaxed(weight + apart.view(shape)) - relaxed(weight - apart.view(shape))
        expected.view(-1)[i] = change / (2 * step)
    torch.testing.assert_close(relaxed_gradient(weight, gradient), expected, rtol=1e-6, atol=1e-8)
    free = weight.clone().requires_grad_()
    (Binarized.apply(free) * gradient).sum().backward()
    scale = weight[0].numel() * (1 - 1 / shape[1])
    torch.testing.assert_close(free.grad, expected * scale, rtol=1e-6, atol=1e-8)


def test_signs_are_never_zero_and_pass_gradients_inside_one() -> None:
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], requires_grad=True)
    y = Sign.apply(x)
    y.sum().backward()
    assert y.tolist() == [-1, -1, 1, 1, 1] and x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


def test_weights_stay_centred_and_within_one() -> None:
    weight = torch.randn(4, 3, 2, 2) * 2
    expected = (weight - weight.mean(1, keepdim=True)).clamp(-1, 1)
    center_and_clamp(weight)
    assert torch.equal(weight, expected)
    method = made(XNORSettings(), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)))
    (layer,) = method.layers.values()
    trained(method, epochs=2)
    again = layer.weight.detach().clone()
    center_and_clamp(again)
    torch.testing.assert_close(layer.weight.detach(), again, atol=1e-6, rtol=0)


@pytest.mark.parametrize("input_scale", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_a_binary_layer_is_norm_sign_and_binary_product(linear: bool, input_scale: bool) -> None:
    torch.manual_seed(0)
    if linear:
        dense: Any = nn.Linear(6, 5)
        x = torch.randn(4, 3, 6)
    else:
        dense = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
        x = torch.randn(2, 4, 7, 7)
    layer = Binary(dense, input_scale=input_scale)
    y = layer(x)
    channel = x.ndim - 1 if linear else 1
    axes = [i for i in range(x.ndim) if i != channel]
    mean, variance = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
    normed = (x - mean) / (variance + 1e-4).sqrt()
    rows = layer.weight.flatten(1).abs().mean(1)
    sign = layer.weight.sign()
    if linear:
        expected = normed.sign() @ sign.T * rows
        expected = expected * normed.abs().mean(-1, keepdim=True) if input_scale else expected
        expected = expected + layer.bias
    else:
        expected = F.conv2d(normed.sign(), sign, None, 2, 1, 1, 2) * rows[:, None, None]
        if input_scale:
            expected = expected * F.avg_pool2d(normed.abs().mean(1, keepdim=True), 3, 2, 1)
        expected = expected + layer.bias[:, None, None]
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "bits_of"),
    [(MODELS["resnet18"], "ResNet-18"), (vgg19_wide, "VGG-19")],
    ids=["ResNet-18", "VGG-19"],
)
def test_xnor_counts_its_bits(build: Any, bits_of: str) -> None:
    """One for each binary weight, 32 for anything else: a scale per row, and the norms before."""
    model = build()
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)][1:-1]
    binary = sum(m.weight.numel() for m in layers)
    rows, inputs = (sum(m.weight.shape[i] for m in layers) for i in (0, 1))
    dense = count_params(model)
    record = made(XNORSettings(), model, torch.empty(1, 3, 32, 32)).record()
    assert record.params == dense + rows + 2 * inputs
    assert record.bits == binary + 32 * (dense - binary + rows + 2 * inputs)
    assert record.relative_bits == record.bits / (32 * dense)
    # the papers divide all parameters by 32
    assert 1 / 32 < record.relative_bits < 1.6 / 32
    assert round(dense / 32 / 1e6, 3) == {"ResNet-18": 0.349, "VGG-19": 0.643}[bits_of]


def test_xnor_leaves_first_and_last_and_what_it_is_told() -> None:
    model = XNORSettings(real=["fc1"]).prepare(LeNet())
    kinds = {name: type(module) for name, module in model.named_children()}
    assert [name for name, kind in kinds.items() if kind is Binary] == ["conv2", "fc2"]
    depthwise = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)
    )
    made_binary = XNORSettings().prepare(depthwise)
    assert [type(m) for m in made_binary] == [nn.Conv2d, nn.Conv2d, Binary, nn.Conv2d]


def test_a_binary_model_is_exported(tmp_path: Any) -> None:
    model = XNORSettings().prepare(LeNet()).eval()
    x = torch.randn(2, 1, 28, 28)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
