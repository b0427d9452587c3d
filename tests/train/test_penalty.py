"""The hierarchical group lasso, its gradient, its proximal map, and importance."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from maestro_lod import MaestroError, decompose, group_lasso, importance, prox_group_lasso_, shrink
from maestro_lod.layers import LowRank
from maestro_lod.train import penalty


@pytest.fixture(autouse=True, scope="module", params=[True, False], ids=["small", "large"])
def _size(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run everything as for small factors, which are squared together, and as for large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penalty, "_all_small", lambda _: request.param)
        yield


LAYERS = {
    "linear": lambda: nn.Linear(5, 7),
    "wide linear": lambda: nn.Linear(9, 3, bias=False),
    "conv1d": lambda: nn.Conv1d(3, 5, 3),
    "conv2d": lambda: nn.Conv2d(2, 6, 3, stride=2),
    "grouped conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "transposed conv1d": lambda: nn.ConvTranspose1d(4, 3, 3),
    "grouped transposed conv2d": lambda: nn.ConvTranspose2d(6, 4, 2, groups=2),
}


def low_rank_model(*kinds: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A bag of low-rank layers with factors that are random, not a product of an SVD."""
    torch.manual_seed(seed)
    model = decompose(nn.ModuleList([LAYERS[kind]() for kind in kinds or LAYERS]).to(dtype))
    with torch.no_grad():
        for factor in factors(model):
            factor.normal_()
    return model


def layers(model: nn.Module) -> list[LowRank]:
    return [m for m in model.modules() if isinstance(m, LowRank)]


def factors(model: nn.Module) -> list[Tensor]:
    return [f for layer in layers(model) for f in (layer.u, layer.v)]


def tails(layer: LowRank) -> list[tuple[Tensor, Tensor]]:
    """The parts U_b: and V_b: of a layer for b = 1 … rank, by plain slicing."""
    return [(layer.u[:, b:], layer.v[b:]) for b in range(layer.rank)]


def naive_group_lasso(model: nn.Module) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for layer in layers(model):
        for u_tail, v_tail in tails(layer):
            total = total + u_tail.pow(2).sum().sqrt() + v_tail.pow(2).sum().sqrt()
    return total


def zero_tail(layer: LowRank, keep: int) -> None:
    with torch.no_grad():
        layer.u[:, keep:] = 0
        layer.v[keep:] = 0


def as_rows(factor: Tensor, rank_dim: int) -> Tensor:
    """A factor as a (rank, everything else) matrix."""
    return factor.detach().movedim(rank_dim, 0).flatten(1)


def prox_by_dual_iteration(rows: Tensor, step: float) -> Tensor:
    """Minimize ½‖x - w‖² + step · Σ_b ‖x_b:‖ without using that the groups are nested.

    The dual has one variable per group, in a ball of radius `step`; each is projected in turn,
    from the first group to the last, until nothing moves.
    """
    duals = [torch.zeros_like(rows) for _ in rows]
    x = rows.clone()
    for _ in range(3000):
        before = x.clone()
        for b, dual in enumerate(duals):
            x += dual
            dual[b:] = x[b:] * min(1.0, step / max(x[b:].norm().item(), 1e-300))
            x -= dual
        if torch.equal(x, before) or (x - before).abs().max() < 1e-12:
            break
    return x


kinds = st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=3)
seeds = st.integers(0, 2**16)


# -- the value ---------------------------------------------------------------------------------


@settings(max_examples=30)
@given(kinds=kinds, seed=seeds)
def test_group_lasso_equals_the_naive_loop(kinds, seed):
    model = low_rank_model(*kinds, seed=seed)
    torch.testing.assert_close(group_lasso(model), naive_group_lasso(model))


def test_group_lasso_is_a_scalar_with_a_gradient():
    penalty = group_lasso(low_rank_model())
    assert penalty.shape == ()
    assert penalty.requires_grad


def test_group_lasso_sums_to_the_current_rank_only():
    model = low_rank_model("linear", "conv2d")
    for layer in layers(model):
        zero_tail(layer, 2)
    before = group_lasso(model).detach()
    shrink(model, threshold=0.0)
    assert {layer.rank for layer in layers(model)} == {2}
    torch.testing.assert_close(group_lasso(model).detach(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    model = low_rank_model(dtype=dtype)
    with torch.no_grad():
        for factor in factors(model):
            factor.mul_(100)  # squares of these overflow float16
    penalty = group_lasso(model)
    assert penalty.dtype == torch.float32
    exact = naive_group_lasso(copy.deepcopy(model).double())
    torch.testing.assert_close(penalty.detach().double(), exact.detach(), rtol=1e-6, atol=0)
    assert all(value.dtype == torch.float32 for value in importance(model).values())
    penalty.backward()
    assert all(f.grad.dtype == dtype and f.grad.isfinite().all() for f in factors(model))


def test_autocast_does_not_lower_the_precision():
    model = low_rank_model(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = group_lasso(model)
    assert torch.equal(inside, group_lasso(model))


def test_layers_of_different_precision_go_together():
    model = low_rank_model("linear", "conv2d", dtype=torch.float32)
    model[1].double()
    penalty = group_lasso(model)
    assert penalty.dtype == torch.float64
    penalty.backward()
    assert [f.grad.dtype for f in factors(model)] == [torch.float32] * 2 + [torch.float64] * 2


def test_a_model_without_low_rank_layers_is_refused():
    for function in (group_lasso, importance, lambda m: prox_group_lasso_(m, 0.1)):
        with pytest.raises(MaestroError, match="decompose"):
            function(nn.Linear(3, 3))


# -- the gradient ------------------------------------------------------------------------------


@settings(max_examples=30)
@given(kinds=kinds, seed=seeds, scale=st.floats(-3, 3))
def test_gradient_equals_autograd_of_the_naive_loop(kinds, seed, scale):
    model = low_rank_model(*kinds, seed=seed)
    given_by_us = torch.autograd.grad(scale * group_lasso(model), factors(model))
    expected = torch.autograd.grad(scale * naive_group_lasso(model), factors(model))
    for ours, naive in zip(given_by_us, expected, strict=True):
        torch.testing.assert_close(ours, naive)


@pytest.mark.parametrize("kind", ["linear", "grouped conv2d", "transposed conv1d"])
def test_gradcheck(kind):
    model = low_rank_model(kind)
    assert torch.autograd.gradcheck(lambda *_: group_lasso(model), tuple(factors(model)))
    assert torch.autograd.gradgradcheck(lambda *_: group_lasso(model), tuple(factors(model)))


def test_a_second_derivative_is_finite_where_tails_are_zero():
    model = low_rank_model("linear", "conv2d")
    for layer in layers(model):
        zero_tail(layer, 2)
    first = torch.autograd.grad(group_lasso(model), factors(model), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), factors(model))
    assert all(g.isfinite().all() for g in second)
    assert any(g.any() for g in second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_zero_tails_give_zero_gradients(keep, dtype):
    model = low_rank_model(dtype=dtype)
    for layer in layers(model):
        zero_tail(layer, keep)
    group_lasso(model).backward()
    for layer in layers(model):
        assert layer.u.grad[:, keep:].count_nonzero() == 0
        assert layer.v.grad[keep:].count_nonzero() == 0
        assert layer.u.grad[:, :keep].isfinite().all()
        assert layer.v.grad[:keep].isfinite().all()
        assert layer.u.grad[:, :keep].count_nonzero() == layer.u[:, :keep].numel()


def test_a_tail_next_to_underflow_gives_finite_gradients():
    model = low_rank_model("linear", dtype=torch.float32)
    with torch.no_grad():
        for factor in factors(model):
            factor.mul_(1e-30)
    group_lasso(model).backward()
    assert all(f.grad.isfinite().all() for f in factors(model))


def test_layers_of_rank_zero_add_nothing():
    model = low_rank_model("linear", "conv2d")
    zero_tail(layers(model)[0], 0)
    shrink(model, threshold=0.0)
    empty, full = layers(model)
    assert empty.rank == 0
    penalty = group_lasso(model)
    torch.testing.assert_close(penalty, naive_group_lasso(nn.ModuleList([full])))
    penalty.backward()
    assert empty.u.grad is None or empty.u.grad.numel() == 0
    prox_group_lasso_(model, 0.1)
    assert importance(model)["0"].shape == (0,)
    lone = nn.ModuleList([empty])
    assert group_lasso(lone).item() == 0.0


def test_frozen_factors_count_but_get_no_gradient():
    model = low_rank_model("linear", "conv2d")
    frozen, free = layers(model)
    frozen.requires_grad_(False)
    free.v.requires_grad_(False)
    penalty = group_lasso(model)
    torch.testing.assert_close(penalty, naive_group_lasso(model))
    penalty.backward()
    assert frozen.u.grad is None and frozen.v.grad is None and free.v.grad is None
    expected = torch.autograd.grad(naive_group_lasso(model), free.u)[0]
    torch.testing.assert_close(free.u.grad, expected)


def test_gradients_accumulate_with_those_of_the_loss():
    model = low_rank_model("linear")
    (layer,) = layers(model)
    x = torch.randn(4, 5, dtype=torch.float64)
    (model[0](x).square().mean() + 0.1 * group_lasso(model)).backward()
    together = layer.u.grad.clone()
    alone = torch.autograd.grad(model[0](x).square().mean(), layer.u)[0]
    penalty = torch.autograd.grad(0.1 * group_lasso(model), layer.u)[0]
    torch.testing.assert_close(together, alone + penalty)


# -- importance --------------------------------------------------------------------------------


def test_importance_of_large_factors_is_finite_and_shrinks_nothing():
    model = decompose(nn.Linear(6, 6, bias=False))
    with torch.no_grad():
        model.u.fill_(1e19)
        model.v.fill_(1e19)
    expected = torch.arange(6, 0, -1).double() * 6 * 1e38
    torch.testing.assert_close(importance(model)[""], expected, rtol=1e-6, atol=0.0)
    assert shrink(model, threshold=1e-7) == {}


@settings(max_examples=30)
@given(kinds=kinds, seed=seeds)
def test_importance_is_the_tail_product(kinds, seed):
    model = low_rank_model(*kinds, seed=seed)
    for layer, value in zip(layers(model), importance(model).values(), strict=True):
        expected = [(u.norm() * v.norm()).item() for u, v in tails(layer)]
        assert not value.requires_grad
        torch.testing.assert_close(value.tolist(), expected)


@settings(max_examples=30)
@given(kinds=kinds, seed=seeds, exponent=st.floats(-18, 15))
def test_importance_never_increases(kinds, seed, exponent):
    model = low_rank_model(*kinds, seed=seed, dtype=torch.float32)
    with torch.no_grad():
        for factor in factors(model):
            factor.mul_(10.0**exponent)
    for value in importance(model).values():
        assert (value.diff() <= 0).all()


def test_importance_of_a_zero_tail_is_zero():
    model = low_rank_model("linear")
    zero_tail(layers(model)[0], 3)
    (value,) = importance(model).values()
    assert [v > 0 for v in value.tolist()] == [True, True, True, False, False]


# -- the proximal map --------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.1, 0.7, 1.4])
@pytest.mark.parametrize("kind", LAYERS)
def test_prox_equals_a_brute_force_minimizer(kind, step):
    model = low_rank_model(kind)
    (layer,) = layers(model)
    pairs = ((layer.u, 1), (layer.v, 0))
    expected = [prox_by_dual_iteration(as_rows(f, dim), step) for f, dim in pairs]
    prox_group_lasso_(model, step)
    for (factor, dim), rows in zip(pairs, expected, strict=True):
        torch.testing.assert_close(as_rows(factor, dim), rows, rtol=0, atol=1e-6)


@settings(max_examples=20)
@given(kind=st.sampled_from(list(LAYERS)), seed=seeds, step=st.floats(0.01, 3))
def test_no_nearby_point_has_a_smaller_objective_than_prox(kind, seed, step):
    before = low_rank_model(kind, seed=seed)
    after = copy.deepcopy(before)
    prox_group_lasso_(after, step)

    def objective(model):
        moved = sum(
            (f - g).square().sum() for f, g in zip(factors(model), factors(before), strict=True)
        )
        return (0.5 * moved + step * naive_group_lasso(model)).item()

    best = objective(after)
    for size in (1e-3, 1e-1):
        other = copy.deepcopy(after)
        with torch.no_grad():
            for factor in factors(other):
                factor.add_(torch.randn_like(factor), alpha=size)
        assert objective(other) > best


@settings(max_examples=30)
@given(
    kinds=kinds,
    seed=seeds,
    step=st.floats(0.5, 10),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_prox_leaves_zeros_in_a_suffix_of_the_ranks(kinds, seed, step, dtype):
    model = low_rank_model(*kinds, seed=seed, dtype=dtype)
    prox_group_lasso_(model, step)
    for layer in layers(model):
        for factor, dim in ((layer.u, 1), (layer.v, 0)):
            alive = as_rows(factor, dim).count_nonzero(dim=1).ne(0).tolist()
            assert alive == sorted(alive, reverse=True)


def test_prox_gives_exact_zeros_at_the_end_first():
    model = low_rank_model("linear")
    (layer,) = layers(model)
    counts = []
    for _ in range(200):
        prox_group_lasso_(model, 0.02)
        counts.append(int(as_rows(layer.u, 1).count_nonzero(dim=1).ne(0).sum()))
    assert counts == sorted(counts, reverse=True)
    assert set(counts) >= {0, 1, 2, 3, 4, 5}


def test_prox_with_step_zero_changes_nothing():
    model = low_rank_model()
    before = [f.detach().clone() for f in factors(model)]
    prox_group_lasso_(model, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, factors(model), strict=True))


def test_prox_with_a_huge_step_leaves_nothing():
    model = low_rank_model()
    prox_group_lasso_(model, 1e6)
    assert all(f.count_nonzero() == 0 for f in factors(model))


def test_prox_of_zeros_is_zero():
    model = low_rank_model()
    for layer in layers(model):
        zero_tail(layer, 0)
    prox_group_lasso_(model, 0.1)
    assert all(torch.equal(f, torch.zeros_like(f)) for f in factors(model))


def test_prox_keeps_frozen_factors_and_the_identity_of_parameters():
    model = low_rank_model("linear", "conv2d")
    frozen, free = layers(model)
    frozen.requires_grad_(False)
    kept, parameter = frozen.u.detach().clone(), free.u
    prox_group_lasso_(model, 0.3)
    assert torch.equal(frozen.u, kept)
    assert free.u is parameter and free.u.requires_grad


@pytest.mark.parametrize("step", [-0.1, float("nan"), float("inf")])
def test_prox_refuses_a_step_that_makes_no_sense(step):
    model = low_rank_model("linear")
    before = [f.detach().clone() for f in factors(model)]
    with pytest.raises(MaestroError, match="step"):
        prox_group_lasso_(model, step)
    assert all(torch.equal(a, b) for a, b in zip(before, factors(model), strict=True))


def test_what_was_looked_at_in_inference_mode_can_be_differentiated_twice() -> None:
    model = decompose(nn.Sequential(nn.Linear(23, 19), nn.Linear(19, 29)))  # ranks of no other test
    with torch.inference_mode():
        importance(model)
    parameters = [p for p in model.parameters() if p.ndim > 1]
    first = torch.autograd.grad(group_lasso(model), parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    assert all(g.isfinite().all() for g in second)
