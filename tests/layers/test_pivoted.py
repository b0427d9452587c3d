"""The pivoted form: rows that are kept, bounded coefficients, rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.layers.pivoted import LARGEST_COEFFICIENT, PivotedForm, pivoted_matrices
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Costs, better_forms

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=DOUBLE)


def restored(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices that a pivoted form stands for, and its coefficients."""
    kept, coefficients, rows = pivoted_matrices(left, right)
    both = torch.cat([kept, coefficients @ kept], 1)
    return both.gather(1, rows.argsort(1)[:, :, None].expand(-1, -1, both.shape[2])), coefficients


def with_equal_rows(m: int, r: int) -> Tensor:
    return draw(m, r)[torch.arange(m) % max(1, r // 3)]


LEFT: dict[str, Callable[[int, int], Tensor]] = {
    "random": lambda m, r: draw(m, r),
    "ill-conditioned": lambda m, r: draw(m, r) * torch.logspace(0, -14, r, dtype=DOUBLE),
    "of lower rank": lambda m, r: draw(m, max(1, r // 2)) @ draw(max(1, r // 2), r, seed=1),
    "with equal rows": with_equal_rows,
    "with rows of zeros": lambda m, r: draw(m, r) * (torch.arange(m) % 3 == 0)[:, None],
    "with rows of all sizes": lambda m, r: draw(m, r) * torch.logspace(6, -6, m)[:, None],
    "zero": lambda m, r: torch.zeros(m, r, dtype=DOUBLE),
    "triangular": lambda m, r: torch.ones(m, r, dtype=DOUBLE).tril() - 2 * torch.eye(m, r),
    # partial pivoting alone has coefficients of 2^(r - 1) here
    "that makes pivots grow": lambda m, r: (
        torch.eye(m, r, dtype=DOUBLE) - torch.ones(m, r, dtype=DOUBLE).tril(-1)
    ),
}


@pytest.mark.parametrize("shape", [(40, 25, 13), (40, 40, 39), (7, 30, 1), (30, 12, 12)])
@pytest.mark.parametrize("kind", LEFT)
def test_coefficients_are_bounded_and_products_equal(
    kind: str, shape: tuple[int, int, int]
) -> None:
    m, n, r = shape
    left, right = LEFT[kind](m, r).double()[None], draw(1, r, n, seed=2)
    matrices, coefficients = restored(left, right)
    assert coefficients.numel() == 0 or coefficients.abs().max() <= LARGEST_COEFFICIENT + 1e-9
    exact = left @ right
    assert (matrices - exact).abs().max() <= 1e-12 * exact.abs().max() * r


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(2, 24), n=st.integers(1, 24), groups=st.integers(1, 3), seed=st.integers(0, 999),
    small=st.floats(0, 12), data=st.data(),
)  # fmt: skip
def test_any_matrices_have_bounded_coefficients(
    m: int, n: int, groups: int, seed: int, small: float, data: st.DataObject
) -> None:
    r = data.draw(st.integers(1, min(m, n)))
    left, right = draw(groups, m, r, seed=seed), draw(groups, r, n, seed=seed + 1)
    left[:, ::2] *= 10**-small
    matrices, coefficients = restored(left, right)
    assert coefficients.numel() == 0 or coefficients.abs().max() <= LARGEST_COEFFICIENT + 1e-9
    torch.testing.assert_close(matrices, left @ right, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_large_matrices_are_pivoted() -> None:
    left, right = draw(1, 2048, 1024), draw(1, 1024, 2048, seed=1)
    matrices, coefficients = restored(left, right)
    assert coefficients.abs().max() <= LARGEST_COEFFICIENT
    torch.testing.assert_close(matrices, left @ right, rtol=0, atol=1e-8)


def test_values_that_are_not_finite_stay_so() -> None:
    layer = lod.decompose(nn.Sequential(nn.Linear(8, 6)))
    with torch.no_grad():
        low_rank_layers(layer)["0"].u[2, 1] = float("nan")
    plain = lod.extract(layer, 3, by={"0": "pivoted"})
    assert not plain(torch.ones(1, 8)).isfinite().all()


def relative_error(plain: nn.Module, exact: Tensor, x: Tensor) -> float:
    error = plain(x).double() - exact
    return float(error.norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
@torch.no_grad()
def test_half_precision_is_at_most_three_times_less_exact_than_factors(
    dtype: torch.dtype, share: float
) -> None:
    layer = nn.Sequential(nn.Linear(192, 160)).to(DOUBLE)
    layer[0].weight.copy_(draw(160, 192) @ torch.diag(torch.logspace(0, -3, 192, dtype=DOUBLE)))
    model, x = lod.decompose(layer), draw(64, 192, seed=1).to(dtype)
    exact = lod.extract(model, share)(x.double())
    errors = {
        form: relative_error(lod.extract(model.to(dtype), share, by={"0": form}), exact, x)
        for form in ("factored", "pivoted")
    }
    assert errors["pivoted"] <= 3 * errors["factored"]
    assert errors["pivoted"] <= 6 * torch.finfo(dtype).eps


def test_the_smallest_form_is_chosen_for_each_rank() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(64, 48)))
    costs = Costs(model, None)
    sizes = [costs.layer("0", rank) for rank in range(1, 49)]
    forms = [better_forms(model, {"0": rank})["0"] for rank in range(1, 49)]
    assert [*dict.fromkeys(forms)] == ["factored", "pivoted", "dense"]
    dense = costs.layer("0", 48, "dense")
    assert all(size.params <= dense.params and size.bytes <= dense.bytes for size in sizes)
    assert sizes == sorted(sizes, key=lambda size: size.bytes)
    for rank, size in enumerate(sizes, 1):
        real = lod.extract(model, rank)
        assert sum(p.numel() for p in real.parameters()) == costs.rest.params + size.params
    assert better_forms(model, {"0": 2}, "macs") == {"0": "pivoted"}


def test_forms_that_a_layer_does_not_have_are_refused() -> None:
    model = lod.decompose(nn.Sequential(nn.Bilinear(8, 8, 8), nn.Conv2d(8, 4, 3)))
    for forms in ({"0": "pivoted", "1": "dense"}, {"0": "dense", "1": "pivoted"}):
        with pytest.raises(lod.OptionError, match="asks for the pivoted form"):
            lod.extract(model, 4, by=forms)
    with pytest.raises(lod.OptionError, match="lacks a form for 1"):
        lod.extract(model, 1, by={"0": "dense"})


def test_a_shared_bias_stays_shared_and_layers_train_as_before() -> None:
    model = nn.Sequential(nn.Linear(24, 20), nn.Linear(20, 20))
    model[1].bias = model[0].bias
    model[0].weight.requires_grad_(False)
    lod.decompose(model)
    plain = lod.extract(model, 10)
    assert all(isinstance(layer, PivotedForm) for layer in plain)
    assert plain[0].second.bias is plain[1].second.bias
    assert not plain[0].first.weight.requires_grad
    assert plain[1].second.weight.requires_grad
    assert len([*plain.parameters()]) == 5


def test_a_gather_works_without_a_batch_and_under_autocast() -> None:
    conv = lod.extract(lod.decompose(nn.Sequential(nn.Conv2d(6, 16, 3))), 9)
    assert isinstance(conv[0], PivotedForm)
    x = torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(conv(x[0]), conv(x)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv(x).dtype == torch.bfloat16
    half = copy.deepcopy(conv).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert half[0].order.dtype == torch.int32


class Several(nn.Module):
    """Layers of all kinds whose pivoted forms run differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.conv = nn.Conv1d(12, 16, 3, padding=1, groups=2)
        self.transposed = nn.ConvTranspose1d(16, 8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 10, batch_first=True)
        self.linear = nn.Linear(10, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.embedding(ids).mT)
        x = self.transposed(torch.relu(x)).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.linear(self.lstm(x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("file", ["m.pt2", "m.onnx", "m.safetensors"])
def test_all_kinds_are_exported(file: str, tmp_path: Path) -> None:
    model = lod.decompose(Several(), ranks=0.6).eval()
    layers = low_rank_layers(model)
    forms = {n: "pivoted" for n, m in layers.items() if "pivoted" in m.forms(m.rank)}
    assert forms.keys() == layers.keys()
    plain, ids = lod.extract(model, by=forms), torch.randint(30, (2, 6))
    torch.testing.assert_close(plain(ids), model(ids), rtol=1e-4, atol=1e-5)
    assert lod.export(plain, tmp_path / file, example=ids).difference <= 1e-5
