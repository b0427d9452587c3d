"""The training loop: by any method, from the start or resumed at any step."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from maestro_lod.distributed.batch_norm import WholeBatchNorm
from maestro_lod.distributed.ddp import follow, inside, quiet
from maestro_lod.errors import (
    OptionError,
    TrainingError,
    require_at_least_one,
    require_bool,
    require_nonnegative,
    require_seed,
    require_whole,
)
from maestro_lod.layers import composed_once
from maestro_lod.model.inputs import (
    Batch,
    Loss,
    ModelInputs,
    autocast,
    device_of,
    on_device,
    split_batch,
)
from maestro_lod.progress import ProgressLine
from maestro_lod.train.consolidation import comparison_for
from maestro_lod.train.dense import Dense
from maestro_lod.train.diagnostics import (
    require_finite_parameters,
    require_loss,
    require_trainable,
)
from maestro_lod.train.evaluate import (
    CrossEntropy,
    Score,
    evaluate,
    judge,
    recalibrate,
    sums,
    to_evaluate,
)
from maestro_lod.train.method import Method, RunPlan, Schedule, total_epochs
from maestro_lod.train.progress import EpochRecord, Progress, random_states, set_random_states
from maestro_lod.train.schedule import from_scheduler
from maestro_lod.train.shared_batches import share_of, whole_score


def _ignore(progress: Progress) -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """Callbacks after each optimizer step and each epoch; an exception in one ends the training."""

    step: Callable[[Progress], object] = _ignore
    epoch: Callable[[Progress], object] = _ignore


@dataclass(frozen=True)
class FitOptions:
    """Options of `fit` that most trainings leave at their defaults."""

    clip_norm: float | None = None
    """The largest norm of a step's gradient."""
    accumulate: int = 1
    """Batches per optimizer step."""
    amp: bool = False
    """Compute in bfloat16 where that is safe."""
    recalibration: int = 100
    """Most batches on which BatchNorm is recalibrated after each epoch, before it is evaluated."""
    share_batches: bool = False
    """Whether all processes are given the same batches, and each trains on its part of them."""

    def __post_init__(self) -> None:
        require_bool("amp", self.amp)
        require_bool("share_batches", self.share_batches)
        require_whole("recalibration", self.recalibration)
        require_at_least_one("accumulate", self.accumulate, "the batches per optimizer step")
        if self.clip_norm is not None and require_nonnegative("clip_norm", self.clip_norm) == 0.0:
            raise OptionError("clip_norm=0 would stop all training; leave it None not to clip.")


def fit(
    model: nn.Module,
    train_data: Iterable[Batch],
    *,
    optimizer: Optimizer,
    epochs: int,
    method: Method | None = None,
    loss: Loss | None = None,
    validation: Iterable[Batch] | None = None,
    schedule: Schedule | LRScheduler | None = None,
    seed: int = 0,
    options: FitOptions | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Progress:
    """Train a model in place.

    >>> train = LoD(model, optimizer, penalty=1e-4)
    >>> fit(model, loader, optimizer=optimizer, method=train, epochs=20, validation=held_out)

    Before each epoch torch's global generator is seeded from `seed` and the epoch, so that a run
    repeats exactly.

    Args:
        model: The model; low-rank ones need a method.
        train_data: Returns the same batches each time it is iterated: pairs (inputs, target),
            whose inputs may be a tuple or mapping of arguments; or mappings of arguments, whose
            `labels` are the target.
        optimizer: The optimizer; one for the whole model.
        epochs: How many times to go through the training data, in all: a resumed run included. A
            method may add epochs of its own: `Elastic` adds two for every five.
        method: How to train, such as `LoD`, `BudgetTraining` or `ElasticTraining`; by default the
            model is trained as it is.
        loss: Returns the loss of (output, target). By default cross-entropy, or the `loss` that an
            output has, as those of transformers' models do. Where a method distils, the loss has a
            method `soft(output, teacher, target)`, or outputs are scores (N, classes).
        validation: Batches to evaluate on after each epoch.
        schedule: One of torch's schedulers, or a function that returns the share of the learning
            rate at a step.
        seed: Seed of everything that is random.
        options: Clipping, accumulation, precision and the like.
        progress: Continues a run from where its `state_dict()` was taken, also in the middle of an
            epoch, once model, optimizer and method are restored.
        watch: Callbacks after each step and each epoch; by default progress lines.

    Returns:
        The record of the run: one entry per epoch.

    Raises:
        OptionError: An option is invalid, or the loss cannot be computed from the data.
        TrainingError: There is no data, or the training has diverged.
    """
    require_whole("epochs", epochs)
    require_seed(seed)
    require_trainable(model)
    epochs = total_epochs(method, epochs)
    progress, watch = progress or Progress(), watch or default_watch(epochs)
    method, loss, options = method or Dense(), loss or CrossEntropy(), options or FitOptions()
    plan = _plan(train_data, epochs, options.accumulate, schedule, optimizer, loss)
    method.start(model, optimizer, plan)
    one_step = _Step(model, optimizer, method, loss, plan.schedule, options)
    while progress.epoch < epochs:
        _steps_of_epoch(_batches(train_data, seed, progress), one_step, progress, watch)
        _end_epoch(one_step, progress, train_data, validation, last=progress.epoch + 1 == epochs)
        watch.epoch(progress)
    return progress


def _plan(
    train_data: Iterable[Batch],
    epochs: int,
    accumulate: int,
    schedule: object,
    optimizer: Optimizer,
    loss: Loss,
) -> RunPlan:
    """Return how long the training lasts, and the share of the learning rate at each step."""
    steps = _steps_per_epoch(train_data, accumulate)
    if isinstance(schedule, LRScheduler | ReduceLROnPlateau):
        schedule = from_scheduler(schedule, optimizer, epochs, steps)
    elif schedule is not None and not callable(schedule):
        raise OptionError(f"schedule={schedule!r} is neither a function of the step nor torch's.")
    judged = judge(train_data, to_evaluate(loss))
    return RunPlan(epochs, steps, schedule, judged, train_data, loss)


def _steps_of_epoch(
    batches: Iterator[Batch], one_step: _Step, progress: Progress, watch: Watch
) -> None:
    """Do the remaining steps of an epoch; only they count as training time."""
    one_step.model.train()
    began = time.perf_counter()
    while group := list(itertools.islice(batches, one_step.options.accumulate)):
        one_step(group, progress)
        progress.seconds += time.perf_counter() - began
        watch.step(progress)
        began = time.perf_counter()
    if progress.batch == 0:
        raise TrainingError("the training data has no batch: nothing would be trained.")


def _end_epoch(
    done: _Step,
    progress: Progress,
    train_data: Iterable[Batch],
    validation: Iterable[Batch] | None,
    *,
    last: bool,
) -> None:
    """End the epoch of the method, evaluate the model, and append the record of the epoch."""
    model, amp = done.model, done.options.amp
    require_finite_parameters(model)
    done.method.end_epoch(last=last)
    follow(model)
    said = done.method.record()
    if said.note is not None:
        warnings.warn(said.note, UserWarning, stacklevel=3)
    recalibrate(inside(model), train_data, done.options.recalibration, amp=amp)
    reached: dict[str, float] = {}
    if validation is not None:
        reached = evaluate(inside(model), validation, to_evaluate(done.loss), amp=amp)
    progress.history.append(
        EpochRecord(
            **vars(said),
            epoch=progress.epoch + 1,
            step=progress.step,
            seconds=progress.seconds,
            lr=float(done.optimizer.param_groups[0]["lr"]),
            train=progress.score.means(),
            validation=reached,
        )
    )
    progress.next_epoch()


@dataclass
class _Step:
    """One optimizer step, over one or several batches."""

    model: nn.Module
    optimizer: Optimizer
    method: Method
    loss: Loss
    schedule: Schedule | None
    options: FitOptions

    def __post_init__(self) -> None:
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.optimizer.zero_grad()  # of whatever came before, a step that failed halfway included

    def __call__(self, batches: list[Batch], progress: Progress) -> None:
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.schedule(progress.step)
        score = Score()
        with composed_once(self.model, len(batches)) if len(batches) > 1 else nullcontext():
            for i, (inputs, target) in enumerate(map(split_batch, batches), 1):
                with quiet(self.model) if i < len(batches) else nullcontext():
                    self._backward(inputs, target, 1 / len(batches), score)
        progress.score += whole_score(score) if self.options.share_batches else score
        if self.options.clip_norm is not None:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.batch += len(batches)
        progress.step += 1

    def _backward(self, inputs: Any, target: Any, weight: float, score: Score) -> None:
        device, amp, part = device_of(self.model), self.options.amp, 1.0
        if self.options.share_batches:
            (inputs, target), part = share_of(inputs, target, summed=sums(self.loss))
        inputs, target = on_device(inputs, device), on_device(target, device)
        last: tuple[Tensor, Any] | None = None

        shared = WholeBatchNorm(part > 0) if self.options.share_batches else nullcontext()

        def forward(model: nn.Module = self.model) -> Any:
            with autocast(device, amp), shared:
                return ModelInputs.of(inputs).call(model)

        def loss(output: Any) -> Tensor:
            nonlocal last
            with autocast(device, amp):
                value = require_loss(self.loss(output, target))
            last = value.detach(), output
            return value * part

        compare = comparison_for(self.loss)

        def soft(output: Any, teacher: Any) -> Tensor:
            assert compare is not None
            with autocast(device, amp):
                return compare(output, teacher, target) * part

        soft_loss = None if compare is None else soft
        self.method.backward(forward, loss, weight=weight, soft_loss=soft_loss)
        if last is None:
            raise TrainingError(f"{type(self.method).__name__}.backward never asked for the loss.")
        if part:
            score.add(*last, target, summed=sums(self.loss))


def _steps_per_epoch(train_data: Iterable[Batch], accumulate: int) -> int | None:
    """Return the optimizer steps of an epoch, or None for data without a length."""
    try:
        return -(-len(train_data) // accumulate)  # type: ignore[arg-type]
    except TypeError:
        return None


def _batches(train_data: Iterable[Batch], seed: int, progress: Progress) -> Iterator[Batch]:
    """Iterate over an epoch from the batch that is next, with the randomness it had."""
    here = progress.random or random_states()  # the latter if the run stopped in this process
    torch.manual_seed((seed * 1_000_003 + progress.epoch) % 2**63)
    batches = iter(train_data)
    if progress.batch:
        found = sum(1 for _ in itertools.islice(batches, progress.batch))
        if found < progress.batch:
            raise TrainingError(
                f"the training data has {found} batches, but {progress.batch} of epoch "
                f"{progress.epoch + 1} are done: this is not the data that the run began with."
            )
        set_random_states(here)
    progress.random = None
    return batches


# -- progress lines --------------------------------------------------------------------------------


def default_watch(epochs: int) -> Watch:
    """Return callbacks that write a progress line every few seconds, where progress is shown."""
    tell = ProgressLine("fit")

    def place(progress: Progress) -> str:
        if progress.batch or not progress.history:
            means = _measures("train", progress.score.means())
            return f"epoch {progress.epoch + 1} of {epochs}, batch {progress.batch}{means}"
        last = progress.history[-1]
        means = _measures(
            "validation" if last.validation else "train", last.validation or last.train
        )
        size = "" if last.relative_params is None else f", params {last.relative_params:.2f}×"
        return f"epoch {last.epoch} of {epochs} done{means}{size}"

    def epoch(progress: Progress) -> None:
        (tell.end if progress.epoch == epochs else tell)(lambda: place(progress))

    return Watch(step=lambda progress: tell(lambda: place(progress)), epoch=epoch)


def _measures(split: str, means: Mapping[str, float]) -> str:
    return "".join(f", {split} {name} {value:.4g}" for name, value in means.items())
