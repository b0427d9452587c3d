"""LoD under Accelerate: the same weights as a loop by hand, resume, trackers, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from maestro_lod import Elastic, LoD, at_ranks, decompose, ranks, shrink
from maestro_lod.errors import LayerError, OptionError, TrainingError
from maestro_lod.layers import LowRank
from maestro_lod.train.method import RunPlan
from tests.support import trainers as task

pytest.importorskip("accelerate")
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker

from maestro_lod.integrations.accelerate import AcceleratedLoD


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    """Accelerate shares its state among all accelerators of a process."""
    yield
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


class Run:
    """One training in Accelerate's own idiom, from the start or from a directory."""

    def __init__(
        self,
        case: task.Case = task.SGD,
        accelerator: Accelerator | None = None,
        count: int = 36,
        batch: int = task.BATCH,
        elastic: bool = False,
    ) -> None:
        self.accelerator = accelerator or Accelerator(
            cpu=True,
            gradient_accumulation_steps=task.ACCUMULATED,
            step_scheduler_with_optimizer=False,
            mixed_precision="bf16" if case.bf16 else "no",
        )
        self.inner = decompose(case.network())
        optimizer = case.optimizer_of(self.inner)
        loader = DataLoader(TensorDataset(*case.samples(count)), batch_size=batch)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.inner, optimizer, loader, task.decay(optimizer)
        )
        plan = RunPlan(
            task.EPOCHS, 3, task.decay(optimizer).lr_lambdas[0], batches=self.loader,
            loss=F.cross_entropy,
        )  # fmt: skip
        options: dict[str, Any] = {"method": Elastic, **task.ELASTIC} if elastic else case.options
        self.train = AcceleratedLoD(
            self.accelerator, self.model, self.optimizer, plan if elastic else None, **options
        )

    def epochs(self, first: int, end: int, save_in: Path | None = None) -> None:
        for epoch in range(first, end):
            for i, (x, y) in enumerate(self.loader):
                self.batch(x, y)
                if i == 3 and save_in is not None:
                    self.accelerator.save_state(str(save_in / f"within {epoch}"))
            self.train.end_epoch(last=epoch + 1 == task.EPOCHS)
            if save_in is not None:
                self.accelerator.save_state(str(save_in / f"after {epoch}"))

    def batch(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with self.train.accumulate():
            with self.accelerator.autocast():
                loss = F.cross_entropy(self.model(x), y)
            self.train.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), task.CLIP)
            self.optimizer.step()
            if self.accelerator.sync_gradients:
                self.scheduler.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("case", task.CASES.values(), ids=task.CASES)
def test_the_same_weights_as_by_hand(case: task.Case) -> None:
    run = Run(case)
    run.epochs(0, task.EPOCHS)
    hand = task.by_hand(case)
    task.assert_same_weights(run.model, hand.model)
    assert run.train.steps == 3 * task.EPOCHS
    assert sum(ranks(run.model).values()) < 20


def test_a_run_goes_on_from_a_directory_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    Run().epochs(0, 3, save_in=tmp_path)
    expected = task.by_hand().model
    for epoch in (0, 2):
        again = Run()
        again.accelerator.load_state(str(tmp_path / f"after {epoch}"))
        assert again.train.lod.epoch == epoch + 1
        again.epochs(epoch + 1, task.EPOCHS)
        task.assert_same_weights(again.model, expected)
    within = Run()
    within.accelerator.load_state(str(tmp_path / "within 1"))
    for x, y in within.accelerator.skip_first_batches(within.loader, 4):
        within.batch(x, y)
    within.train.end_epoch()
    within.epochs(2, task.EPOCHS)
    task.assert_same_weights(within.model, expected)


@pytest.mark.parametrize(
    "case", [case for name, case in task.CASES.items() if name != "proximal"],
    ids=[name for name in task.CASES if name != "proximal"],
)  # fmt: skip
def test_elastic_gives_the_same_weights_as_by_hand(case: task.Case) -> None:
    run = Run(case, elastic=True)
    run.epochs(0, task.EPOCHS)
    task.assert_same_weights(run.model, task.elastic_by_hand(case, single=True).model)


def test_elastic_goes_on_from_a_directory_in_either_phase(tmp_path: Path) -> None:
    run = Run(elastic=True)
    run.epochs(0, task.EPOCHS, save_in=tmp_path)
    for epoch in (0, 2):
        again = Run(elastic=True)
        again.accelerator.load_state(str(tmp_path / f"after {epoch}"))
        again.epochs(epoch + 1, task.EPOCHS)
        task.assert_same_weights(again.model, run.model)
    within = Run(elastic=True)
    within.accelerator.load_state(str(tmp_path / "within 3"))
    for x, y in within.accelerator.skip_first_batches(within.loader, 4):
        within.batch(x, y)
    within.train.end_epoch(last=True)
    task.assert_same_weights(within.model, run.model)


def test_elastic_asks_for_a_plan() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(
        model := decompose(task.SGD.network()), task.SGD.optimizer_of(model)
    )
    for plan in (None, RunPlan(4, 3)):
        with pytest.raises(OptionError, match=r"batches=loader, loss=loss"):
            AcceleratedLoD(accelerator, model, optimizer, plan, method=Elastic)


def test_an_older_larger_state_is_loaded_evaluated_at_chosen_ranks_and_trained_on(
    tmp_path: Path,
) -> None:
    run, (x, _) = Run(), task.SGD.samples()
    run.epochs(0, 3, save_in=tmp_path)
    small, last = sum(ranks(run.model).values()), run.model(x).detach()
    run.accelerator.load_state(str(tmp_path / "after 0"))
    assert sum(ranks(run.model).values()) > small
    whole = run.model(x).detach()
    with at_ranks(run.model, 2):
        at_two = run.model(x).detach()
    assert (whole - last).abs().max() > 1e-3 and (at_two - whole).abs().max() > 1e-3
    torch.testing.assert_close(run.model(x).detach(), whole, rtol=0, atol=0)
    run.epochs(1, task.EPOCHS)
    task.assert_same_weights(run.model, task.by_hand().model)


def test_ranks_and_cost_reach_the_trackers() -> None:
    class Tracker(GeneralTracker):
        name, requires_logging_directory = "kept", False

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int, dict[str, float]]] = []

        @property
        def tracker(self) -> list[Any]:
            return self.logged

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            return

        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            assert step is not None
            self.logged.append((step, values))

    tracker = Tracker()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=task.ACCUMULATED, log_with=tracker
    )
    accelerator.init_trackers("runs")
    run = Run(accelerator=accelerator)
    run.epochs(0, 2)
    assert [step for step, _ in tracker.logged] == [3, 6]
    assert tracker.logged[-1][1]["lod/total_rank"] == sum(ranks(run.model).values())
    assert tracker.logged[-1][1]["lod/rank/0"] == ranks(run.model)["0"]


@pytest.mark.parametrize("proximal", [False, True])
def test_lod_itself_takes_what_accelerate_prepared(proximal: bool) -> None:
    model, optimizer = Accelerator(cpu=True).prepare(
        model := decompose(task.SGD.network()), task.SGD.optimizer_of(model)
    )
    assert type(optimizer) is not optim.SGD
    train = LoD(model, optimizer, penalty=0.05, threshold=0.3, proximal=proximal)
    x, y = task.SGD.samples()
    before = sum(ranks(model).values())
    for _ in range(10):
        with train.step():
            (F.cross_entropy(model(x), y) + train.penalty_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert train.end_epoch()
    lost = shrink(model, optimizer, threshold=1.0, min_rank=1)
    assert sum(ranks(model).values()) < before
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert lost
    assert held == {id(p) for p in model.parameters()}


def test_wrong_use_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    dense, optimizer = accelerator.prepare(
        model := task.SGD.network(), task.SGD.optimizer_of(model)
    )
    with pytest.raises(LayerError, match=r"no low-rank layer. Call decompose\(model\) first"):
        AcceleratedLoD(accelerator, dense, optimizer)
    decompose(dense)
    with pytest.raises(TrainingError, match="after decompose"):
        AcceleratedLoD(accelerator, dense, optimizer)

    run = Run(accelerator=accelerator)
    with pytest.raises(OptionError, match="already has an AcceleratedLoD"):
        AcceleratedLoD(accelerator, run.model, run.optimizer)
    with pytest.raises(TrainingError, match="the epoch had no step"):
        run.train.end_epoch()
    x, y = task.SGD.samples()
    with pytest.raises(TrainingError, match="called twice or outside of a step"):
        run.train.backward(run.model(x).sum())
    with run.train.accumulate():
        run.train.backward(F.cross_entropy(run.model(x), y))
        with pytest.raises(TrainingError, match="with the sum of the losses"):
            run.train.backward(run.model(x).sum())
    with pytest.raises(ZeroDivisionError), run.train.accumulate():
        _ = 1 / 0
    layers = [m for m in run.model.modules() if isinstance(m, LowRank)]
    assert all(layer.active_rank == layer.rank for layer in layers)
    accelerator.scaler = object()  # as float16 has one on a GPU
    with pytest.raises(OptionError, match="Use proximal=True, or bf16"):
        Run(accelerator=accelerator)
    accelerator.state.distributed_type = DistributedType.FSDP  # as on a GPU; a CPU has DDP instead
    with pytest.raises(OptionError, match=r"Accelerate's FSDP .* Use DDP"):
        AcceleratedLoD(accelerator, run.model, run.optimizer)


def test_a_penalty_that_never_arrives_is_an_error() -> None:
    run = Run()
    x, y = task.SGD.samples()
    for _ in range(task.ACCUMULATED):
        with run.train.accumulate():
            run.accelerator.backward(F.cross_entropy(run.model(x), y))  # not train.backward
            run.optimizer.step()
    with pytest.raises(TrainingError, match="was not applied in epoch 0"):
        run.train.end_epoch()
