"""Products by oneDNN are those of torch, gradients included; and when torch does them itself."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import maestro_lod as lod
from maestro_lod.layers import products

has_onednn = torch.backends.mkldnn.is_available()
pytestmark = pytest.mark.skipif(not has_onednn, reason="torch was built without oneDNN")


@pytest.fixture(autouse=True, scope="module")
def _everywhere() -> Iterator[None]:
    """Take the other library whatever the processor and however small the product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_faster_here", lambda: True)
        patch.setattr(products, "_FEWEST_MACS", 0)
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Note the products that oneDNN does."""
    done: list[tuple[int, ...]] = []
    given_to: Callable[..., Tensor] = products._by_onednn

    def noted(x: Tensor, *others: Any) -> Tensor:
        done.append(tuple(x.shape))
        return given_to(x, *others)

    monkeypatch.setattr(products, "_by_onednn", noted)
    return done


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def laid_out(shape: tuple[int, int], layout: str) -> Tensor:
    m, n = shape
    return {
        "rows": lambda: torch.randn(m, n),
        "columns": lambda: torch.randn(n, m).mT,
        "first columns": lambda: torch.randn(m, n + 3)[:, :n],
        "repeated": lambda: torch.randn(1, 1).expand(m, n),
    }[layout]()


LAYOUTS = st.sampled_from(["rows", "columns", "first columns", "repeated"])
SIZES = st.integers(1, 40)


@given(SIZES, SIZES, SIZES, LAYOUTS, LAYOUTS, LAYOUTS, st.booleans(), st.integers(0, 99))
def test_values_and_gradients_are_those_of_torch(
    m: int, k: int, n: int, left: str, right: str, outer: str, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, w, g = laid_out((m, k), left), laid_out((n, k), right), laid_out((m, n), outer)
    b = torch.randn(n) if bias else None
    inputs = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    ours = products.linear(inputs[0], inputs[1], inputs[2] if bias else None)
    theirs = F.linear(inputs[0], inputs[1], inputs[2] if bias else None)
    assert close(ours, theirs)
    wanted = torch.autograd.grad(theirs, inputs, g)
    assert all(map(close, torch.autograd.grad(ours, inputs, g), wanted))
    product = products.multiply(inputs[0], inputs[1].mT)
    assert close(product, x @ w.mT)
    assert all(map(close, torch.autograd.grad(product, inputs[:2], g), wanted))


def test_several_dimensions_and_no_gradients(calls: list[tuple[int, ...]]) -> None:
    x, w = torch.randn(2, 3, 5), torch.randn(4, 5)
    assert close(products.linear(x, w, None), F.linear(x, w))
    with torch.inference_mode():
        assert close(products.linear(x, w, None), F.linear(x, w))
    assert calls == [(6, 5), (6, 5)]


def test_second_derivatives() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)

    def curvature(apply: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (of_x,) = torch.autograd.grad(apply(x, w, None).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(of_x.square().sum(), (x, w))

    for ours, theirs in zip(curvature(products.linear), curvature(F.linear), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's
def test_forward_mode() -> None:
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in (x, w, b)]
        ours = torch.autograd.forward_ad.unpack_dual(products.linear(*dual))
        theirs = torch.autograd.forward_ad.unpack_dual(F.linear(*dual))
    assert close(ours.primal, theirs.primal) and close(ours.tangent, theirs.tangent)


def counted(x: Tensor, w: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as flops:
        product = products.linear(x, w, None)
    assert flops.get_total_flops() == 2 * x.numel() * len(w)
    return product


def narrowed(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        product = products.linear(x, w, None)
    assert product.dtype == torch.bfloat16
    return product.float()


@pytest.mark.parametrize(
    "apply",
    [
        counted,
        narrowed,
        lambda x, w: products.linear(x.double(), w.double(), None).float(),
        lambda x, w: torch.func.vmap(lambda row: products.linear(row[None], w, None)[0])(x),
        lambda x, w: torch.compile(products.linear, backend="eager")(x, w, None),
        lambda x, w: torch.stack([products.linear(row, w, None) for row in x]),  # of one dimension
    ],
    ids=["counted", "autocast", "double", "vmap", "compiled", "vector"],
)
def test_torch_does_all_that_is_not_usual(apply: Any, calls: list[tuple[int, ...]]) -> None:
    x, w = torch.randn(6, 8), torch.randn(7, 8)
    torch.testing.assert_close(apply(x, w), F.linear(x, w), rtol=2e-2, atol=2e-2)
    assert calls == []


def test_layers_use_it_and_train_as_before(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = lod.decompose(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 10)))
    x = torch.randn(5, 3, 6, 6)
    model(x).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    assert calls
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_faster_here", lambda: False)
        model(x).square().sum().backward()
    for mine, p in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-4)


def test_the_same_training_gives_the_same_bits(calls: list[tuple[int, ...]]) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = lod.decompose(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        train, x = lod.LoD(model, optimizer, penalty=1e-3), torch.randn(16, 24)
        for _ in range(12):  # at ranks that are sampled
            train.backward(lambda: model(x), lambda output: output.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert all(map(torch.equal, trained(), trained()))
    assert calls


def test_small_products_stay_with_torch(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_FEWEST_MACS", 1 << 22)
    products.multiply(torch.randn(127, 129), torch.randn(129, 256))
    assert calls == []
    products.multiply(torch.randn(128, 128), torch.randn(128, 256))
    assert calls == [(128, 128)]
