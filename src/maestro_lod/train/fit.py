"""The training loop: any method, from the start or resumed at any step."""

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
    model_device,
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
    evaluation_loss,
    judge,
    recalibrate,
    sums,
)
from maestro_lod.train.method import Method, RunPlan, Schedule, total_epochs
from maestro_lod.train.progress import EpochRecord, Progress, random_states, set_random_states
from maestro_lod.train.schedule import from_scheduler
from maestro_lod.train.shared_batches import combined_score, local_share


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
    """Compute in bfloat16 where that is safe (torch.autocast)."""
    recalibration: int = 100
    """The largest number of batches on which BatchNorm is recalibrated before each evaluation."""
    share_batches: bool = False
    """Whether all processes get the same batches, and each trains on its part of them."""

    def __post_init__(self) -> None:
        require_bool("amp", self.amp)
        require_bool("share_batches", self.share_batches)
        require_whole("recalibration", self.recalibration)
        require_at_least_one("accumulate", self.accumulate, "the batches per optimizer step")
        if self.clip_norm is not None and require_nonnegative("clip_norm", self.clip_norm) == 0.0:
            raise OptionError("clip_norm=0 would remove every gradient. Leave it None not to clip.")


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
        train_data: An iterable of the same batches each time: pairs (inputs, target), whose inputs
            may be a tuple or mapping of arguments; or mappings of arguments with the target
            `labels`.
        optimizer: One optimizer for the whole model.
        epochs: The number of epochs, including those before the run was resumed. A method may add
            epochs: `Elastic` adds two for every five.
        method: The training method, such as `LoD` or `Elastic`; by default dense training.
        loss: Returns the loss of (output, target). By default cross-entropy, or the `loss` of an
            output that has one, as in transformers. For methods that distil, the loss needs a
            method `soft(output, teacher, target)` unless outputs are scores (N, classes).
        validation: Batches to evaluate on after each epoch.
        schedule: One of torch's schedulers, or a function that returns the share of the learning
            rate at a step.
        seed: Seed of all random numbers.
        options: Clipping, accumulation, precision and others.
        progress: The progress from which a run is resumed, also in the middle of an epoch; model,
            optimizer and method must be restored before.
        watch: Callbacks after each step and each epoch; by default progress lines.

    Returns:
        The record of the run: one entry per epoch.

    Raises:
        OptionError: An option is invalid, or the loss cannot be computed from the data.
        TrainingError: The data has no batch, or the training has diverged.
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
        _train_epoch(_batches(train_data, seed, progress), one_step, progress, watch)
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
    """Return the length of the training and its schedule."""
    steps = _steps_per_epoch(train_data, accumulate)
    if isinstance(schedule, LRScheduler | ReduceLROnPlateau):
        schedule = from_scheduler(schedule, optimizer, epochs, steps)
    elif schedule is not None and not callable(schedule):
        raise OptionError(
            f"schedule={schedule!r} is not usable. Give a function of the step, or a scheduler of "
            "torch."
        )
    judged = judge(train_data, evaluation_loss(loss))
    return RunPlan(epochs, steps, schedule, judged, train_data, loss)


def _train_epoch(
    batches: Iterator[Batch], one_step: _Step, progress: Progress, watch: Watch
) -> None:
    """Do the remaining steps of an epoch, and measure their time."""
    one_step.model.train()
    began = time.perf_counter()
    while group := list(itertools.islice(batches, one_step.options.accumulate)):
        one_step(group, progress)
        progress.seconds += time.perf_counter() - began
        watch.step(progress)
        began = time.perf_counter()
    if progress.batch == 0:
        raise TrainingError("the training data has no batch. Give at least one.")


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
    began = time.perf_counter()
    done.method.end_epoch(last=last)  # which may search ranks for long
    progress.seconds += time.perf_counter() - began
    follow(model)
    record = done.method.record()
    if record.note is not None:
        warnings.warn(record.note, UserWarning, stacklevel=3)
    recalibrate(inside(model), train_data, done.options.recalibration, amp=amp)
    reached: dict[str, float] = {}
    if validation is not None:
        reached = evaluate(inside(model), validation, evaluation_loss(done.loss), amp=amp)
    progress.history.append(
        EpochRecord(
            **vars(record),
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
        self.optimizer.zero_grad()  # gradients of earlier steps, such as one that failed

    def __call__(self, batches: list[Batch], progress: Progress) -> None:
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.schedule(progress.step)
        score = Score()
        with composed_once(self.model, len(batches)) if len(batches) > 1 else nullcontext():
            for i, (inputs, target) in enumerate(map(split_batch, batches), 1):
                with quiet(self.model) if i < len(batches) else nullcontext():
                    self._backward(inputs, target, 1 / len(batches), score)
        progress.score += combined_score(score) if self.options.share_batches else score
        if self.options.clip_norm is not None:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.batch += len(batches)
        progress.step += 1

    def _backward(self, inputs: Any, target: Any, weight: float, score: Score) -> None:
        device, amp, part = model_device(self.model), self.options.amp, 1.0
        if self.options.share_batches:
            (inputs, target), part = local_share(inputs, target, summed=sums(self.loss))
        inputs, target = on_device(inputs, device), on_device(target, device)
        last: tuple[Tensor, Any] | None = None

        shared = WholeBatchNorm(part > 0) if self.options.share_batches else nullcontext()

        def forward(model: nn.Module = self.model) -> Any:
            with autocast(device, amp), shared:
                return ModelInputs.wrap(inputs).call(model)

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
            raise TrainingError(
                f"{type(self.method).__name__}.backward did not call `loss`. Call it in each "
                "backward."
            )
        if part:
            score.add(*last, target, summed=sums(self.loss))


def _steps_per_epoch(train_data: Iterable[Batch], accumulate: int) -> int | None:
    """Return the optimizer steps of an epoch, or None for data without a length."""
    try:
        return -(-len(train_data) // accumulate)  # type: ignore[arg-type]
    except TypeError:
        return None


def _batches(train_data: Iterable[Batch], seed: int, progress: Progress) -> Iterator[Batch]:
    """Return the remaining batches of an epoch, after restoring the random states."""
    states = progress.random or random_states()  # the latter in the process that was interrupted
    torch.manual_seed((seed * 1_000_003 + progress.epoch) % 2**63)
    batches = iter(train_data)
    if progress.batch:
        skipped = sum(1 for _ in itertools.islice(batches, progress.batch))
        if skipped < progress.batch:
            raise TrainingError(
                f"the training data has {skipped} batches, but {progress.batch} of epoch "
                f"{progress.epoch + 1} are done. Give the data that the run began with."
            )
        set_random_states(states)
    progress.random = None
    return batches


# -- progress lines --------------------------------------------------------------------------------


def default_watch(epochs: int) -> Watch:
    """Return callbacks that write a progress line every few seconds, if progress is enabled."""
    line = ProgressLine("fit")

    def description(progress: Progress) -> str:
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
        (line.end if progress.epoch == epochs else line)(lambda: description(progress))

    return Watch(step=lambda progress: line(lambda: description(progress)), epoch=epoch)


def _measures(split: str, means: Mapping[str, float]) -> str:
    return "".join(f", {split} {name} {value:.4g}" for name, value in means.items())
