"""The training object: exact resume, loud failures, both penalties, full pass, ledger."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from maestro_lod import (
    LoD,
    MaestroError,
    RankSampler,
    at_ranks,
    decompose,
    group_lasso,
    importance,
    ranks,
    set_ranks,
    summary,
)
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.layers import LowRank
from maestro_lod.sizes.allocation import Allocation
from maestro_lod.train.diagnostics import reachable_importance
from maestro_lod.train.evaluate import IGNORED, CrossEntropy
from maestro_lod.train.fit import fit
from maestro_lod.train.sampling import STRATEGIES
from maestro_lod.train.shrink import cut

RANKS = {"0": 4, "3": 6, "5": 3}
BATCHES = [16, 16, 16, 5]  # the last one of an epoch is smaller, as usual


def low_rank_model() -> nn.Module:
    torch.manual_seed(0)
    return decompose(
        nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(),
            nn.Linear(6, 3),
        )
    )  # fmt: skip


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def batch(epoch: int, i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * epoch + i)
    x = torch.randn(BATCHES[i], 1, 4, 4, generator=generator)
    return x, (x.mean((1, 2, 3)) * 8).round().clamp(-1, 1).long() + 1


def one_step(model: nn.Module, train: LoD, epoch: int = 0, i: int = 0) -> dict[str, int]:
    x, y = batch(epoch, i)
    with train.step() as drawn:
        loss = F.cross_entropy(model(x), y) + train.penalty_loss()
        loss.backward()
    train.optimizer.step()
    train.optimizer.zero_grad()
    return drawn


def layers(model: nn.Module) -> dict[str, LowRank]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRank)}


@torch.no_grad()
def zero_tails(model: nn.Module, **keep: int) -> None:
    """Make the ranks from `keep` on zero, given as _3=2 for layer "3"."""
    for name, rank in keep.items():
        layer = layers(model)[name[1:]]
        layer.u[:, rank:] = 0
        layer.v[rank:] = 0


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def assert_same(ours: object, theirs: object) -> None:
    """Equal bit for bit, through nested state dicts."""
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


# -- resume ------------------------------------------------------------------------------------


class Run:
    """A training run whose state goes through a file, as a user would write it."""

    options = {"penalty": 0.02, "threshold": 1e-3, "seed": 3}  # noqa: RUF012

    def __init__(self, make: Callable[[nn.Module], optim.Optimizer], **options: object) -> None:
        self.model = low_rank_model()
        self.optimizer = make(self.model)
        self.train = LoD(self.model, self.optimizer, **(self.options | options))
        self.drawn: list[dict[str, int]] = []

    def go(self, start: tuple[int, int], stop: tuple[int, int]) -> None:
        """Run from one (epoch, batch) to another; an epoch ends after its last batch."""
        epoch, i = start
        while (epoch, i) != stop:
            self.drawn.append(one_step(self.model, self.train, epoch, i))
            i += 1
            if i == len(BATCHES):
                self.train.end_epoch()
                epoch, i = epoch + 1, 0

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "train": self.train}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        return file


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.03)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_optimizer_may_be_created_before_or_after_the_model_is_loaded(before):
    whole = Run(sgd)
    whole.go((0, 0), (8, 2))
    saved = torch.load(whole.save(), weights_only=True)
    assert ranks(whole.model) != RANKS
    model = low_rank_model()
    optimizer = sgd(model) if before else None
    model.load_state_dict(saved["model"])
    optimizer = optimizer or sgd(model)
    optimizer.load_state_dict(saved["optimizer"])
    train = LoD(model, optimizer, **Run.options)
    train.load_state_dict(saved["train"])
    for i in (2, 3):
        assert one_step(model, train, 8, i) == one_step(whole.model, whole.train, 8, i)
    assert train.end_epoch() == whole.train.end_epoch()
    assert_same(whole.model.state_dict(), model.state_dict())
    assert_same(whole.optimizer.state_dict(), optimizer.state_dict())
    assert_same(whole.train.state_dict(), train.state_dict())


def test_a_state_is_a_snapshot():
    run = Run(sgd)
    run.go((0, 0), (1, 2))
    state = run.train.state_dict()
    before = copy.deepcopy(state)
    run.go((1, 2), (3, 0))
    assert_same(state, before)


def test_a_state_of_other_ranks_is_refused():
    run = Run(sgd)
    run.go((0, 0), (8, 0))
    train = LoD(model := low_rank_model(), sgd(model))
    before = train.state_dict()
    with pytest.raises(TrainingError, match="other ranks"):
        train.load_state_dict(run.train.state_dict())
    assert_same(train.state_dict(), before)


def test_a_state_of_another_strategy_is_refused():
    state = LoD(model := low_rank_model(), sgd(model), sampling="several").state_dict()
    train = LoD(model := low_rank_model(), sgd(model))
    before = train.state_dict()
    with pytest.raises(OptionError, match="several"):
        train.load_state_dict(state)
    assert_same(train.state_dict(), before)


# -- loud failures -----------------------------------------------------------------------------


def test_an_epoch_without_steps_is_refused():
    train = LoD(model := low_rank_model(), sgd(model))
    with pytest.raises(TrainingError, match=r"step\(\)"):
        train.end_epoch()
    assert train.epoch == 0 and train.history == []


def test_an_epoch_without_a_forward_inside_step_is_refused():
    train = LoD(model := low_rank_model(), sgd(model))
    x, y = batch(0, 0)
    loss = F.cross_entropy(model(x), y)
    with train.step():
        loss.backward()
    with pytest.raises(TrainingError, match="inside step"):
        train.end_epoch()


def test_a_forward_of_an_earlier_epoch_does_not_count():
    train = LoD(model := low_rank_model(), sgd(model))
    one_step(model, train)
    train.end_epoch()
    model(batch(0, 0)[0])
    with train.step():
        pass
    with pytest.raises(TrainingError, match="inside step"):
        train.end_epoch()


def test_an_optimizer_that_does_not_hold_the_factors_is_refused():
    dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = sgd(dense)
    model = decompose(dense)
    with pytest.raises(TrainingError, match=r"0\.u"):
        LoD(model, optimizer)


@pytest.mark.parametrize("remove", [True, False])
def test_factors_replaced_behind_the_optimizers_back_are_refused_at_the_epochs_end(remove):
    train = LoD(model := low_rank_model(), sgd(model), threshold=1e-7 if remove else None)
    one_step(model, train)
    model[3].u = nn.Parameter(model[3].u.detach().clone())
    with pytest.raises(TrainingError, match=r"3\.u"):
        train.end_epoch()
    assert train.epoch == 0 and train.history == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("full_pass", [False, True])
def test_backward_refuses_a_loss_that_is_not_finite(value, full_pass, snapshot):
    train = LoD(model := low_rank_model(), sgd(model), full_pass=full_pass)
    x, _ = batch(0, 0)
    before = snapshot(model)
    with pytest.raises(TrainingError, match="loss"):
        train.backward(lambda: model(x), lambda output: output.sum() * value)
    before.assert_unchanged(model)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_after_a_loss_that_was_not_finite_is_refused(value, strategy):
    train = LoD(model := low_rank_model(), sgd(model), sampling=strategy)
    one_step(model, train)
    with train.step():
        (model(batch(0, 1)[0]).sum() * value).backward()
    train.optimizer.step()
    with pytest.raises(TrainingError, match="not finite"), train.step():
        pass


@pytest.mark.parametrize("remove", [True, False])
def test_an_epoch_that_ends_with_a_loss_that_was_not_finite_is_refused(remove):
    train = LoD(model := low_rank_model(), sgd(model), threshold=1e-7 if remove else None)
    with train.step():
        (model(batch(0, 1)[0]).sum() * float("nan")).backward()
    train.optimizer.step()
    with pytest.raises(TrainingError, match="not finite"):
        train.end_epoch()
    assert train.epoch == 0 and train.history == []
    assert ranks(model) == RANKS


def test_large_finite_half_precision_weights_are_not_taken_for_nan():
    model = decompose(nn.Linear(64, 64, bias=False)).half()
    with torch.no_grad():
        model.u.fill_(100.0)  # the sum of all is beyond float16, each one is not
    train = LoD(model, optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        with train.step():
            model(torch.zeros(2, 64, dtype=torch.float16)).sum().backward()
    assert train.state_dict()["steps"] == 2


def test_losing_every_rank_is_refused_and_changes_nothing(snapshot):
    train = LoD(model := low_rank_model(), sgd(model))
    one_step(model, train)
    zero_tails(model, _0=0, _3=0, _5=0)
    before, state = snapshot(model), copy.deepcopy(train.optimizer.state_dict())
    with pytest.raises(TrainingError, match="min_rank"):
        train.end_epoch()
    before.assert_unchanged(model)
    assert_same(train.optimizer.state_dict(), state)
    assert train.epoch == 0 and train.history == []


def test_min_rank_keeps_layers_alive():
    train = LoD(model := low_rank_model(), sgd(model), min_rank=1)
    one_step(model, train)
    zero_tails(model, _0=0, _3=0, _5=0)
    assert train.end_epoch() == {"0": 3, "3": 5, "5": 2}
    one_step(model, train)


def test_one_layer_may_go_entirely():
    train = LoD(model := low_rank_model(), sgd(model))
    one_step(model, train)
    zero_tails(model, _3=0)
    assert train.end_epoch() == {"3": 6}
    for i in range(4):
        assert "3" not in one_step(model, train, 1, i)
    assert train.end_epoch() == {}
    assert train.history[1] == {"0": 4, "3": 0, "5": 3}


BAD_OPTIONS = [
    {"penalty": -1.0},
    {"penalty": float("nan")},
    {"penalty": float("inf")},
    {"penalty": None},
    {"penalty": "a"},
    {"threshold": True},
    {"threshold": -1e-9},
    {"threshold": float("nan")},
    {"min_rank": -1},
    {"min_rank": 1.5},
    {"sampling": "sometimes"},
    {"sampling": None},
    {"sampling": ["pairs"]},
    {"seed": None},
    {"seed": 1.5},
    {"distill": True},
    {"proximal": "false"},
    {"full_pass": 1},
    {"distill": "no"},
    {"min_rank": 10**6},
    {"penalty": {"params": 0.2}},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_options_that_make_no_sense_are_refused(options, snapshot):
    model = low_rank_model()
    before = snapshot(model)
    with pytest.raises(OptionError, match=next(iter(options))):
        LoD(model, sgd(model), **options)
    before.assert_unchanged(model)
    assert not model._forward_pre_hooks


def test_a_dense_model_is_refused():
    model = nn.Linear(3, 3)
    with pytest.raises(MaestroError, match="decompose"):
        LoD(model, sgd(model))


def test_step_is_refused_with_a_full_pass():
    train = LoD(model := low_rank_model(), sgd(model), full_pass=True)
    with pytest.raises(OptionError, match="backward"), train.step():
        pass


# -- one step ----------------------------------------------------------------------------------


def test_a_step_activates_what_it_draws_and_restores_all_ranks():
    train = LoD(model := low_rank_model(), sgd(model))
    for _ in range(20):
        with train.step() as drawn:
            active = {name: layer.active_rank for name, layer in layers(model).items()}
            assert active == RANKS | drawn
            model(batch(0, 0)[0]).sum().backward()
        assert all(layer.active_rank == layer.rank for layer in layers(model).values())


def test_ranks_are_restored_after_an_exception_and_the_step_does_not_count():
    train = LoD(model := low_rank_model(), sgd(model), sampling="several")
    with pytest.raises(ZeroDivisionError), train.step():
        model(batch(0, 0)[0])
        raise ZeroDivisionError
    assert all(layer.active_rank == layer.rank for layer in layers(model).values())
    assert train.state_dict()["steps"] == 0


def test_gradients_are_those_of_the_drawn_submodel():
    train = LoD(model := low_rank_model(), sgd(model), seed=5)
    x, y = batch(0, 0)
    with train.step() as drawn:
        F.cross_entropy(model(x), y).backward()
    ours = gradients(model)
    model.zero_grad()
    with at_ranks(model, drawn):
        F.cross_entropy(model(x), y).backward()
    assert_same(ours, gradients(model))


def test_gradient_accumulation_sums_the_gradients_of_the_drawn_submodels():
    train = LoD(model := low_rank_model(), sgd(model), penalty=0.1, threshold=1e-3)
    expected: dict[str, Tensor] = {}
    draws = []
    for i in range(3):
        x, y = batch(0, i)
        with train.step() as drawn:
            (F.cross_entropy(model(x), y) / 3 + train.penalty_loss() / 3).backward()
        draws.append(drawn)
    ours = gradients(model)
    for i, drawn in enumerate(draws):
        x, y = batch(0, i)
        model.zero_grad()
        with at_ranks(model, drawn):
            (F.cross_entropy(model(x), y) / 3 + 0.1 * group_lasso(model) / 3).backward()
        expected = {n: expected.get(n, 0) + g for n, g in gradients(model).items()}
    assert_close(ours, expected)
    train.optimizer.step()
    train.end_epoch()


def test_penalty_loss_is_lambda_times_the_group_lasso():
    train = LoD(model := low_rank_model(), sgd(model), penalty=0.3)
    ours, expected = train.penalty_loss(), 0.3 * group_lasso(model)
    torch.testing.assert_close(ours, expected)
    grads = [torch.autograd.grad(loss, model[3].u)[0] for loss in (ours, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("options", [{"penalty": 0.0}, {"penalty": 0.3, "proximal": True}])
def test_penalty_loss_is_zero_without_a_penalty_and_in_proximal_mode(options):
    train = LoD(model := low_rank_model(), sgd(model), **options)
    penalty = train.penalty_loss()
    assert penalty.item() == 0.0
    assert not penalty.requires_grad
    (model(batch(0, 0)[0]).sum() + penalty).backward()


def test_two_epochs_by_the_book():
    model = low_rank_model()
    train = LoD(model, sgd(model), penalty=0.02, threshold=1e-3, seed=0)
    for epoch in range(2):
        for i in range(len(BATCHES)):
            one_step(model, train, epoch, i)
        train.end_epoch()
    assert train.epoch == 2
    assert train.history[0] == RANKS
    assert len(train.history) == 2


def test_shrink_false_never_removes_ranks():
    train = LoD(model := low_rank_model(), sgd(model), threshold=None)
    one_step(model, train)
    zero_tails(model, _3=2)
    assert train.end_epoch() == {}
    assert ranks(model) == RANKS
    assert train.history == [RANKS]


# -- the full pass -----------------------------------------------------------------------------


def test_backward_without_a_full_pass_is_a_sampled_step():
    model = low_rank_model()
    x, y = batch(0, 0)
    train = LoD(model, sgd(model), penalty=0.1, threshold=1e-3, seed=1)
    loss = train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))
    ours = gradients(model)
    model.zero_grad()
    with LoD(model, sgd(model), penalty=0.1, seed=1).step():
        expected = F.cross_entropy(model(x), y) + 0.1 * group_lasso(model)
        expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    assert_close(ours, gradients(model))
    train.optimizer.step()
    train.end_epoch()


@pytest.mark.parametrize("distill", [False, True])
def test_a_full_pass_adds_its_loss_and_gradient_to_those_of_the_sampled_pass(distill):
    model = low_rank_model()
    x, y = batch(0, 0)
    options = {"penalty": 0.1, "threshold": 1e-3, "full_pass": True, "distill": distill}
    train = LoD(model, sgd(model), seed=2, **options)
    loss = train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))
    ours = gradients(model)
    model.zero_grad()
    drawn = RankSampler(model, seed=2).sample()
    full_output = model(x)
    full = F.cross_entropy(full_output, y)
    with at_ranks(model, drawn):
        target = full_output.detach().softmax(1) if distill else y
        sampled = F.cross_entropy(model(x), target) + 0.1 * group_lasso(model)
    (full + sampled).backward()
    torch.testing.assert_close(loss, (full + sampled).detach())
    assert_close(ours, gradients(model))
    train.optimizer.step()
    assert train.end_epoch() == {}


def test_hard_labels_are_the_default():
    model = low_rank_model()
    assert LoD(model, sgd(model), full_pass=True).distill is False


# -- the proximal mode -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        lambda model: optim.Adam(model.parameters(), lr=0.05),
        lambda model: optim.Adam(model.parameters(), lr=torch.tensor(0.05), foreach=False),
    ],
    ids=["SGD", "Adam", "Adam tensor lr"],
)
def test_proximal_mode_gives_exact_zeros_and_shrinks_at_threshold_zero(make):
    model = low_rank_model()
    train = LoD(model, make(model), penalty=0.3, threshold=0.0, proximal=True)
    exact_zeros = 0
    for epoch in range(12):
        for i in range(len(BATCHES)):
            one_step(model, train, epoch, i)
        exact_zeros += sum(int((v == 0).sum()) for v in importance(model).values())
        train.end_epoch()
    assert exact_zeros > 0
    assert sum(RANKS.values()) - sum(ranks(model).values()) == exact_zeros


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda model: optim.Adam(model.parameters(), lr=0.05),
        lambda model: optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1),
        lambda model: optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9),
    ],
    ids=["SGD", "Nesterov", "Adam", "AdamW", "RMSprop"],
)
def test_ranks_that_the_proximal_step_made_zero_are_not_revived_by_momentum(make):
    model = low_rank_model()
    train = LoD(model, make(model), penalty=1e-6, proximal=True)
    for i in range(3):
        one_step(model, train, 0, i)
    train.penalty = 1e4
    train.optimizer.step()
    assert all(bool((value == 0).all()) for value in importance(model).values())
    train.penalty = 1e-6
    for _ in range(3):  # with gradients of the last step at hand, which momentum would go on with
        for layer in layers(model).values():
            layer.u.grad, layer.v.grad = torch.zeros_like(layer.u), torch.zeros_like(layer.v)
        train.optimizer.step()
    assert all(bool((value == 0).all()) for value in importance(model).values())


def test_the_proximal_step_is_the_learning_rate_of_each_group_times_lambda():
    model = low_rank_model()
    optimizer = optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.0},
            {"params": model[3].parameters(), "lr": 0.5},
            {"params": model[5].parameters(), "lr": 0.1},
        ]
    )
    train = LoD(model, optimizer, penalty=0.2, proximal=True)
    kept = model[0].u.detach().clone()
    norm = {name: model[int(name)].v.detach()[-1].norm().item() for name in "35"}
    one_rank = {n: copy.deepcopy(layers(model)[n]) for n in "35"}
    optimizer.step()  # no gradients: what moves is the proximal step
    assert torch.equal(model[0].u, kept)
    for name, step in (("3", 0.5 * 0.2), ("5", 0.1 * 0.2)):
        before, after = one_rank[name], layers(model)[name]
        assert norm[name] > step
        moved = (before.v[-1] - after.v[-1]).norm().item()
        assert moved >= step * (1 - 1e-4)  # the last rank is in every group
        kept_rows = before.v.norm(dim=1) > 0
        assert (after.v.norm(dim=1) <= before.v.norm(dim=1))[kept_rows].all()
    assert train.epoch == 0


def test_the_proximal_step_ends_with_its_object():
    model = low_rank_model()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    train = LoD(model, optimizer, penalty=0.2, proximal=True, example=torch.empty(1, 1, 4, 4))
    alive = weakref.ref(train)
    del train
    gc.collect()
    assert alive() is None
    before = model[3].u.detach().clone()
    optimizer.step()
    assert torch.equal(model[3].u, before)


# -- the floor ---------------------------------------------------------------------------------


def floor_warnings(optimizer: Callable, **options: object) -> list[warnings.WarningMessage]:
    model = low_rank_model()
    train = LoD(model, optimizer(model.parameters()), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            one_step(model, train, epoch)
            train.end_epoch()
    return caught


UNREACHABLE = {
    "Adam": (lambda p: optim.Adam(p, lr=3e-3), 1e-4),
    "AdamW": (lambda p: optim.AdamW(p, lr=3e-3), 1e-4),
    "SGD with a large rate": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), 1e-2),
}
REACHABLE = {
    "SGD with a small rate": (lambda p: optim.SGD(p, lr=0.01, momentum=0.9), {"penalty": 1e-4}),
    "Adam with a small rate": (lambda p: optim.Adam(p, lr=1e-5), {"penalty": 1e-4}),
    "a large threshold": (
        lambda p: optim.Adam(p, lr=3e-3),
        {"penalty": 1e-4, "threshold": 1e-3},
    ),
    "no penalty": (lambda p: optim.Adam(p, lr=3e-3), {}),
    "proximal": (lambda p: optim.Adam(p, lr=3e-3), {"penalty": 1e-4, "proximal": True}),
    "no shrinking": (lambda p: optim.Adam(p, lr=3e-3), {"penalty": 1e-4, "threshold": None}),
}


@pytest.mark.parametrize("optimizer, penalty", UNREACHABLE.values(), ids=UNREACHABLE)
def test_a_threshold_below_what_the_optimizer_reaches_is_warned_of_once(optimizer, penalty):
    (warning,) = floor_warnings(optimizer, penalty=penalty)
    message = str(warning.message)
    assert "threshold=1e-07" in message and "proximal=True" in message
    assert warning.filename == __file__


@pytest.mark.parametrize("optimizer, options", REACHABLE.values(), ids=REACHABLE)
def test_a_threshold_that_can_be_reached_is_not_warned_of(optimizer, options):
    assert floor_warnings(optimizer, **options) == []


def test_an_epoch_is_finished_even_if_warnings_are_errors():
    train = LoD(model := low_rank_model(), adam(model), penalty=1e-4)
    one_step(model, train)
    zero_tails(model, _3=2)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="threshold"):
        warnings.simplefilter("error")
        train.end_epoch()
    assert train.epoch == 1
    assert train.state_dict()["steps"] == 0
    assert ranks(model)["3"] == 2


SIMULATED = {
    "SGD": lambda p: optim.SGD(p, lr=0.02),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.02, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("make", SIMULATED.values(), ids=SIMULATED)
def test_reachable_importance_is_the_right_order_of_magnitude(make):
    penalty, layer = 1e-3, decompose(nn.Linear(24, 16, bias=False))
    with torch.no_grad():
        layer.u.mul_(0.02)
        layer.v.mul_(0.02)
    optimizer = make(layer.parameters())
    reached = []
    for i in range(2000):
        optimizer.zero_grad()
        (penalty * group_lasso(layer)).backward()
        optimizer.step()
        if i >= 1800:
            reached.append(importance(layer)[""][0].item())
    typical = sorted(reached)[len(reached) // 2]
    estimate = reachable_importance(layer, optimizer, penalty)
    assert typical / 10 < estimate < typical * 10


def test_reachable_importance_is_unknown_for_an_optimizer_that_was_not_simulated():
    layer = decompose(nn.Linear(4, 4))
    assert reachable_importance(layer, optim.Adagrad(layer.parameters()), 1e-3) is None
    other = nn.Linear(2, 2)
    assert reachable_importance(layer, sgd(other), 1e-3) is None


# -- the ledger --------------------------------------------------------------------------------


def ledger_model() -> nn.Module:
    """A convolution 2→4 of 3×3 at 4×4 positions, a linear layer 64→3, and one left dense."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3), nn.Linear(3, 5)
    )
    return decompose(model, skip="4")


C0, C3 = (4 + 18) * 16, 3 + 64  # MACs of one rank
DENSE_MACS = 4 * 18 * 16 + 3 * 64 + 3 * 5
DENSE_PARAMS = (4 * 18 + 4) + 8 + (3 * 64 + 3) + (3 * 5 + 5)
OTHER_PARAMS = 4 + 8 + 3 + (3 * 5 + 5)


def book_macs(r0: int, r3: int) -> float:
    """The expected MACs of a step in which one of r0 + r3 pairs is drawn."""
    total = r0 + r3
    full = 3 * 5 + C0 * r0 + C3 * r3
    return full - r0 / total * C0 * (r0 - 1) / 2 - r3 / total * C3 * (r3 - 1) / 2


def book_macs_of_two_draws() -> float:
    """The expected MACs of a step that draws two of the 4 + 3 pairs: chances are squared."""
    ranks_0, ranks_3 = (sum((1 - b / 7) ** 2 for b in range(rank)) for rank in (4, 3))
    return 15 + C0 * ranks_0 + C3 * ranks_3


def ledger_epoch(train: LoD, model: nn.Module, size: int = 1) -> None:
    x = torch.randn(size, 2, 6, 6)
    if train.full_pass:
        train.backward(lambda: model(x), lambda output: output.sum())
    else:
        with train.step():
            model(x).sum().backward()
    train.optimizer.step()


def test_the_ledger_follows_the_papers_formula():
    model = ledger_model()
    train = LoD(model, optim.SGD(model.parameters(), lr=0.0), example=torch.empty(1, 2, 6, 6))
    ledger_epoch(train, model, size=2)
    zero_tails(model, _0=1, _3=2)
    assert train.end_epoch() == {"0": 3, "3": 1}
    ledger_epoch(train, model, size=2)
    train.end_epoch()
    ledger = train.ledger
    assert (ledger.dense_macs, ledger.dense_params) == (DENSE_MACS, DENSE_PARAMS)
    assert ledger.positions == {"0": 16, "3": 1}
    assert train.history == [{"0": 4, "3": 3}, {"0": 1, "3": 2}]
    macs = [book_macs(4, 3), book_macs(1, 2)]
    params = [OTHER_PARAMS + r0 * 22 + r3 * 67 for r0, r3 in ((4, 3), (1, 2))]
    assert [epoch.macs for epoch in ledger.epochs] == pytest.approx(macs)
    assert [epoch.params for epoch in ledger.epochs] == params
    assert ledger.relative_macs == pytest.approx(sum(macs) / 2 / DENSE_MACS)
    assert ledger.relative_params == pytest.approx(sum(params) / 2 / DENSE_PARAMS)


def test_a_full_pass_adds_the_full_ranks_to_the_ledger():
    model = ledger_model()
    options = {"example": torch.empty(1, 2, 6, 6), "full_pass": True}
    train = LoD(model, optim.SGD(model.parameters(), lr=0.0), **options)
    ledger_epoch(train, model, size=2)
    train.end_epoch()
    full = 15 + C0 * 4 + C3 * 3  # the dense layer runs again too
    assert train.ledger.epochs[0].macs == pytest.approx(book_macs(4, 3) + full)


def test_the_ledger_knows_how_each_strategy_samples():
    expected = {
        "pairs": book_macs(4, 3),
        "several": (book_macs(4, 3) + book_macs_of_two_draws()) / 2,
    }
    for strategy, macs in expected.items():
        model = ledger_model()
        options = {"example": torch.empty(1, 2, 6, 6), "sampling": strategy}
        train = LoD(model, optim.SGD(model.parameters(), lr=0.0), **options)
        ledger_epoch(train, model, size=2)
        train.end_epoch()
        assert train.ledger.epochs[0].macs == pytest.approx(macs), strategy


def test_without_an_example_the_first_batch_gives_the_macs():
    model = ledger_model()
    train = LoD(model, optim.SGD(model.parameters(), lr=0.0))
    assert train.ledger.relative_macs is None
    ledger_epoch(train, model, size=3)
    ledger_epoch(train, model, size=2)
    train.end_epoch()
    assert train.ledger.dense_macs == 3 * DENSE_MACS
    assert train.ledger.relative_macs == pytest.approx(book_macs(4, 3) / DENSE_MACS)


def test_a_forward_outside_step_is_not_taken_for_the_first_batch():
    model = ledger_model()
    train = LoD(model, optim.SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        model(torch.randn(2, 2, 6, 6))  # a look at the untrained model
    ledger_epoch(train, model, size=3)
    train.end_epoch()
    assert train.ledger.dense_macs == 3 * DENSE_MACS


# -- hooks and wrappers ------------------------------------------------------------------------


def test_no_hook_stays_on_the_model_after_an_epoch():
    model = low_rank_model()
    train = LoD(model, sgd(model))
    one_step(model, train)
    train.end_epoch()
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


def test_a_model_with_an_example_gets_no_hook_at_all():
    model = low_rank_model()
    LoD(model, sgd(model), example=torch.empty(1, 1, 4, 4))
    assert not model._forward_pre_hooks


def test_a_compiled_wrapper_is_unwrapped():
    model = low_rank_model()
    train = LoD(torch.compile(model, backend="eager"), sgd(model))
    assert train.model is model
    assert ranks(train.model) == RANKS
    assert train.state_dict()["ranks"] == RANKS


# -- accumulated gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"full_pass": True}, {"full_pass": True, "distill": True}])
@pytest.mark.parametrize("weight", [0.25, 0.5, 2.0])
def test_the_weight_of_a_batch_scales_its_loss_and_gradients(options, weight):
    results = []
    for given in ({}, {"weight": weight}):
        model = low_rank_model()
        train = LoD(model, sgd(model), penalty=0.1, threshold=1e-3, seed=4, **options)
        x, y = batch(0, 0)
        loss = train.backward(lambda: model(x), lambda out: F.cross_entropy(out, y), **given)  # noqa: B023
        results.append((loss, gradients(model)))
    (loss, plain), (weighted_loss, weighted) = results
    assert weighted_loss == weight * loss  # exact, since the weights are powers of two
    assert_close(weighted, {name: weight * gradient for name, gradient in plain.items()})


def test_weights_that_sum_to_one_average_over_batches():
    model = low_rank_model()
    train = LoD(model, sgd(model), penalty=0.1, threshold=1e-3, sampling="several", seed=4)
    draws = RankSampler(model, strategy="several", seed=4)
    for i in range(3):
        x, y = batch(0, i)
        train.backward(lambda: model(x), lambda out: F.cross_entropy(out, y), weight=1 / 3)  # noqa: B023
    ours = gradients(model)
    model.zero_grad()
    total = torch.zeros(())
    for i in range(3):
        x, y = batch(0, i)
        with at_ranks(model, draws.sample()):
            total = total + F.cross_entropy(model(x), y) / 3
    (total + 0.1 * group_lasso(model)).backward()
    assert_close(ours, gradients(model))
    assert train.state_dict()["steps"] == 3


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TrainingError, match="None is not an optimizer"):
        LoD(low_rank_model(), None)


def test_what_is_no_state_is_refused_and_changes_nothing():
    train = LoD(model := low_rank_model(), sgd(model))
    before = train.state_dict()
    with pytest.raises(TrainingError, match=r"not a state of LoD.*sampler"):
        train.load_state_dict({"epoch": 3, "ranks": ranks(model)})
    with pytest.raises(TrainingError, match="not a state of LoD"):
        train.load_state_dict(None)
    # older states have none of these
    since = {"optimized", "unseen", "left_out", "unmoved", "penalty_use", "unfactored"}
    for part in before.keys() - since:
        with pytest.raises(TrainingError, match=f"it has no {part}"):
            train.load_state_dict({key: value for key, value in before.items() if key != part})
    assert train.epoch == before["epoch"]


def test_a_model_that_runs_at_fewer_ranks_is_not_trained():
    """Layers that are not drawn would stay at that rank, and nobody would see it."""
    model = low_rank_model()
    set_ranks(model, 1)
    with pytest.raises(MaestroError, match=r"training uses the stored ranks.*set_ranks"):
        LoD(model, sgd(model))
    set_ranks(model, None)
    LoD(model, sgd(model))


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    model = low_rank_model()
    assert LoD(model, sgd(model), seed=np.int64(1), min_rank=np.int64(2)).min_rank == 2


def test_what_is_no_averaged_copy_is_refused_at_once() -> None:
    model = low_rank_model()
    with pytest.raises(
        MaestroError, match=r"ema is not an averaged model: Sequential.*AveragedModel"
    ):
        LoD(model, sgd(model), ema=copy.deepcopy(model))


class Sentences(nn.Sequential):
    """Scores of classes in the last dimension, as models of text have them."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(20, 16), nn.Linear(16, 20))


def test_distilling_goes_over_classes_wherever_they_are() -> None:
    model = decompose(Sentences())
    x, y = torch.randint(20, (4, 7)), torch.randint(20, (4, 7))
    y[:, 5:] = IGNORED  # which neither pass may learn from
    hard = CrossEntropy()
    train = LoD(model, sgd(model), full_pass=True, distill=True, seed=2)
    ours = train.backward(
        lambda: model(x), lambda o: hard(o, y), soft_loss=lambda o, t: hard.soft(o, t, y)
    )
    full = model(x)
    with at_ranks(model, RankSampler(model, seed=2).sample()):
        sampled = model(x)
    taught = full.detach().softmax(-1)[:, :5].flatten(0, 1)
    soft = F.cross_entropy(sampled[:, :5].flatten(0, 1), taught)
    torch.testing.assert_close(ours, (hard(full, y) + soft).detach())


def test_distilling_in_fit_goes_over_the_classes_of_its_loss() -> None:
    def trained(soft: bool) -> Tensor:
        torch.manual_seed(0)
        model = decompose(Sentences())
        x, y = torch.randint(20, (4, 7)), torch.randint(20, (4, 7))
        optimizer = sgd(model)
        train = LoD(model, optimizer, full_pass=True, distill=True, seed=2)
        if soft:
            fit(model, [(x, y)], optimizer=optimizer, method=train, epochs=1)
        else:
            loss = CrossEntropy()
            train.backward(
                lambda: model(x), lambda o: loss(o, y), soft_loss=lambda o, t: loss.soft(o, t, y)
            )
            optimizer.step()
        return model[1].u.detach()

    torch.testing.assert_close(trained(soft=True), trained(soft=False))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda y: y[:, None, :], r"the output is \(16, 1, 3\).*soft_loss"),
        (lambda y: {"logits": y}, r"the output is dict.*soft_loss"),
        (lambda y: y[:, :1], r"a single score.*fit a loss with a method soft"),
    ],
    ids=["sequences", "mapping", "one score"],
)
def test_distilling_what_is_no_class_score_is_refused(output, words) -> None:
    model = low_rank_model()
    train = LoD(model, sgd(model), full_pass=True, distill=True)
    x, _ = batch(0, 0)
    with pytest.raises(OptionError, match=words):
        train.backward(
            lambda: output(model(x)), lambda o: (o["logits"] if isinstance(o, dict) else o).sum()
        )
    assert all(p.grad is None for p in model.parameters())


def test_distilling_maps_of_classes_goes_over_their_second_dimension() -> None:
    model = decompose(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3)))
    x, y = torch.randn(2, 3, 8, 8), torch.randint(5, (2, 4, 4))
    train = LoD(model, sgd(model), full_pass=True, distill=True, seed=2)
    ours = train.backward(lambda: model(x), lambda o: F.cross_entropy(o, y))
    full = model(x)
    with at_ranks(model, RankSampler(model, seed=2).sample()):
        soft = F.cross_entropy(model(x), full.detach().softmax(1))
    torch.testing.assert_close(ours, (F.cross_entropy(full, y) + soft).detach())


def test_a_full_pass_takes_outputs_of_any_structure() -> None:
    model = low_rank_model()
    x, y = batch(0, 0)

    def loss(output: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output["logits"], y)

    train = LoD(model, sgd(model), full_pass=True)
    assert train.backward(lambda: {"logits": model(x)}, loss).isfinite()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_moves_nothing(fused: bool) -> None:
    model = low_rank_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    train = LoD(model, optimizer, penalty=0.1, proximal=True)
    scaler = torch.amp.GradScaler("cpu")
    with train.step():
        before = copy.deepcopy(model.state_dict())
        scaler.scale(model(batch(0, 0)[0]).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(before, model.state_dict())
    optimizer.zero_grad()
    with train.step():  # the scale is smaller now
        scaler.scale(model(batch(0, 0)[0]).sum()).backward()
    scaler.step(optimizer)
    assert any(not torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_models_of_packed_sequences_train_and_are_counted() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.out = nn.LSTM(8, 16), nn.Linear(16, 5)

        def forward(self, x: nn.utils.rnn.PackedSequence) -> Tensor:
            return self.out(self.recurrent(x)[0].data)

    model = decompose(Packed())
    x = nn.utils.rnn.pack_sequence([torch.randn(5, 8), torch.randn(3, 8)])
    train = LoD(model, sgd(model))
    with train.step():
        model(x).sum().backward()
    train.optimizer.step()
    train.end_epoch()
    assert train.ledger.dense_macs == 8 * (4 * 16 * (8 + 16) + 16 * 5)
    for example in (x, (x,), {"x": x}):
        assert summary(model, example).dense_macs == train.ledger.dense_macs


def test_another_default_device_changes_nothing() -> None:
    expected = RankSampler(low_rank_model(), seed=3)
    sampler = RankSampler(model := low_rank_model(), seed=3)
    with torch.device("meta"):
        drawn = [sampler.sample() for _ in range(30)]
        spent = Allocation(
            {"a": torch.tensor([1.0, 0.5, 0.0], device="cpu")}, {"a": range(1, 3)},
            lambda name, rank: 10 * rank, most=15,
        )  # fmt: skip
        ranks_kept = spent.within(15)
    assert drawn == [expected.sample() for _ in range(30)]
    assert ranks_kept == {"a": 1}
    assert sampler.state_dict()["pending"].device == model[0].u.device


# -- trainers that call back -------------------------------------------------------------------


def test_a_step_that_begins_and_ends_is_the_with_block():
    one, other = low_rank_model(), low_rank_model()
    blocks, calls = LoD(one, sgd(one), seed=4), LoD(other, sgd(other), seed=4)
    for i in range(3):
        x, _ = batch(0, i)
        with blocks.step() as drawn:
            expected = one(x)
        assert calls.begin_step() == drawn
        assert torch.equal(other(x), expected)
        calls.end_step()
    for train in (blocks, calls):
        train.optimizer.step()
    assert calls.end_epoch() == blocks.end_epoch()
    assert_same(blocks.state_dict(), calls.state_dict())
    assert ranks(other) == RANKS, "all ranks are active again"


def test_steps_that_do_not_begin_and_end_in_turn_are_refused():
    model = low_rank_model()
    train = LoD(model, sgd(model))
    with pytest.raises(TrainingError, match="without a step"):
        train.end_step()
    train.begin_step()
    for begin in (train.begin_step, lambda: one_step(model, train)):
        with pytest.raises(TrainingError, match="the previous step has not ended"):
            begin()
    train.end_step()
    with pytest.raises(TrainingError, match="without a step"):
        train.end_step()
    one_step(model, train)
    full = LoD(model, sgd(model), full_pass=True)
    with pytest.raises(OptionError, match="two passes"):
        full.begin_step()


def test_a_with_block_inside_a_begun_step_leaves_that_step_as_it_was():
    model = low_rank_model()
    train = LoD(model, sgd(model))
    drawn = train.begin_step()
    with pytest.raises(TrainingError, match="the previous step has not ended"), train.step():
        pass
    active = {name: layers(model)[name].active_rank for name in drawn}
    assert active == drawn
    train.end_step()


def test_a_copy_taken_inside_a_step_runs_at_all_ranks():
    model = low_rank_model()
    train, (x, _) = LoD(model, sgd(model)), batch(0, 0)
    full = model(x)
    with train.step():
        copied = copy.deepcopy(model)
        model(x)
        assert torch.equal(copied(x), full)
    assert torch.equal(copied(x), full)


def test_a_step_that_ends_in_another_thread_than_it_began_in_is_refused():
    model = low_rank_model()
    train = LoD(model, sgd(model))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train.begin_step).result()
    with pytest.raises(TrainingError, match="another thread"):
        train.end_step()


def pieces(model: nn.Module, kind: str) -> None:
    """Freeze a factor, or take all ranks of a layer away."""
    if kind == "frozen":
        layers(model)["3"].u.requires_grad_(False)
        layers(model)["3"].v.requires_grad_(False)
    if kind == "one factor frozen":
        layers(model)["0"].v.requires_grad_(False)
    if kind == "rank 0":
        cut(model, {"3": 0})


@pytest.mark.parametrize("kind", ["all", "frozen", "one factor frozen", "rank 0"])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make", [sgd, adam])
def test_penalty_gradients_are_those_of_the_loss_term(make, clip, kind):
    models = [low_rank_model(), low_rank_model()]
    for model in models:
        pieces(model, kind)
    optimizers = [make(model) for model in models]
    trains = [
        LoD(model, optimizer, penalty=0.02, threshold=None)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for step in range(3):
        for model, train in zip(models, trains, strict=True):
            by_loss = model is models[0]
            for i in range(2):  # batches that are accumulated
                x, y = batch(step, i)
                with train.step():
                    loss = F.cross_entropy(model(x), y)
                    ((loss + train.penalty_loss() if by_loss else loss) / 2).backward()
            if not by_loss:
                train.add_penalty_gradients()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        for (name, one), other in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                torch.testing.assert_close(other.grad, one.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"penalty": 0.02, "proximal": True}, {"penalty": 0.0}])
def test_no_penalty_gradients_where_there_is_no_loss_term(options):
    model = low_rank_model()
    LoD(model, sgd(model), **options).add_penalty_gradients()
    assert all(p.grad is None for p in model.parameters())
