"""The one plain training loop: dense or low-rank, from the start or from any place in a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.cost import count_params
from maestro_lod.errors import OptionError, TrainingError, require_nonnegative, require_whole
from maestro_lod.layers.ranks import low_rank_layers, unwrapped
from maestro_lod.train.evaluate import (
    Batch,
    CrossEntropy,
    Loss,
    Score,
    autocast,
    call,
    device_of,
    evaluate,
    on_device,
    recalibrate,
    sums,
)
from maestro_lod.train.lod import LoD

Schedule = Callable[[int], float]
"""The share of its initial learning rate that each parameter group has at optimizer step s."""


@dataclass
class Progress:
    """How far a run has come: all that `fit` needs, beside model, optimizer and LoD, to go on."""

    epoch: int = 0
    batch: int = 0
    """Batches of the current epoch that are done."""
    step: int = 0
    """Optimizer steps so far."""
    seconds: float = 0.0
    """Training time of the current epoch so far, evaluation left out."""
    score: Score = field(default_factory=Score)
    """Of the current epoch's training batches, each at the ranks that were drawn for it."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One record per finished epoch."""
    random: list[Tensor] | None = None
    """torch's random states at this place, for an epoch that is resumed in its middle."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place reached, with torch's random states as they are now."""
        return {**asdict(self), "random": _random_states()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Return the place that `state_dict` noted."""
        return cls(**{**state, "score": Score(**state["score"])})


def fit(
    model: nn.Module,
    train_data: Iterable[Batch],
    *,
    optimizer: Optimizer,
    epochs: int,
    lod: LoD | None = None,
    loss: Loss | None = None,
    evaluation_loss: Loss | None = None,
    validation: Iterable[Batch] | None = None,
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    amp: bool = False,
    recalibration: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
    on_step: Callable[[Progress], None] | None = None,
    on_epoch: Callable[[Progress], None] | None = None,
) -> Progress:
    """Train a model in place, low-rank with `lod` or as it is, and return the record of the run.

    >>> train = LoD(model, optimizer, penalty=1e-4)
    >>> fit(model, loader, optimizer=optimizer, lod=train, epochs=20, validation=held_out)

    `train_data` gives (inputs, target) batches anew each time it is iterated; inputs may be a tuple
    or mapping of arguments. Before each epoch torch's global generator is seeded from `seed` and
    the epoch, so shuffling, augmentation and dropout repeat exactly. `progress` continues a run
    from where `Progress.state_dict()` was taken, in the middle of an epoch too, once model,
    optimizer and LoD are as they were. `on_step` and `on_epoch` see the progress after each
    optimizer step and each epoch; what they raise ends the run. BatchNorm is recalibrated on up to
    `recalibration` batches after each epoch, before it is evaluated. `amp` computes in bfloat16
    where that is safe. Where `lod` distils, a loss of your own says what the sampled pass is
    trained on by a method `soft(output, teacher, target)`, unless outputs are scores (N, classes).
    """
    require_whole("epochs", epochs)
    require_whole("recalibration", recalibration)
    _require_some("accumulate", accumulate, "the batches per optimizer step")
    if clip_norm is not None and require_nonnegative("clip_norm", clip_norm) == 0.0:
        raise OptionError("clip_norm=0 would stop all training; leave it None not to clip.")
    if lod is None and low_rank_layers(model):
        raise OptionError(
            f"{type(model).__name__} is low-rank but fit got no LoD: nothing would be sampled. "
            "Give lod=LoD(model, optimizer, …)."
        )
    if lod is not None and (lod.optimizer is not optimizer or lod.model is not unwrapped(model)):
        raise OptionError("lod was made for another model or optimizer than fit was given.")
    progress = progress or Progress()
    loss = loss or CrossEntropy()
    if evaluation_loss is None:
        evaluation_loss = CrossEntropy() if isinstance(loss, CrossEntropy) else loss
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    optimizer.zero_grad()  # of whatever came before, a step that failed halfway included
    if lod is not None:
        _plan(lod, epochs, _steps_per_epoch(train_data, accumulate), schedule)
    one_step = _Step(model, optimizer, lod, loss, schedule, clip_norm, amp)

    while progress.epoch < epochs:
        model.train()
        batches = _batches(train_data, seed, progress)
        began = time.perf_counter()
        while group_of_batches := list(itertools.islice(batches, accumulate)):
            one_step(group_of_batches, progress)
            now = time.perf_counter()
            progress.seconds, began = progress.seconds + now - began, now
            if on_step is not None:
                on_step(progress)
                began = time.perf_counter()
        if progress.batch == 0:
            raise TrainingError("the training data has no batch: nothing would be trained.")
        if lod is not None:
            if lod.budget is not None and progress.epoch + 1 == epochs:
                lod.land()  # at the latest, whatever was planned
            lod.end_epoch()
        record = _record(unwrapped(model), optimizer, lod, progress)
        recalibrate(model, train_data, recalibration, amp=amp)
        if validation is not None:
            reached = evaluate(model, validation, evaluation_loss, amp=amp)
            record |= {f"validation_{name}": value for name, value in reached.items()}
        progress.history.append(record)
        progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.seconds, progress.score, progress.random = 0.0, Score(), None
        if on_epoch is not None:
            on_epoch(progress)
    return progress


@dataclass
class _Step:
    """One optimizer step, over one or several batches."""

    model: nn.Module
    optimizer: Optimizer
    lod: LoD | None
    loss: Loss
    schedule: Schedule | None
    clip_norm: float | None
    amp: bool

    def __call__(self, batches: list[Batch], progress: Progress) -> None:
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.schedule(progress.step)
        for inputs, target in batches:
            self._backward(inputs, target, 1 / len(batches), progress.score)
        if self.clip_norm is not None:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.batch += len(batches)
        progress.step += 1

    def _backward(self, inputs: Any, target: Any, weight: float, score: Score) -> None:
        device = device_of(self.model)
        inputs, target = on_device(inputs, device), on_device(target, device)
        last: tuple[Tensor, Any] | None = None

        def forward() -> Any:
            with autocast(device, self.amp):
                return call(self.model, inputs)

        def loss(output: Any) -> Tensor:
            nonlocal last
            with autocast(device, self.amp):
                value = self.loss(output, target)
            last = value.detach(), output
            return value

        def soft(output: Any, teacher: Any) -> Tensor:
            with autocast(device, self.amp):
                value: Tensor = self.loss.soft(output, teacher, target)  # type: ignore[attr-defined]
            return value

        soft_loss = soft if hasattr(self.loss, "soft") else None
        if self.lod is not None:
            self.lod.backward(forward, loss, weight=weight, soft_loss=soft_loss)
        else:
            value = loss(forward())
            if not bool(value.detach().isfinite()):
                raise TrainingError(
                    f"the loss is {value.item()}. Lower the learning rate or clip gradients."
                )
            (value * weight).backward()  # type: ignore[no-untyped-call]
        assert last is not None
        score.add(*last, target, summed=sums(self.loss))


def _steps_per_epoch(train_data: Iterable[Batch], accumulate: int) -> int | None:
    """Return the optimizer steps of an epoch, or None for data without a length."""
    try:
        return -(-len(train_data) // accumulate)  # type: ignore[arg-type]
    except TypeError:
        return None


def _batches(train_data: Iterable[Batch], seed: int, progress: Progress) -> Iterator[Batch]:
    """Iterate over an epoch from the batch that is next, with the randomness it had."""
    here = progress.random or _random_states()  # the latter if the run stopped in this process
    torch.manual_seed((seed * 1_000_003 + progress.epoch) % 2**63)
    batches = iter(train_data)
    if progress.batch:
        found = sum(1 for _ in itertools.islice(batches, progress.batch))
        if found < progress.batch:
            raise TrainingError(
                f"the training data has {found} batches, but {progress.batch} of epoch "
                f"{progress.epoch + 1} are done: this is not the data that the run began with."
            )
        _set_random_states(here)
    progress.random = None
    return batches


def _random_states() -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, then one per accelerator in use."""
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])


def _set_random_states(states: list[Tensor]) -> None:
    """Restore the states; those of accelerators that are not here are left out."""
    torch.set_rng_state(states[0])
    for device, state in zip(range(torch.cuda.device_count()), states[1:], strict=False):
        torch.cuda.set_rng_state(state, device)


def _record(
    model: nn.Module, optimizer: Optimizer, lod: LoD | None, progress: Progress
) -> dict[str, Any]:
    """Describe an epoch that has just ended; params and MACs are those after the shrink."""
    record: dict[str, Any] = {
        "epoch": progress.epoch + 1,
        "step": progress.step,
        "seconds": progress.seconds,
        "lr": float(optimizer.param_groups[0]["lr"]),
        **progress.score.means("train_"),
        "ranks": {},
    }
    if lod is None:
        return record | {"params": count_params(model), "relative_params": 1.0}
    params, macs = lod.ledger.deployed(model)
    dense_macs = lod.ledger.dense_macs
    record |= {
        "penalty": lod.penalty,
        "total_rank": sum(layer.rank for layer in low_rank_layers(model).values()),
        "params": params,
        "macs": macs,
        "relative_params": params / lod.ledger.dense_params,
        "relative_macs": None if macs is None or not dense_macs else macs / dense_macs,
        "ranks": {name: layer.rank for name, layer in low_rank_layers(model).items()},
    }
    if lod.budget is not None:
        record |= {"budget": lod.budget.share, "phase": lod.budget.phase}
    return record


def _plan(lod: LoD, epochs: int, steps: int | None, schedule: Schedule | None) -> None:
    """Tell LoD how long training lasts, if it needs to know."""
    if lod.budget is not None:
        lod.budget.expect(epochs, steps)
    if lod.pressure and not lod.penalty:
        if steps is None:
            raise OptionError(
                f"pressure={lod.pressure:g} needs to know how long training lasts, and the "
                "training data has no length: LoD(…, steps=…)."
            )
        lod.expect(total_steps(epochs, steps, schedule))


def total_steps(epochs: int, steps: int, schedule: Schedule | None) -> float:
    """Return the steps of a training, each counted as its share of the initial learning rate."""
    total = epochs * steps
    return total if schedule is None else sum(map(schedule, range(total)))


def milestones(epochs: list[int], steps_per_epoch: int, factor: float = 0.1) -> Schedule:
    """Multiply the learning rate by `factor` at the start of each of these epochs."""
    _require_some("steps_per_epoch", steps_per_epoch, "the optimizer steps of an epoch")
    return lambda step: factor ** sum(step >= epoch * steps_per_epoch for epoch in epochs)


def vaswani(warmup: int) -> Schedule:
    """Grow linearly for `warmup` steps, then fall with 1/√step; 1 at the end of the warm-up.

    The paper's 2·d^-½·min(s^-½, s·w^-3/2) is a learning rate of 2·(d·w)^-½ under this schedule.
    """
    _require_some("warmup", warmup, "the steps of the warm-up")
    return lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def _require_some(option: str, value: int, meaning: str) -> None:
    if require_whole(option, value) == 0:
        raise OptionError(f"{option}=0 must be at least 1: {meaning}.")
