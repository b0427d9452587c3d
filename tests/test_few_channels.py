"""A faster gradient is the same gradient, and is used only where it is faster."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.layers import few_channels
from maestro_lod.layers.few_channels import convolve

CONV = {1: F.conv1d, 2: F.conv2d}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None, list[int], list[int]]:
    """Inputs of a convolution in one or two dimensions over one or two channels, in float64."""
    dims, channels = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    batch, out = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kernel = [draw(st.integers(1, 5)) for _ in range(dims)]
    stride = [draw(st.integers(1, 3)) for _ in range(dims)]
    padding = [draw(st.integers(0, 2)) for _ in range(dims)]
    size = [k + draw(st.integers(0, 5)) for k in kernel]
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float64)

    bias = randn(out).requires_grad_() if draw(st.booleans()) else None
    weight = randn(out, channels, *kernel).requires_grad_()
    return randn(batch, channels, *size), weight, bias, stride, padding


@given(convolutions())
def test_it_is_torchs_convolution_and_gradient(case):
    x, weight, bias, stride, padding = case
    ours = convolve(x, weight, bias, stride, padding)
    theirs = CONV[len(stride)](x, weight, bias, stride, padding)
    assert torch.equal(ours, theirs)
    wanted = [weight] if bias is None else [weight, bias]
    direction = torch.randn_like(theirs)
    for mine, reference in zip(
        torch.autograd.grad(ours, wanted, direction),
        torch.autograd.grad(theirs, wanted, direction),
        strict=True,
    ):
        assert mine.shape == reference.shape
        torch.testing.assert_close(mine, reference)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode
def test_it_can_be_differentiated_forward_and_twice():
    x = torch.randn(3, 1, 7, 7, dtype=torch.float64)
    weight = torch.randn(4, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def squares(weight: Tensor, bias: Tensor) -> Tensor:
        return convolve(x, weight, bias, (2, 1), (1, 0)).square()

    assert torch.autograd.gradcheck(squares, (weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(squares, (weight, bias))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run as on a processor where the gradient is slow, and note where it is replaced."""
    noted: list[Any] = []
    monkeypatch.setattr(few_channels, "_HERE", True)
    monkeypatch.setattr(few_channels, "convolve", lambda *a: noted.append(a) or convolve(*a))
    return noted


def test_torch_func_sees_torchs_own_convolution(calls):
    """Inside its transforms an input does not tell that its gradient will be asked for."""
    model = lod.decompose(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh()))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(2, 1, 128, 128)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).square().sum()

    def steepness(x: Tensor) -> Tensor:
        return sum(g.square().sum() for g in grad(loss)(weights, x).values())

    inside = grad(steepness)(x)
    outside = torch.autograd.grad(steepness(x.requires_grad_()), x)[0]
    torch.testing.assert_close(inside, outside)
    assert inside.abs().sum() > 0
    vmap(model)(x.detach()[None]).sum().backward()
    assert not calls


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("shape", "conv", "used"),
    [
        ((32, 1, 28, 28), nn.Conv2d(1, 6, 5), True),
        ((32, 2, 28, 28), nn.Conv2d(2, 6, (1, 5), 2, padding=1), True),
        ((32, 1, 28, 28), nn.Conv2d(1, 6, 5, padding="same"), True),
        ((32, 1, 1000), nn.Conv1d(1, 6, 9), True),
        ((32, 3, 28, 28), nn.Conv2d(3, 6, 5), False),
        ((32, 1, 28, 28), nn.Conv2d(1, 6, 4, padding="same"), False),  # one more on one side
        ((32, 1, 28, 28), nn.Conv2d(1, 6, 5, dilation=2), False),
        ((32, 1, 28, 28), nn.Conv2d(1, 6, 14), False),
        ((1, 1, 28, 28), nn.Conv2d(1, 6, 5), False),
        ((1, 150, 150), nn.Conv2d(1, 6, 5), False),
        ((4, 1, 20, 20, 20), nn.Conv3d(1, 6, 3), False),
        ((32, 4, 28, 28), nn.Conv2d(4, 8, 5, groups=2), False),
    ],
)
def test_it_is_used_where_it_is_faster(calls, shape, conv, used):
    lod.decompose(nn.Sequential(conv))(torch.randn(shape))
    assert bool(calls) == used


def test_it_is_used_only_while_a_weight_alone_is_trained_in_float32(calls, monkeypatch):
    x, model = torch.randn(32, 1, 28, 28), lod.decompose(nn.Sequential(nn.Conv2d(1, 6, 5)))
    copy.deepcopy(model).double()(x.double())
    copy.deepcopy(model).requires_grad_(False)(x)
    model(x.clone().requires_grad_())
    with torch.no_grad():
        model(x)
    with torch.autocast("cpu"):
        model(x)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(few_channels, "_HERE", False)
        model(x)
    assert not calls
    model(x)
    assert calls


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("rank", [None, 2])
def test_layers_train_as_they_would_without_it(calls, monkeypatch, padding_mode, rank):
    x = torch.randn(32, 1, 28, 28)
    conv = nn.Conv2d(1, 6, 5, stride=2, padding=2, padding_mode=padding_mode)
    layer = lod.decompose(nn.Sequential(conv), ranks=rank)[0]
    direction = torch.randn_like(layer(x))

    def gradients() -> dict[str, Tensor]:
        layer.zero_grad()
        layer(x).backward(direction)
        return {name: p.grad.clone() for name, p in layer.named_parameters()}

    calls.clear()
    mine = gradients()
    monkeypatch.setattr(few_channels, "_HERE", False)
    reference = gradients()
    assert len(calls) == 1
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", ["compile", "trace"])
def test_graphs_hold_torchs_own_convolution(calls, way):
    model = lod.decompose(nn.Sequential(nn.Conv2d(1, 6, 5)))
    x = torch.randn(32, 1, 28, 28)
    if way == "compile":
        graph = torch.compile(model, backend="eager", fullgraph=True)
    else:
        graph = torch.jit.trace(model, x)
    traced = graph(x)
    assert not calls
    torch.testing.assert_close(traced, model(x))
