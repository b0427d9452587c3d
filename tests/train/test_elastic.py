"""Every size from one training: two phases, a frozen teacher, nested sizes, exact resume."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers.ranks import at_ranks, low_rank_layers, match_ranks
from maestro_lod.model.cost import cost_of, count_params
from maestro_lod.sizes.latency import all_dense
from maestro_lod.train.consolidation import comparison_for
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.fit import FitOptions, Watch
from maestro_lod.train.method import RunPlan
from maestro_lod.train.progress import Progress
from maestro_lod.train.schedule import cosine
from tests.support.kinds import KINDS, Kind
from tests.support.small import MODELS, batches

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Stop(Exception):
    pass


def made(
    kind: str = "mlp", name: str = "sgd", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, Any, Elastic]:
    torch.manual_seed(0)
    make, _ = MODELS[kind]
    model = lod.decompose(make().to(dtype))
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, Elastic(model, optimizer, **{"smallest": 0.2, **options})


def same(one: nn.Module, other: nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


# -- the whole phase -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_whole_phase_is_dense_training_bit_for_bit(kind: str, name: str) -> None:
    """The teacher is what dense training, from the same weights and schedule, ends with."""
    data = [(x.double(), y) for x, y in batches(MODELS[kind][1])]
    model, optimizer, train = made(kind, name, torch.float64)
    twin, other, begun = made(kind, name, torch.float64)
    begun.start(twin, other, RunPlan(4, 4, batches=data, loss=F.cross_entropy))
    dense = all_dense(twin)

    def schedule(step: int) -> float:
        return 1.0 if step < 6 else 0.3

    lod.fit(model, data, optimizer=optimizer, method=train, epochs=3, schedule=schedule)
    own = OPTIMIZERS[name](dense.parameters())
    lod.fit(dense, data, optimizer=own, epochs=3, schedule=schedule)
    assert train.teacher is not None
    if kind == "mlp":
        same(dense, train.teacher)
    else:  # convolutions sum in another order
        x = data[0][0]
        torch.testing.assert_close(dense.eval()(x), train.teacher(x), rtol=1e-8, atol=1e-9)


@given(epochs=st.integers(0, 2000))
def test_a_plan_divides_epochs_as_fit_adds_them(epochs: int) -> None:
    _, _, train = made()
    total = train.total_epochs(epochs)
    assert total == epochs + (max(1, round(0.4 * epochs)) if epochs else 0)
    model, optimizer, train = made()
    if total:
        train.start(
            model, optimizer, RunPlan(total, 1, batches=batches((6,), 1), loss=F.cross_entropy)
        )
        assert train.whole_epochs == epochs


def test_a_run_may_become_longer_until_consolidation_begins() -> None:
    data, done = batches((6,)), Progress()
    model, optimizer, train = made()

    def stop(progress: Progress) -> None:
        if progress.epoch == 1:
            raise Stop

    with pytest.raises(Stop):
        lod.fit(
            model, data, optimizer=optimizer, method=train, epochs=2, progress=done,
            watch=Watch(epoch=stop),
        )  # fmt: skip
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=5, progress=done)
    assert (train.whole_epochs, train.epochs, done.epoch) == (5, 7, 7)
    with pytest.raises(OptionError, match="planned for a run of 7 epochs"):
        lod.fit(model, data, optimizer=optimizer, method=train, epochs=10, progress=done)


def test_a_trained_model_is_consolidated_from_the_first_step() -> None:
    data = batches((6,))
    model, optimizer, train = made(trained=True)
    before = model(data[0][0]).detach()
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=2)
    assert train.whole_epochs == 0 and train.epoch == 2
    assert [
        epoch.phase
        for epoch in lod.fit(model, data, optimizer=optimizer, method=train, epochs=0).history
    ] == []
    assert train.teacher is not None
    torch.testing.assert_close(train.teacher(data[0][0]), before, rtol=1e-4, atol=1e-5)


# -- from the whole model to its sizes -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no calibration sample reached")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ordering_ranks_leaves_outputs_as_they_are(kind: Kind) -> None:
    dense = kind.dense(torch.float64).train()
    inputs = [kind.inputs(torch.float64, seed) for seed in range(3)]
    model = lod.decompose(dense, tied=kind.tied)

    def output(m: nn.Module, x: Any) -> Tensor:
        found = m(*x)
        return found if isinstance(found, Tensor) else found[0]

    before = [output(model.eval(), x).detach() for x in inputs]

    def loss(out: Any, target: Any) -> Tensor:
        return (out if isinstance(out, Tensor) else out[0]).square().mean()

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    train = Elastic(model, optimizer, smallest=0.3, trained=True)
    data = [(x, torch.zeros(1)) for x in inputs]
    train.start(model, optimizer, RunPlan(1, 3, batches=data, loss=loss))
    assert train.teacher is not None and not low_rank_layers(train.teacher)
    for x, wanted in zip(inputs, before, strict=True):
        torch.testing.assert_close(output(model, x), wanted, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(output(train.teacher, x), wanted, rtol=1e-6, atol=1e-8)
    assert train.rungs.ranks[0] == lod.ranks(model)


@pytest.mark.parametrize("kind", MODELS)
def test_sizes_are_nested_within_their_limits_and_in_order(kind: str) -> None:
    data = batches(MODELS[kind][1])
    model, optimizer, train = made(kind)
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=1)
    costs = train.ledger.costs(model)
    for limit, ranks in zip(train.rungs.limits, train.rungs.ranks, strict=True):
        assert costs.at(ranks).params <= limit
        assert min(ranks.values()) >= 1
    for larger, smaller in pairwise(train.rungs.ranks):
        assert all(smaller[name] <= rank for name, rank in larger.items())
    sizes = [limit / costs.dense.params for limit in train.rungs.limits]
    middle = (sizes[3] + sizes[4]) / 2
    between = train.ranks_at(middle)
    assert costs.at(between).params <= middle * costs.dense.params
    for name, rank in between.items():
        assert train.rungs.ranks[4][name] <= rank <= train.rungs.ranks[3][name]
    assert train.ranks_at(train.rungs.limits[5]) == train.rungs.ranks[5]
    with pytest.raises(OptionError, match="was not trained"):
        train.ranks_at(0.01)


def test_draws_are_as_likely_as_the_ledger_takes_them_to_be() -> None:
    model, optimizer, train = made()
    lod.fit(model, batches((6,)), optimizer=optimizer, method=train, epochs=1)
    draws = 4000
    seen = Counter(pair for _ in range(draws) for pair in train.rungs.draw().items())
    for name, chances in train._chances().items():
        assert sum(chances) == pytest.approx(1)
        for rank, chance in enumerate(chances, 1):
            assert seen[name, rank] / draws == pytest.approx(chance, abs=0.03)


def test_frozen_layers_keep_their_ranks_and_their_values() -> None:
    torch.manual_seed(0)
    model = lod.decompose(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train = Elastic(model, optimizer, smallest=0.1)
    lod.fit(model, batches((6,)), optimizer=optimizer, method=train, epochs=3)
    for key, value in model[0].state_dict().items():
        assert torch.equal(value, before[key]), key
    assert {ranks["0"] for ranks in train.rungs.ranks} == {6}


# -- consolidation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_sizes_are_better_than_they_were(kind: str, name: str) -> None:
    data = batches(MODELS[kind][1])
    model, optimizer, train = made(kind, name, trained=True)
    dense = all_dense(model)
    lod.fit(dense, data, optimizer=OPTIMIZERS[name](dense.parameters()), epochs=15)
    model = lod.decompose(dense)
    optimizer = OPTIMIZERS[name](model.parameters())
    train = Elastic(model, optimizer, smallest=0.2, trained=True)
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=12)
    now = train._losses_of_sizes(train._objective(data))
    assert sum(now) < 0.9 * sum(train._began)


def test_the_teacher_stays_as_it_was_and_has_no_gradients() -> None:
    data = batches((2, 6, 6))
    model, optimizer, train = made("cnn", trained=True)
    train.start(model, optimizer, RunPlan(2, 4, batches=data, loss=F.cross_entropy))
    assert train.teacher is not None
    before = copy.deepcopy(train.teacher.state_dict())
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=2)
    for key, value in train.teacher.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not any(p.requires_grad or p.grad is not None for p in train.teacher.parameters())
    assert not train.teacher.training


def test_a_consolidation_that_makes_sizes_worse_is_undone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = batches((2, 6, 6))
    model, optimizer, train = made("cnn")
    dense = all_dense(model)
    lod.fit(dense, data, optimizer=OPTIMIZERS["adam"](dense.parameters()), epochs=10)
    model = lod.decompose(copy.deepcopy(dense))
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    train = Elastic(model, optimizer, smallest=0.3, trained=True)
    with caplog.at_level(logging.WARNING):
        lod.fit(model, data, optimizer=optimizer, method=train, epochs=1)
    assert "are kept" in caplog.text
    x = data[0][0]
    torch.testing.assert_close(model.eval()(x), dense.eval()(x), rtol=1e-3, atol=1e-4)
    now = train._losses_of_sizes(train._objective(data))
    assert now == pytest.approx(train._began, rel=1e-4)


def test_what_sizes_learn_from() -> None:
    x, y = torch.randn(8, 5, requires_grad=True), torch.randint(5, (8,))
    teacher = torch.randn(8, 5)
    values, scores = comparison_for(nn.MSELoss()), comparison_for(F.cross_entropy)
    assert values is not None and scores is not None
    torch.testing.assert_close(values(x, teacher, y), F.mse_loss(x, teacher))
    torch.testing.assert_close(
        scores(x, teacher, y), -(x.log_softmax(1) * teacher.softmax(1)).sum(1).mean()
    )
    assert comparison_for(lambda output, target: output.mean()) is None
    model, optimizer, train = made(trained=True)
    data = batches((6,))
    train.start(model, optimizer, RunPlan(2, 4, batches=data, loss=F.cross_entropy))
    seen: list[bool] = []

    def soft(output: Tensor, teacher: Tensor) -> Tensor:
        seen.append(teacher.requires_grad)
        return F.mse_loss(output, teacher)

    def forward(m: nn.Module = model) -> Any:
        return m(data[0][0])

    train.backward(forward, lambda out: F.cross_entropy(out, data[0][1]), soft_loss=soft)
    assert seen == [False]
    state = train.rungs.state_dict()
    alone = train.backward(forward, lambda out: 3 * out.square().mean())
    train.rungs.load_state_dict(state)
    with at_ranks(model, train.rungs.draw()):
        torch.testing.assert_close(alone, 3 * model(data[0][0]).square().mean().detach())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_learning_rates_follow_an_own_schedule_from_the_initial_rate(kind: Any) -> None:
    data = batches((6,), 10)
    model, _, _ = made()
    optimizer = kind(model.parameters(), lr=0.05)
    train = Elastic(model, optimizer)
    rates: list[float] = []
    shares: list[float] = []

    def note(_: object) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        shares.append(train.rungs.share if train.rungs.limits else 1.0)

    lod.fit(
        model, data, optimizer=optimizer, method=train, epochs=5, watch=Watch(step=note),
        schedule=lambda step: 0.1,
    )  # fmt: skip
    assert rates[:50] == pytest.approx([0.005] * 50) and len(rates) == 70
    assert min(shares[50:]) < 0.5 and max(shares[50:]) == 1.0
    pace, most = cosine(20, warmup=1), 5 / math.sqrt(len(lod.ranks(model)))
    adam = [min(0.5 / share, most) for share in shares[50:]]
    expected = [2.0] * 20 if kind is torch.optim.SGD else adam
    assert rates[50:] == pytest.approx([0.05 * pace(i) * r for i, r in enumerate(expected)])


def test_gradients_are_no_longer_than_the_warm_up_allows() -> None:
    data = batches((6,), 10)
    model, optimizer, train = made(trained=True)
    lengths: list[float] = []

    def note(*_: Any) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        lengths.append(float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))))

    optimizer.register_step_pre_hook(note)  # after the one of the method
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=4)
    assert train._pace.norm is not None
    limit = 0.35 * float(train._pace.norm)
    assert max(lengths[2:]) <= limit * 1.001 and len(lengths) == 40
    assert sum(length > 0.99 * limit for length in lengths) > 4


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_options_of_fit_go_with_both_phases(amp: bool, accumulate: int) -> None:
    model, optimizer, train = made("cnn", "adamw")
    progress = lod.fit(
        model, batches((2, 6, 6), 6), optimizer=optimizer, method=train, epochs=6,
        options=FitOptions(amp=amp, accumulate=accumulate, clip_norm=1.0),
    )  # fmt: skip
    assert progress.epoch == 8 and progress.step == 8 * (6 // accumulate)
    assert progress.history[5].train["loss"] < progress.history[0].train["loss"]


def test_it_works_in_double_precision() -> None:
    data = [(x.double(), y) for x, y in batches((2, 6, 6))]
    model, optimizer, train = made("cnn", dtype=torch.float64)
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=3)
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_a_compiled_model_trains_as_the_model_does() -> None:
    data, models = batches((6,)), []
    for compiled in (False, True):
        model, optimizer, train = made()
        run = torch.compile(model, backend="eager") if compiled else model
        lod.fit(run, data, optimizer=optimizer, method=train, epochs=5)
        models.append(model)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_moves_and_counts_nothing(fused: bool) -> None:
    model, _, _ = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    train = Elastic(model, optimizer, smallest=0.2, trained=True)
    data = batches((6,), 10)
    train.start(model, optimizer, RunPlan(4, 10, batches=data, loss=F.cross_entropy))
    scaler = torch.amp.GradScaler("cpu")
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        before, passed = copy.deepcopy(model.state_dict()), train._pace.step
        x, y = data[step]
        train.backward(
            lambda m=model, x=x: m(x),
            lambda output, y=y: F.cross_entropy(output, y),
            weight=float(scaler.get_scale()),
        )
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        scaler.scale(torch.zeros(()))  # which its own backward would have done
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert moved == (factor == 1.0) == (train._pace.step == passed + 1)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"smallest": None, "sizes": [0.7]}], ids=["all", "one"])
def test_an_averaged_copy_follows_into_the_order_and_the_ranks_of_the_model(
    options: dict[str, Any],
) -> None:
    data = batches((2, 6, 6), 10)
    model, optimizer, _ = made("cnn", "adamw")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    train = Elastic(model, optimizer, **{"smallest": 0.3, **options}, ema=average)
    watch = Watch(step=lambda progress: average.update_parameters(model))
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=10, watch=watch)
    assert lod.ranks(average.module) == lod.ranks(model)
    states = model.state_dict(), average.module.state_dict()
    assert any(not torch.equal(value, states[1][key]) for key, value in states[0].items())
    for rung in (train.rungs.ranks[0], train.rungs.ranks[-1]):
        reached = []
        for each in (model, average.module):
            with at_ranks(each, rung):
                reached.append(lod.evaluate(each, data)["loss"])
        assert reached[1] == pytest.approx(reached[0], rel=0.2, abs=0.1)


def test_an_averaged_copy_that_was_not_given_is_named() -> None:
    model, optimizer, train = made()
    average = AveragedModel(model)
    with pytest.raises(TrainingError, match="as ema="):
        lod.fit(model, batches((6,)), optimizer=optimizer, method=train, epochs=1)
    del average


def test_optimizers_that_evaluate_a_closure_are_refused() -> None:
    model = lod.decompose(MODELS["mlp"][0]())
    with pytest.raises(TrainingError, match="LBFGS"):
        Elastic(model, torch.optim.LBFGS(model.parameters()), smallest=0.2)

    class Sharpness(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    with pytest.raises(TrainingError, match="Sharpness evaluates the loss in its steps"):
        Elastic(model, Sharpness(model.parameters(), lr=0.1), smallest=0.2)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(40, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(self.words(x))))
        return scores.mean(1)


@pytest.mark.parametrize("tied", ["keep", "share"])
def test_tied_embeddings_are_trained_in_both_phases(tied: Any) -> None:
    torch.manual_seed(0)
    model = lod.decompose(Tied(), tied=tied)
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(40, (8, 16, 5), generator=draw)
    data = [(part, part[:, 0]) for part in x]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = Elastic(model, optimizer, smallest=0.5)
    progress = lod.fit(model, data, optimizer=optimizer, method=train, epochs=8)
    assert progress.history[-1].train["loss"] < 0.8 * progress.history[0].train["loss"]
    plain = lod.extract(model, train.rungs.ranks[-1])
    assert count_params(plain) <= train.rungs.limits[-1]


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), F.mse_loss, lambda output, target: (output - target).abs().mean()],
    ids=["MSELoss", "mse_loss", "own"],
)
def test_regressions_are_trained_at_every_size(loss: Any) -> None:
    torch.manual_seed(0)
    model = lod.decompose(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train = Elastic(model, optimizer, smallest=0.3)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(8, 16, 6, generator=draw)
    data = [(part, torch.stack([part[:, :3].sum(1), part[:, 3:].prod(1)], 1)) for part in x]
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=20, loss=loss)
    with torch.no_grad(), at_ranks(model, train.rungs.ranks[5]):
        assert sum(float(loss(model(x), y)) for x, y in data) / 8 < 0.7


# -- a budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", ["params", "macs"])
def test_one_size_is_what_remains_and_is_trained_alone(cost: Any) -> None:
    model, optimizer, train = made("cnn", smallest=None, sizes=[0.6], cost=cost)
    progress = lod.fit(model, batches((2, 6, 6)), optimizer=optimizer, method=train, epochs=5)
    (ranks,) = train.rungs.ranks
    assert lod.ranks(model) == ranks
    dense, sizes = train.ledger.reference, train.ledger.deployed(model)
    reached = {"params": sizes.params / dense[0], "macs": (sizes.macs or 0) / (dense[1] or 1)}
    assert 0.3 < reached[cost] <= 0.6
    assert progress.history[-1].budget == pytest.approx(0.6, abs=0.01)
    assert [epoch.phase for epoch in progress.history] == ["whole"] * 5 + ["consolidation"] * 2


def test_several_sizes_are_trained_and_the_largest_remains() -> None:
    model, optimizer, train = made(smallest=None, sizes=[0.6, 0.9])
    lod.fit(model, batches((6,)), optimizer=optimizer, method=train, epochs=3)
    assert len(train.rungs.ranks) == 2 and lod.ranks(model) == train.rungs.ranks[0]


# -- what it costs ---------------------------------------------------------------------------------


def test_the_ledger_counts_both_phases_the_teacher_and_the_search() -> None:
    data = batches((2, 6, 6), 20)
    model, optimizer, train = made("cnn")
    progress = lod.fit(model, data, optimizer=optimizer, method=train, epochs=5)
    first, second = train.ledger.epochs[0], train.ledger.epochs[-1]
    dense = train.ledger.dense_macs
    assert first.macs == first.executed_macs == dense
    drawn = train.ledger.epoch_cost(model, train._chances()).macs
    assert dense is not None and drawn is not None and second.macs is not None
    assert second.macs == pytest.approx(drawn + dense / 3)
    searched = train.ledger.epochs[5].macs
    assert searched is not None and searched > 1.2 * second.macs  # 20 batches, against 20 steps
    whole = progress.history[0].params
    assert whole is not None and first.params >= whole
    assert train.teacher is not None
    teacher = sum(p.numel() for p in train.teacher.parameters())
    assert progress.history[-1].others == {"teacher_params": teacher}
    cost = train.training_cost()["relative_macs"]
    assert cost == pytest.approx(sum(e.macs or 0 for e in train.ledger.epochs) / 5 / dense)


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"smallest": None, "sizes": [0.7]}], ids=["all", "one"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("step", [0, 3, 7, 8, 9, 11])
def test_a_run_goes_on_exactly(
    step: int, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    data = batches((2, 6, 6))
    whole, optimizer, train = made("cnn", name, **options)
    lod.fit(whole, data, optimizer=optimizer, method=train, epochs=2)
    model, optimizer, train = made("cnn", name, **options)

    def save(progress: Progress) -> None:
        if progress.step == step or (step == 0 and progress.batch == 0):
            parts = (model, optimizer, train, progress)
            save_state([part.state_dict() for part in parts], tmp_path / "state")
            raise Stop

    watch = Watch(step=save) if step else Watch(epoch=save)
    with pytest.raises(Stop):
        lod.fit(model, data, optimizer=optimizer, method=train, epochs=2, watch=watch)
    state = load_state(tmp_path / "state")
    model, optimizer, train = made("cnn", name, seed=5, **options)
    match_ranks(model, state[0])
    for part, saved in zip((model, optimizer, train), state, strict=False):
        part.load_state_dict(saved)
    progress = Progress.from_state(state[3])
    lod.fit(model, data, optimizer=optimizer, method=train, epochs=2, progress=progress)
    same(whole, model)


def test_a_state_of_something_else_is_refused_and_changes_nothing() -> None:
    model, optimizer, train = made()
    lod.fit(model, batches((6,)), optimizer=optimizer, method=train, epochs=1)
    state = train.state_dict()
    with pytest.raises(TrainingError, match="it has no"):
        train.load_state_dict({"epoch": 1})
    with pytest.raises(TrainingError, match="other ranks"):
        train.load_state_dict({**state, "ranks": {"0": 1}})
    with pytest.raises(TrainingError, match="not a state"):
        train.load_state_dict({**state, "pace": 3})
    assert train.state_dict()["rungs"]["limits"] == state["rungs"]["limits"]


# -- several processes -----------------------------------------------------------------------------


ONE = {"smallest": None, "sizes": [0.7]}


def _trained(options: dict[str, Any]) -> list[Tensor]:
    model, optimizer, train = made("cnn", dtype=torch.float64, **options)
    data = [(x.double(), y) for x, y in batches((2, 6, 6))]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    several = dist.is_available() and dist.is_initialized()
    run = DistributedDataParallel(model) if several else model
    lod.fit(
        run, data, optimizer=optimizer, method=train, epochs=3,
        options=FitOptions(share_batches=several, recalibration=0),
    )  # fmt: skip
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, ONE], ids=["all", "one"])
def test_two_processes_train_what_one_does(options: dict[str, Any], pair: Any) -> None:
    alone = _trained(options)
    for process in pair(_trained, options):
        for one, other in zip(alone, process, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smallest": 0.0}, "smallest=0.0"),
        ({"smallest": 1}, "smallest=1"),
        ({"smallest": 0.1, "sizes": [0.5]}, "exclude each other"),
        ({"smallest": None, "sizes": []}, "leaves nothing"),
        ({"smallest": None, "sizes": [1.5]}, "size 1.5"),
        ({"smallest": None, "sizes": [True]}, "size True"),
        ({"cost": "bits"}, "cost='bits'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        made(**options)


def test_a_size_in_macs_that_cannot_be_reached_is_refused_before_anything_is_trained() -> None:
    model, optimizer, train = made(smallest=None, sizes=[0.01], cost="macs")
    before = copy.deepcopy(model)
    with pytest.raises(OptionError, match="cannot be reached"):
        lod.fit(model, batches((6,)), optimizer=optimizer, method=train, epochs=2)
    same(model, before)


def test_a_loop_that_leaves_something_out_is_told_so() -> None:
    model, optimizer, train = made()
    x, y = batches((6,))[0]
    with pytest.raises(TrainingError, match="start"):
        train.backward(lambda m=model: m(x), lambda out: F.cross_entropy(out, y))
    with pytest.raises(OptionError, match="batches=loader"):
        train.start(model, optimizer, RunPlan(3, 1))
    train.start(model, optimizer, RunPlan(3, 1, batches=[(x, y)], loss=F.cross_entropy))
    train.backward(lambda m=model: m(x), lambda out: F.cross_entropy(out, y))
    with pytest.raises(TrainingError, match=r"optimizer\.step"):
        train.end_epoch()
    other, its, _ = made()
    with pytest.raises(OptionError, match="another model"):
        train.start(other, its, RunPlan(3, 1, batches=[(x, y)], loss=F.cross_entropy))


def test_a_recipe_chooses_it_in_place_of_its_penalty() -> None:
    chosen: Any = load_recipe("lenet-mnist", ["elastic=0.2", "elastic_cost=macs"]).settings
    assert (chosen.elastic, chosen.penalty) == (0.2, 0.0)
    model = chosen.prepare(LeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = torch.empty(1, 1, 28, 28)
    dense = cost_of(LeNet(), example)
    train = chosen.make(model, optimizer, example=example, seed=0, dense=dense)
    assert (train.smallest, train.cost) == (0.2, "macs")
    assert train.ledger.other_dense == (dense.params, dense.macs)
