"""Distillation: train a low-rank model to reproduce the outputs of its original."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import AdamW

from maestro_lod.errors import (
    DataError,
    LayerError,
    OptionError,
    require_at_least_one,
    require_nonnegative,
)
from maestro_lod.files.digests import compute_digest
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.layers.ranks import at_ranks, require_low_rank, resolve_for, unwrapped
from maestro_lod.model.inputs import ModelInputs, in_mode, model_device, split_batch
from maestro_lod.pretrained.precision import in_single_precision
from maestro_lod.pretrained.precision import single as single_values
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.calibration import Batches
from maestro_lod.sizes.outputs import SoftLoss, soft_loss_for, values_loss
from maestro_lod.train.diagnostics import require_finite_loss
from maestro_lod.train.evaluate import recalibrate
from maestro_lod.train.lod import LoD
from maestro_lod.train.schedule import cosine

Sizes: TypeAlias = Literal["below", "only"] | Sequence[Mapping[str, int | float]]
"""The sizes to train: the student and smaller sizes, only the student, or these ranks."""

_WARM_UP = 0.05  # share of the steps in which the learning rate rises
_LARGEST_GRADIENT = 1.0
_SAVED_EVERY = 50  # steps
_STAGE = "distillation"
HELD_OUT = 8
"""Every eighth batch is held out for the measurement."""


@dataclass(frozen=True)
class Distilled:
    """The result of a distillation, measured before and after on the same held-out batches."""

    losses: list[float]
    """The loss of each step, on the batch and at the size that it trained."""
    before: float
    """The mean distance to the teacher before the first step."""
    after: float
    """The same after the last step."""

    @property
    def better(self) -> bool:
        """Whether the distance fell. If it did not, the student has its former weights."""
        return self.after < self.before

    def __str__(self) -> str:
        distances = (
            f"distance to the original on held-out batches: {self.before:.4g} before distillation, "
            f"{self.after:.4g} after"
        )
        if self.better:
            return distances
        return (
            f"{distances}. It did not fall, so that the weights from before are kept. Try a lower "
            "learning rate, more steps, or more data."
        )


def distill(
    student: nn.Module,
    teacher: nn.Module,
    data: Batches,
    *,
    steps: int = 500,
    lr: float = 5e-4,
    sizes: Sizes = "below",
    soft_loss: SoftLoss | None = None,
    hidden: Sequence[str] = (),
    seed: int = 0,
    held_out: Batches | None = None,
    resume: str | os.PathLike[str] | None = None,
    on_progress: OnProgress = lambda done, total, note: None,
) -> Distilled:
    """Train a low-rank model, in place, to reproduce the outputs of its teacher.

    The distance to the teacher is measured on held-out batches before and after, at the student's
    own size or as the mean over listed sizes. If it did not fall, the student gets its former
    weights back. Dropout is off; half precision is trained in float32. BatchNorms keep their
    statistics while one size is trained, use those of each batch if there are several, and get
    statistics of the data at the end.

    >>> print(lod.distill(model, original, batches, steps=500))

    Args:
        student: The low-rank model, which is changed.
        teacher: The original, which is not.
        data: Batches (inputs, target), or inputs alone. Targets are not used; when the data ends it
            is iterated again.
        steps: The number of steps.
        lr: The largest learning rate of AdamW.
        sizes: "below" to train the student and ranks below its own, sampled as by `LoD`, so that
            all smaller sizes stay good; "only" to train the student alone; or a list of ranks to
            train in turn.
        soft_loss: `soft_loss(output, teacher)`. By default what a transformers model calls `logits`
            is compared by cross-entropy, any other output by its squared distance;
            `maestro_lod.sizes.outputs.scores_loss` is for class scores that are a plain tensor.
        hidden: Names of modules whose outputs are compared by their distance too.
        seed: The seed of sampled ranks.
        held_out: Batches to measure on. By default every eighth batch of a list is held out; of
            other data the first eight batches are measured on, and trained on too.
        resume: A directory that is written every 50 steps: after an interruption, the same call
            resumes there. The batches must come in the same order each time.
        on_progress: `on_progress(done, total, note)` gets the number of steps that are done.

    Returns:
        The loss of each step, and the distances to the teacher before and after.

    Raises:
        DataError: The data has no batch.
        LayerError: The student has no low-rank layer, or a module in `hidden` does not exist.
        OptionError: An option is not usable, or `resume` belongs to another call.
    """
    student, teacher = unwrapped(student), unwrapped(teacher)
    distillation = Distillation(steps, lr, sizes, soft_loss, tuple(hidden), seed)
    call = {field.name: getattr(distillation, field.name) for field in fields(distillation)}
    cache = StageCache(resume, {**call, "student": student, "teacher": teacher})
    return distillation.run(student, teacher, data, cache, on_progress, held_out=held_out)


@dataclass(frozen=True)
class Distillation:
    """The settings of a distillation, as `distill` documents them."""

    steps: int = 500
    lr: float = 5e-4
    sizes: Sizes = "below"
    soft_loss: SoftLoss | None = None
    hidden: tuple[str, ...] = ()
    seed: int = 0

    def run(
        self,
        student: nn.Module,
        teacher: nn.Module,
        data: Batches,
        cache: StageCache,
        on_progress: OnProgress,
        *,
        held_out: Batches | None = None,
    ) -> Distilled:
        """Train a student in place, unless that makes it worse."""
        loss = DistillationLoss(student, teacher, self.soft_loss, self.hidden)
        training = _Training(student, self, cache)
        batches, measured = _split(data, held_out)
        before, former = loss.measure(measured, training.sizes), _Weights(student)
        training.note(measured)
        inputs = _endless_inputs(batches)
        with loss.attached(several=self.sizes != "only"), in_single_precision(student):
            training.resume(inputs)
            for batch in itertools.islice(inputs, self.steps - len(training.losses)):
                training.step(batch, *loss.on(batch, single=True))
                on_progress(len(training.losses), self.steps, "distilling")
        recalibrate(student, ((split_batch(batch)[0], None) for batch in batches))
        done = Distilled(training.losses, before, loss.measure(measured, training.sizes))
        if not done.better:
            former.restore()
        return done


def hold_out(batches: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split batches into those to train on and those to measure on; a single one is both."""
    last = len(batches) - 1
    rest = [batch for i, batch in enumerate(batches) if (last - i) % HELD_OUT]
    return rest or batches, batches[::-HELD_OUT]


def _split(data: Batches, held_out: Batches | None) -> tuple[Iterable[Any], list[Any]]:
    """Return the batches to train on, and those to measure on."""
    batches = list(data) if isinstance(data, Iterator | list | tuple) else data
    if held_out is not None:
        measured = list(held_out)
    elif isinstance(batches, list):
        batches, measured = hold_out(batches)
    else:
        measured = list(itertools.islice(batches, HELD_OUT))
    if not measured:
        raise DataError("the data to distill on has no batch. Give at least one.")
    return batches, measured


class _Weights:
    """A copy of the weights and buffers of a model."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._values = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the copied values."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)


def _warm_up(steps: int) -> int:
    return min(steps - 1, max(1, round(_WARM_UP * steps)))


class DistillationLoss:
    """The distance of a student's outputs, and hidden states, to a teacher's on the same inputs."""

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        soft_loss: SoftLoss | None,
        hidden: Sequence[str],
    ) -> None:
        if teacher is student:
            raise OptionError("the teacher is the student. Give the original, or a copy of it.")
        self._student, self._teacher = student, teacher
        self._soft_loss, self._hidden = soft_loss, hidden
        self._outputs: dict[tuple[nn.Module, str], Any] = {}

    @contextmanager
    def attached(self, *, several: bool) -> Iterator[None]:
        """Set the mode of both models inside the `with` block, and record hidden outputs."""
        with (
            in_mode(self._teacher, training=False),
            in_mode(self._student, training=False),
            ExitStack() as hooks,
        ):
            for module in self._student.modules():
                module.training = several and isinstance(module, _BatchNorm)
            for model, name in itertools.product((self._teacher, self._student), self._hidden):
                hooks.callback(self._record(model, name))
            yield

    def _record(self, model: nn.Module, name: str) -> Callable[[], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[model, name] = output

        try:
            return model.get_submodule(name).register_forward_hook(hook).remove
        except AttributeError:
            raise LayerError(
                f"hidden={name!r} is not a module of the model. Give names of named_modules()."
            ) from None

    @torch.no_grad()
    def measure(self, batches: Iterable[Any], sizes: Sequence[Mapping[str, int]]) -> float:
        """Return the mean loss of the student on batches, at some sizes."""
        values = []
        with self.attached(several=False):
            for batch, ranks in itertools.product(batches, sizes):
                with at_ranks(self._student, ranks):
                    forward, loss = self.on(split_batch(batch)[0])
                    values.append(float(loss(forward())))
        return sum(values) / len(values)

    def on(
        self, inputs: Any, *, single: bool = False
    ) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
        """Return the forward of the student on inputs, and the loss of its output.

        The student is `single` while it is held in float32.
        """
        call = ModelInputs.wrap(inputs).to(model_device(self._student))
        with torch.no_grad():
            target = call.call(self._teacher)
        soft_loss = self._soft_loss or soft_loss_for(target)
        student_call = ModelInputs(*single_values((call.args, call.kwargs))) if single else call

        def loss(output: Any) -> Tensor:
            return soft_loss(output, target) + self._hidden_loss()

        return lambda: student_call.call(self._student), loss

    def _hidden_loss(self) -> Tensor | float:
        return sum(
            values_loss(self._outputs[self._student, name], self._outputs[self._teacher, name])
            for name in self._hidden
        ) / max(1, len(self._hidden))


def _endless_inputs(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the inputs of all batches, again and again."""
    while True:
        empty = True
        for batch in data:
            empty = False
            yield split_batch(batch)[0]
        if empty:
            raise DataError("the data to distill on has no batch. Give at least one.")


class _Training:
    """A student in training, saved every few steps."""

    def __init__(self, model: nn.Module, settings: Distillation, cache: StageCache) -> None:
        require_at_least_one("steps", settings.steps, "the number of steps")
        require_nonnegative("lr", settings.lr)
        require_low_rank(model)
        self._model, self._settings, self._cache = model, settings, cache
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = AdamW(trained, settings.lr, weight_decay=0.0)
        self._sampled, self._ranks = None, list[dict[str, int]]()
        if settings.sizes == "below":
            self._sampled = LoD(model, self._optimizer, threshold=None, sampling="several",
                                full_pass=True, seed=settings.seed)  # fmt: skip
        else:
            self._ranks = _ranks_in_turn(model, settings.sizes)
        self._schedule = cosine(settings.steps, warmup=_warm_up(settings.steps))
        self._data_digest = ""
        self.losses: list[float] = []

    @property
    def sizes(self) -> Sequence[Mapping[str, int]]:
        """The ranks that the student is measured at."""
        return self._ranks or [{}]

    def step(self, inputs: Any, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * self._schedule(len(self.losses))
        self.losses.append(float(self._backward(forward, loss)))
        nn.utils.clip_grad_norm_(self._model.parameters(), _LARGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.note(inputs)
        self._save()

    def _backward(self, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> Tensor:
        if self._sampled is not None:
            return self._sampled.backward(forward, loss) / 2
        with at_ranks(self._model, self._ranks[len(self.losses) % len(self._ranks)]):
            value = require_finite_loss(loss(forward()))
            value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def note(self, inputs: Any) -> None:
        """Add inputs to the digest of the data so far."""
        if self._cache.is_on:
            self._data_digest = compute_digest([self._data_digest, inputs])

    def _parts(self) -> list[Any]:
        sampled = [] if self._sampled is None else [self._sampled]
        return [self._model, self._optimizer, *sampled]

    def _save(self) -> None:
        """Save all state, every few steps and at the end."""
        if len(self.losses) % _SAVED_EVERY and len(self.losses) < self._settings.steps:
            return
        states = [part.state_dict() for part in self._parts()]
        self._cache.save(_STAGE, [self.losses, self._data_digest, *states])

    def resume(self, inputs: Iterator[Any]) -> None:
        """Load all state, if there is any, and go through the inputs that it was trained on."""
        if (saved := self._cache.load(_STAGE)) is None:
            return
        losses, data_digest, *states = saved
        for batch in itertools.islice(inputs, len(losses)):
            self.note(batch)
        if self._data_digest != data_digest:
            raise OptionError(
                "the directory to resume from was written with other data, or with the same "
                "batches in another order. Repeat that call, or remove the directory."
            )
        for part, state in zip(self._parts(), states, strict=True):
            part.load_state_dict(state)
        self.losses = losses


def _ranks_in_turn(model: nn.Module, sizes: Sizes) -> list[dict[str, int]]:
    if isinstance(sizes, str) and sizes != "only":
        raise OptionError(f"sizes={sizes!r} is not known. Choose 'below' or 'only', or give ranks.")
    ranks_in_turn = (
        [{}] if isinstance(sizes, str) else [resolve_for(model, ranks) for ranks in sizes]
    )
    if not ranks_in_turn:
        raise OptionError("sizes=[] leaves nothing to train. Give ranks, 'below' or 'only'.")
    return ranks_in_turn
