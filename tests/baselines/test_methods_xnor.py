"""XNOR-Net: binary layers, their gradient, their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.baselines.binary import Binarized, Binary, Sign, center_and_clamp, relaxed_gradient
from maestro_lod.baselines.xnor import XNORSettings
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.registry import MODELS
from maestro_lod.model.cost import count_params
from maestro_lod.train.fit import fit
from paper.counts import vgg19_wide
from tests.support.made import made


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
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    method = made(XNORSettings(), model, torch.empty(1, 6))
    (layer,) = method.layers.values()
    batches = [(torch.randn(32, 6), torch.randint(4, (32,))) for _ in range(4)]
    fit(model, batches, optimizer=method.optimizer, epochs=2, method=method)
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
