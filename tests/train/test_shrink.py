"""Shrinking: really smaller parameters and optimizer state, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from maestro_lod import (
    LoD,
    MaestroError,
    at_ranks,
    decompose,
    importance,
    load,
    ranks,
    save,
    shrink,
)
from maestro_lod.errors import TrainingError
from maestro_lod.layers import LowRank
from maestro_lod.sizes.rank_order import order_ranks

KEEP = {"0": 2, "3": 4, "5": 1}

# Every parameter of these has its own update rule per element, so zeros stay out of the way.
ELEMENTWISE = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: optim.Adadelta(p),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
}
# These mix the elements of a parameter, and their steps depend on its shape.
MIXING = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
}


def low_rank_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A convolution and two linear layers, ranks 5, 6 and 3."""
    torch.manual_seed(0)
    return decompose(
        nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 6), nn.Tanh(),
            nn.Linear(6, 3),
        ).to(dtype)
    )  # fmt: skip


def linear_model() -> nn.Module:
    """Two linear layers without bias: nothing but matrices."""
    torch.manual_seed(0)
    return decompose(
        nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))
    )


def layers(model: nn.Module) -> dict[str, LowRank]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRank)}


def factors(model: nn.Module) -> list[tuple[str, nn.Parameter, int]]:
    """Every factor with its name and the dimension of its ranks."""
    return [
        (f"{name}.{key}", getattr(layer, key), dim)
        for name, layer in layers(model).items()
        for key, dim in (("u", 1), ("v", 0))
    ]


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(8, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=generator)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    """Steps in which the second layer runs at a rank that every version of it has."""
    for i in steps:
        x, y = batch(i)
        optimizer.zero_grad()
        with at_ranks(model, {"3": 1 + i % 4}):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def train_linear(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()


@torch.no_grad()
def zero_tails(
    model: nn.Module, optimizer: optim.Optimizer | None = None, keep: dict[str, int] = KEEP
) -> None:
    """Make the ranks beyond `keep` zero, in the factors, gradients and optimizer state."""
    for name, factor, dim in factors(model):
        tensors = [factor, *([] if factor.grad is None else [factor.grad])]
        if optimizer is not None:
            state = optimizer.state.get(factor, {}).values()
            tensors += [t for t in state if isinstance(t, Tensor) and t.shape == factor.shape]
        rank = keep[name.rpartition(".")[0]]
        for tensor in tensors:
            tensor.narrow(dim, rank, tensor.shape[dim] - rank).zero_()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- what shrink does to the model -------------------------------------------------------------


def test_parameters_and_gradients_become_physically_smaller():
    model = low_rank_model()
    train(model, optim.SGD(model.parameters(), lr=0.01), range(1))
    zero_tails(model)
    kept = {}
    for name, f, dim in factors(model):
        rank = KEEP[name[0]]
        kept[name] = f.detach().narrow(dim, 0, rank).clone(), f.grad.narrow(dim, 0, rank).clone()
    count = sum(p.numel() for p in model.parameters())
    lost = shrink(model, threshold=1e-9)
    assert lost == {"0": 3, "3": 2, "5": 2}
    assert ranks(model) == KEEP
    assert sum(p.numel() for p in model.parameters()) < count
    for name, factor, dim in factors(model):
        value, grad = kept[name]
        assert type(factor) is nn.Parameter and factor.requires_grad
        assert factor.shape[dim] == KEEP[name[0]]
        assert torch.equal(factor, value) and torch.equal(factor.grad, grad)
        assert factor.untyped_storage().nbytes() == factor.numel() * factor.element_size()
        assert factor.grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()


def test_nothing_to_remove_changes_nothing(snapshot):
    model = low_rank_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = snapshot(model)
    assert shrink(model, optimizer, threshold=0.0) == {}
    before.assert_unchanged(model)


def test_a_rank_is_kept_iff_its_importance_is_above_the_threshold():
    for index in range(6):
        model = low_rank_model()
        values = importance(model)
        threshold = values["3"][index].item()
        shrink(model, threshold=threshold)
        expected = {n: sum(v > threshold for v in value.tolist()) for n, value in values.items()}
        assert ranks(model) == expected
        assert ranks(model)["3"] == index  # the rank at the threshold itself is removed


def test_a_threshold_above_everything_leaves_bias_only_layers():
    model = low_rank_model()
    shrink(model, threshold=1e9)
    assert ranks(model) == {"0": 0, "3": 0, "5": 0}
    x, _ = batch(0)
    torch.testing.assert_close(model(x), model[5].bias.expand(8, 3))


@pytest.mark.parametrize("min_rank, expected", [(0, 0), (1, 1), (4, 4), (100, None)])
def test_no_layer_falls_below_min_rank(min_rank, expected):
    model = low_rank_model()
    full = ranks(model)
    shrink(model, threshold=1e9, min_rank=min_rank)
    for name, rank in ranks(model).items():
        assert rank == (full[name] if expected is None else min(expected, full[name]))


@pytest.mark.slow
@given(
    build=st.sampled_from(
        [
            lambda: nn.Linear(7, 5),
            lambda: nn.Conv2d(4, 6, 3, groups=2),
            lambda: nn.ConvTranspose1d(4, 5, 3),
        ]
    ),
    quantile=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_weights_move_by_at_most_the_threshold(build, quantile, seed):
    torch.manual_seed(seed)
    model = decompose(build())
    with torch.no_grad():
        for _, factor, _ in factors(model):
            factor.normal_()
    (values,) = importance(model).values()
    threshold = torch.quantile(values, quantile).item()
    before = model.weight.detach().clone()
    shrink(model, threshold=threshold)
    moved = (model.weight.detach() - before).norm().item()
    assert moved <= threshold * (1 + 1e-5)


def test_outputs_move_by_at_most_the_threshold_times_the_input():
    model = decompose(nn.Linear(10, 8)).double()
    x = torch.randn(20, 10, dtype=torch.float64)
    before = model(x).detach()
    threshold = importance(model)[""][4].item()
    shrink(model, threshold=threshold)
    assert model.rank == 4
    moved = (model(x).detach() - before).norm(dim=1)
    assert (moved <= threshold * x.norm(dim=1)).all()
    assert moved.max() > 0


def test_frozen_layers_stay_frozen():
    model = low_rank_model()
    model[3].requires_grad_(False)
    zero_tails(model)
    shrink(model, threshold=1e-9)
    assert ranks(model) == KEEP
    assert not model[3].u.requires_grad and not model[3].v.requires_grad
    assert model[0].u.requires_grad


def test_an_active_rank_set_around_a_shrink_is_restored_to_what_is_left():
    model = low_rank_model()
    zero_tails(model)
    with at_ranks(model, {"3": 5}):
        with at_ranks(model, {"3": 2}):
            shrink(model, threshold=1e-9)
        x, _ = batch(0)
        assert model(x).shape == (8, 3)
        assert model[3].active_rank == 4
    assert model[3].active_rank == 4


@pytest.mark.parametrize("threshold", [-1e-9, float("nan"), float("inf")])
def test_a_threshold_that_makes_no_sense_is_refused(threshold, snapshot):
    model = low_rank_model()
    before = snapshot(model)
    with pytest.raises(MaestroError, match="threshold"):
        shrink(model, threshold=threshold)
    before.assert_unchanged(model)


@pytest.mark.parametrize("min_rank", [-1, 1.5, float("nan")])
def test_a_min_rank_that_makes_no_sense_is_refused(min_rank, snapshot):
    model = low_rank_model()
    before = snapshot(model)
    with pytest.raises(MaestroError, match="min_rank"):
        shrink(model, threshold=1e9, min_rank=min_rank)
    before.assert_unchanged(model)


def test_weights_that_are_not_finite_are_refused(snapshot):
    model = low_rank_model()
    with torch.no_grad():
        model[3].u[0, 0] = float("nan")
    before = snapshot(model)
    with pytest.raises(MaestroError, match="weights of 3"):
        shrink(model, threshold=1e-3)
    before.assert_unchanged(model)


def test_a_model_without_low_rank_layers_is_refused():
    with pytest.raises(MaestroError, match="decompose"):
        shrink(nn.Linear(3, 3), threshold=0.1)


def test_a_loss_kept_alive_can_still_run_backward():
    model = low_rank_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    zero_tails(model)
    x, y = batch(0)
    loss = F.cross_entropy(model(x), y)
    shrink(model, optimizer, threshold=1e-9)
    loss.backward()
    train(model, optimizer, range(2))
    assert ranks(model) == KEEP


# -- optimizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_a_shrunk_run_equals_an_unshrunk_run_whose_tail_is_zero(make):
    shrunk, whole = low_rank_model(), low_rank_model()
    optimizers = [make(list(model.parameters())) for model in (shrunk, whole)]
    for model, optimizer in zip((shrunk, whole), optimizers, strict=True):
        train(model, optimizer, range(4))
        zero_tails(model, optimizer)
    assert shrink(shrunk, optimizers[0], threshold=1e-12) == {"0": 3, "3": 2, "5": 2}
    for model, optimizer in zip((shrunk, whole), optimizers, strict=True):
        train(model, optimizer, range(4, 10))
    close = {"rtol": 1e-8, "atol": 1e-10}
    for (name, ours, dim), (_, theirs, _) in zip(factors(shrunk), factors(whole), strict=True):
        rank = KEEP[name[0]]
        torch.testing.assert_close(ours, theirs.narrow(dim, 0, rank), **close)
        assert theirs.narrow(dim, rank, theirs.shape[dim] - rank).count_nonzero() == 0
        our_state, their_state = optimizers[0].state[ours], optimizers[1].state[theirs]
        assert our_state.keys() == their_state.keys()
        for key, value in their_state.items():
            if isinstance(value, Tensor) and value.shape == theirs.shape:
                value = value.narrow(dim, 0, rank)
            torch.testing.assert_close(our_state[key], value, **close)
    for ours, theirs in zip(shrunk.parameters(), whole.parameters(), strict=True):
        if ours.shape == theirs.shape:
            torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("make", (ELEMENTWISE | MIXING).values(), ids=ELEMENTWISE | MIXING)
def test_state_of_surviving_ranks_is_kept_bit_for_bit(make):
    model = linear_model()
    optimizer = make(list(model.parameters()))
    train_linear(model, optimizer, 3)
    old = {name: copy.deepcopy(optimizer.state[f]) for name, f, _ in factors(model)}
    shapes = {name: f.shape for name, f, _ in factors(model)}
    keep = {"0": 3, "2": 2}
    zero_tails(model, keep=keep)
    shrink(model, optimizer, threshold=1e-9)
    assert ranks(model) == keep
    assert len(optimizer.state) == 4  # nothing is kept for parameters that are gone
    sliced = 0
    for name, factor, dim in factors(model):
        state = optimizer.state[factor]
        assert state.keys() == old[name].keys()
        for key, before in old[name].items():
            if isinstance(before, Tensor) and before.ndim == 2:
                assert before.shape[dim] in (shapes[name][dim], 1)
                before = before.narrow(dim, 0, min(before.shape[dim], keep[name[0]]))
                sliced += before.shape[dim] > 1
            after = state[key]
            assert torch.equal(after, before) if isinstance(before, Tensor) else after == before
    assert sliced or not any(isinstance(v, Tensor) for v in old["0.u"].values())
    train_linear(model, optimizer, 3)
    assert all(f.isfinite().all() for _, f, _ in factors(model))


def test_state_that_cannot_be_matched_starts_anew(caplog):
    model = linear_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_linear(model, optimizer, 1)
    optimizer.state[model[0].u]["row"] = torch.zeros(6)  # one value per row, as some keep it
    zero_tails(model, keep={"0": 3, "2": 2})
    shrink(model, optimizer, threshold=1e-9)
    assert "'row'" in caplog.text
    assert not optimizer.state.get(model[0].u)
    assert optimizer.state[model[0].v]["momentum_buffer"].shape == (3, 8)
    train_linear(model, optimizer, 2)


@pytest.mark.parametrize("way", ["decompose", "load"])
@pytest.mark.parametrize("make", (ELEMENTWISE | MIXING).values(), ids=ELEMENTWISE | MIXING)
def test_training_goes_well_without_one_layers_ranks(make, way, tmp_path):
    dense = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))
    if way == "decompose":
        model = decompose(dense, ranks={"2": 0})
    else:
        save(linear_model(), tmp_path / "m.safetensors")
        model = load(tmp_path / "m.safetensors", into=dense, ranks={"2": 0})
    train_linear(model, make(list(model.parameters())), 2)
    assert ranks(model)["2"] == 0


@pytest.mark.parametrize("resumed", [False, True], ids=["at once", "resumed"])
@pytest.mark.parametrize("make", (ELEMENTWISE | MIXING).values(), ids=ELEMENTWISE | MIXING)
def test_training_goes_on_after_a_layer_is_gone(make, resumed):
    model = linear_model()
    optimizer = make(list(model.parameters()))
    train_linear(model, optimizer, 2)
    zero_tails(model, keep={"0": 3, "2": 0})
    shrink(model, optimizer, threshold=1e-9)
    if resumed:
        saved = model.state_dict(), optimizer.state_dict()
        model = linear_model()
        model.load_state_dict(saved[0])
        optimizer = make(list(model.parameters()))
        optimizer.load_state_dict(saved[1])
    train_linear(model, optimizer, 2)
    assert ranks(model) == {"0": 3, "2": 0}


def test_param_groups_and_scheduler_survive():
    model = low_rank_model()
    optimizer = optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.5},
            {"params": [*model[3].parameters(), *model[5].parameters()]},
        ],
        lr=0.01,
        momentum=0.9,
    )
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, range(2))
    scheduler.step()
    zero_tails(model, optimizer)
    lists = [group["params"] for group in optimizer.param_groups]
    shrink(model, optimizer, threshold=1e-9)
    assert all(g["params"] is old for g, old in zip(optimizer.param_groups, lists, strict=True))
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert held[0] == [id(p) for p in model[0].parameters()]
    assert held[1] == [id(p) for m in (model[3], model[5]) for p in m.parameters()]
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.005]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0]
    train(model, optimizer, range(2, 4))
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.025, 0.0025]


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW amsgrad", "RMSprop", "ASGD"])
def test_optimizer_state_dict_goes_round_after_a_shrink(name):
    make = ELEMENTWISE[name]
    model = low_rank_model()
    optimizer = make(list(model.parameters()))
    train(model, optimizer, range(3))
    zero_tails(model, optimizer)
    shrink(model, optimizer, threshold=1e-9)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = low_rank_model()
    resumed.load_state_dict(saved["model"])
    other = make(list(resumed.parameters()))
    other.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    for ours, theirs in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("by", ["shrink", "LoD"])
def test_lbfgs_is_refused(by, snapshot):
    model = low_rank_model()
    zero_tails(model)
    before, optimizer = snapshot(model), optim.LBFGS(model.parameters())
    with pytest.raises(MaestroError, match="LBFGS"):
        shrink(model, optimizer, threshold=1e-9) if by == "shrink" else LoD(model, optimizer)
    before.assert_unchanged(model)


def test_an_optimizer_without_the_factors_is_refused(snapshot):
    dense = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    optimizer = optim.SGD(dense.parameters(), lr=0.1)  # before decompose: a classic mistake
    model = decompose(dense)
    before = snapshot(model)
    with pytest.raises(MaestroError, match=r"0\.u, 0\.v, 1\.u, 1\.v"):
        shrink(model, optimizer, threshold=1e9)
    before.assert_unchanged(model)


def test_an_optimizer_need_not_hold_frozen_factors():
    model = low_rank_model()
    model[0].requires_grad_(False)
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    zero_tails(model)
    shrink(model, optimizer, threshold=1e-9)
    assert ranks(model) == KEEP


# -- an averaged copy --------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["shrink", "LoD"])
def test_an_averaged_model_shrinks_along(by):
    model = low_rank_model()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    lod = LoD(model, optimizer, threshold=1e-9, ema=ema)
    with lod.step():
        train(model, optimizer, range(2))
    ema.update_parameters(model)
    averaged = {name: f.detach().clone() for name, f, _ in factors(ema.module)}
    zero_tails(model)
    shrink(model, optimizer, threshold=1e-9, ema=ema) if by == "shrink" else lod.end_epoch()
    assert ranks(ema.module) == ranks(model) == KEEP
    for name, factor, dim in factors(ema.module):
        assert torch.equal(factor, averaged[name].narrow(dim, 0, KEEP[name[0]]))
    train(model, optimizer, range(2, 4))
    ema.update_parameters(model)
    x, _ = batch(0)
    assert ema(x).isfinite().all()


def test_an_averaged_model_that_would_miss_a_shrink_is_refused_before_anything_changes(snapshot):
    model = low_rank_model()
    ema, of_another = AveragedModel(model), AveragedModel(copy.deepcopy(model))
    zero_tails(model)
    before = snapshot(model)
    for change in (lambda: shrink(model, threshold=1e-9), lambda: order_ranks(model)):
        with pytest.raises(TrainingError, match=r"AveragedModel.*ema="):
            change()
        before.assert_unchanged(model)
    del ema
    shrink(model, threshold=1e-9)
    assert ranks(model) == KEEP != ranks(of_another.module)


def test_an_averaged_model_that_missed_a_shrink_is_refused(snapshot):
    model = low_rank_model()
    ema = AveragedModel(copy.deepcopy(model))
    zero_tails(model)
    shrink(model, threshold=1e-9)
    assert ranks(ema.module) == {"0": 5, "3": 6, "5": 3}
    before, ema_before = snapshot(model), snapshot(ema)
    with pytest.raises(MaestroError, match="AveragedModel"):
        shrink(model, threshold=1e9, ema=ema)
    before.assert_unchanged(model)
    ema_before.assert_unchanged(ema)


# -- hooks on factors --------------------------------------------------------------------------


def test_tensor_hooks_go_on_working():
    model = low_rank_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    seen: list[tuple[str, torch.Size]] = []
    model[3].u.register_hook(lambda grad: seen.append(("grad", grad.shape)))
    model[3].v.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.shape)))
    model[5].u.register_hook(lambda grad: torch.zeros_like(grad))
    zero_tails(model)
    shrink(model, optimizer, threshold=1e-9)
    train(model, optimizer, range(1))
    assert sorted(seen) == [("after", (4, 20)), ("grad", (6, 4))]
    assert model[5].u.grad.count_nonzero() == 0


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_handle_from_before_the_shrink_still_removes_its_hook(register):
    model = low_rank_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    seen: list[int] = []
    handle = getattr(model[3].u, register)(lambda _: seen.append(1))
    zero_tails(model)
    shrink(model, optimizer, threshold=1e-9)
    train(model, optimizer, range(1))
    assert len(seen) == 1
    handle.remove()
    train(model, optimizer, range(1))
    assert len(seen) == 1


# -- distributed wrappers ----------------------------------------------------------------------


@pytest.mark.parametrize("given", ["inner model", "wrapper"])
def test_a_live_ddp_wrapper_goes_on_after_a_shrink(process_group, given):
    model = low_rank_model()
    ddp = DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = batch(0)
    F.cross_entropy(ddp(x), y).backward()
    optimizer.step()
    zero_tails(model, optimizer)
    shrink(model if given == "inner model" else ddp, optimizer, threshold=1e-9)
    assert ranks(ddp) == ranks(model) == KEEP
    for _ in range(2):  # a wrapper of the old shapes would fail at the second
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    assert all(optimizer.state[f]["momentum_buffer"].shape == f.shape for _, f, _ in factors(model))


def test_a_wrapper_that_cannot_be_made_anew_is_refused(process_group, snapshot):
    model = low_rank_model()
    named = [("3.u", model[3].u)]
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].u
    )
    before = snapshot(model)
    with pytest.raises(MaestroError, match="delay_all_reduce_named_params"):
        shrink(ddp, threshold=1e9)
    before.assert_unchanged(model)


def test_a_wrapper_that_was_deleted_does_not_matter(process_group):
    model = low_rank_model()
    zero_tails(model)
    ddp = DistributedDataParallel(model)
    del ddp
    shrink(model, threshold=1e-9)
    assert ranks(model) == KEEP
    again = DistributedDataParallel(model)
    x, y = batch(0)
    F.cross_entropy(again(x), y).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_sampling_alone_can_be_done_inside_a_live_ddp_wrapper(process_group):
    model = low_rank_model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    train_ = LoD(model, optimizer, threshold=None)
    x, y = batch(0)
    with train_.step():
        F.cross_entropy(ddp(x), y).backward()
    optimizer.step()
    assert train_.end_epoch() == {}
    assert train_.epoch == 1


def test_a_wrapper_around_another_model_does_not_matter(process_group):
    model, other = low_rank_model(), low_rank_model()
    ddp = DistributedDataParallel(other)
    zero_tails(model)
    shrink(model, threshold=1e-9)
    assert ranks(model) == KEEP
    assert ddp.module is other


def test_a_larger_model_in_a_wrapper_is_found_through_its_part(process_group):
    model = low_rank_model()
    ddp = DistributedDataParallel(nn.Sequential(model, nn.Linear(3, 3).double()))
    zero_tails(model)
    shrink(model, threshold=1e-9)
    assert ranks(model) == KEEP
    x, y = batch(0)
    for _ in range(2):
        F.cross_entropy(ddp(x), y).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in ddp.parameters())


def test_looking_for_wrappers_survives_dead_weak_references(process_group):
    class Thing:
        pass

    thing = Thing()
    proxy = weakref.proxy(thing)
    del thing
    gc.collect()
    model = low_rank_model()
    zero_tails(model)
    shrink(model, threshold=1e-9)
    assert ranks(model) == KEEP
    del proxy


def test_lod_takes_a_wrapper_and_shrinks_what_is_inside(process_group):
    model = low_rank_model()
    ddp = DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    lod = LoD(ddp, optimizer)
    x, y = batch(0)
    for lost in ({"0": 3, "3": 2, "5": 2}, {}):
        for _ in range(2):
            with lod.step():
                F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        zero_tails(model)
        assert lod.end_epoch() == lost


def test_a_sharded_model_is_cut_where_it_lies(process_group):
    model = low_rank_model()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    zero_tails(model)
    shrink(model, optimizer, threshold=1e-9)
    assert ranks(model) == KEEP
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(optimizer.state[f]["momentum_buffer"].shape == f.shape for _, f, _ in factors(model))


def test_a_plain_copy_is_no_averaged_model():
    model = linear_model()
    with pytest.raises(
        MaestroError, match=r"ema is not an averaged model: Sequential.*AveragedModel"
    ):
        shrink(model, threshold=1e-9, ema=copy.deepcopy(model))


def test_a_wrapped_model_is_not_decomposed(process_group):
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(MaestroError, match="Decompose the model first"):
        decompose(wrapped)


def test_what_a_user_put_on_a_parameter_stays_with_it() -> None:
    model = decompose(nn.Sequential(nn.Linear(6, 6)))
    model[0].u.lr_scale = 0.5
    with torch.no_grad():
        model[0].v[2:] = 0.0
    assert shrink(model, threshold=1e-6) == {"0": 4}
    assert model[0].u.lr_scale == 0.5
