"""A short training after a cut, by what the original says about the data instead of targets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import AdamW
from torch.utils._pytree import tree_map

from maestro_lod.errors import (
    CheckpointError,
    DataError,
    LayerError,
    OptionError,
    require_at_least_one,
    require_nonnegative,
)
from maestro_lod.files.stage_cache import digest_of
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers.ranks import at_ranks, require_low_rank, resolve_for, unwrapped
from maestro_lod.model.inputs import call, device_of, in_mode, on_device, split_batch
from maestro_lod.sizes.calibration import Batches
from maestro_lod.sizes.outputs import SoftLoss, soft_loss_for, values_loss
from maestro_lod.train.evaluate import recalibrate
from maestro_lod.train.finite import require_finite_loss
from maestro_lod.train.lod import LoD
from maestro_lod.train.schedule import cosine

Sizes: TypeAlias = Literal["below", "only"] | Sequence[Mapping[str, int | float]]
"""What is healed: the model with all sizes below it, only the model itself, or these ranks."""

_WARM_UP = 0.05  # of the steps, in which the learning rate rises
_LARGEST_GRADIENT = 1.0
_KEPT_EVERY = 50  # steps
HELD_OUT = 8
"""One batch of so many is measured on, and nothing is learned from it."""


@dataclass(frozen=True)
class Healed:
    """What healing did, measured before and after on the same held-out batches at the same size."""

    losses: list[float]
    """Of each step, on the batch and at the size that it trained."""
    before: float
    """The mean distance to the teacher before the first step."""
    after: float
    """The same after the last step."""

    @property
    def better(self) -> bool:
        """Whether the distance fell. If it did not, the model has its former weights."""
        return self.after < self.before

    def __str__(self) -> str:
        told = (
            f"distance to the original on held-out batches: {self.before:.4g} before healing, "
            f"{self.after:.4g} after"
        )
        if self.better:
            return told
        return (
            f"{told}. It did not fall: the weights from before are kept. Try a lower learning "
            "rate, more steps, or more data."
        )


def heal(
    model: nn.Module,
    data: Batches,
    *,
    teacher: nn.Module,
    steps: int = 500,
    lr: float = 5e-4,
    sizes: Sizes = "below",
    soft_loss: SoftLoss | None = None,
    hidden: Sequence[str] = (),
    seed: int = 0,
    held_out: Batches | None = None,
    checkpoint: Path | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Healed:
    """Train a cut model, in place, to give the outputs of its teacher, unless it gets worse.

    `data` are batches as for `calibrate`; targets are not looked at, and when the data ends it
    begins again. `soft_loss(output, teacher)` compares outputs: without one, scores that a
    transformers model calls `logits` by cross-entropy, any other output by its squared distance;
    `maestro_lod.sizes.outputs.scores_loss` is for scores that are a plain tensor. The outputs
    of modules that `hidden` names are compared by their distance too. `sizes` is "below" to train,
    beside the model, ranks of it that are sampled as LoD does, so that all smaller sizes stay good;
    "only" to train the model alone; or a list of ranks to be trained in turn. Dropout is off, half
    precision is healed in float32; BatchNorms keep their statistics while one size is healed, see
    each batch by itself if there are several, and get statistics of the data at the end.
    The distance to the teacher is measured on `held_out` before and after, at the model's own size
    or at the mean of those that are listed; if it did not fall, the model gets its former weights
    back. Without `held_out`, every eighth batch of a list is measured on and not trained on; of
    other data the first eight batches are measured on.
    `checkpoint` is a file that is written every 50 steps: with one that is there already, of the
    same call, healing goes on. `progress` is told the number of steps that are done, and the loss.
    """
    model, teacher = unwrapped(model), unwrapped(teacher)
    data, measured = _split(_repeatable(data), held_out)
    lesson = _Lesson(model, teacher, soft_loss, hidden)
    pupil = _Pupil(model, steps, lr, sizes, seed)
    if checkpoint is not None:
        pupil.identity = {
            "lr": lr, "steps": steps, "seed": seed, "hidden": list(hidden), "sizes": str(sizes),
            "soft loss": getattr(soft_loss, "__qualname__", str(type(soft_loss))),
            "model": digest_of(model.state_dict()), "teacher": digest_of(teacher.state_dict()),
            "data": digest_of(data) if isinstance(data, list) else "",
        }  # fmt: skip
    before, former = lesson.measure(measured, pupil.sizes), _Weights(model)
    with lesson.going_on(several=sizes != "only"), _in_single_precision(model):
        pupil.go_on_from(checkpoint)
        for inputs in itertools.islice(_forever(data), len(pupil.losses), steps):
            pupil.step(*lesson.on(inputs, single=True))
            pupil.keep(checkpoint)
            if progress is not None:
                progress(len(pupil.losses), pupil.losses[-1])
    recalibrate(model, ((split_batch(batch)[0], None) for batch in data))
    healed = Healed(pupil.losses, before, lesson.measure(measured, pupil.sizes))
    if not healed.better:
        former.restore()
    return healed


def hold_out(batches: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split batches into those to learn from and those to measure on; a single one is both."""
    last = len(batches) - 1
    rest = [batch for i, batch in enumerate(batches) if (last - i) % HELD_OUT]
    return rest or batches, batches[::-HELD_OUT]


def _split(data: Iterable[Any], held_out: Batches | None) -> tuple[Iterable[Any], list[Any]]:
    """Return what is trained on, and what is measured on."""
    if held_out is not None:
        measured = list(held_out)
    elif isinstance(data, list):
        data, measured = hold_out(data)
    else:
        measured = list(itertools.islice(data, HELD_OUT))
    if not measured:
        raise DataError("there is nothing to heal on: the data has no batch.")
    return data, measured


class _Weights:
    """The weights and buffers of a model as they are now."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._values = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)


def _warm_up(steps: int) -> int:
    return min(steps - 1, max(1, round(_WARM_UP * steps)))


class _Lesson:
    """What a teacher and its pupil say about the same inputs, hidden states included."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        soft_loss: SoftLoss | None,
        hidden: Sequence[str],
    ) -> None:
        if teacher is model:
            raise OptionError("teacher is the model itself: keep a copy of the original for it.")
        self._model, self._teacher = model, teacher
        self._soft_loss, self._hidden = soft_loss, hidden
        self._said: dict[tuple[nn.Module, str], Any] = {}

    @contextmanager
    def going_on(self, *, several: bool) -> Iterator[None]:
        """Put both into the right mode inside the `with` block, and listen."""
        with (
            in_mode(self._teacher, training=False),
            in_mode(self._model, training=False),
            ExitStack() as hooks,
        ):
            for module in self._model.modules():
                module.training = several and isinstance(module, _BatchNorm)
            for whole, name in itertools.product((self._teacher, self._model), self._hidden):
                hooks.callback(self._listen(whole, name))
            yield

    def _listen(self, whole: nn.Module, name: str) -> Callable[[], None]:
        def heard(module: nn.Module, args: Any, output: Any) -> None:
            self._said[whole, name] = output

        try:
            return whole.get_submodule(name).register_forward_hook(heard).remove
        except AttributeError:
            raise LayerError(f"hidden={name!r}: there is no such module in the model.") from None

    @torch.no_grad()
    def measure(self, batches: Iterable[Any], sizes: Sequence[Mapping[str, int]]) -> float:
        """Return the mean distance of the pupil to the teacher on batches, at some sizes."""
        found = []
        with self.going_on(several=False):
            for batch, ranks in itertools.product(batches, sizes):
                with at_ranks(self._model, ranks):
                    forward, distance = self.on(split_batch(batch)[0])
                    found.append(float(distance(forward())))
        return sum(found) / len(found)

    def on(
        self, inputs: Any, *, single: bool = False
    ) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
        """Return the forward of the pupil on inputs, and its distance to the teacher there.

        The pupil is `single` while it is held in single precision, whatever the teacher is.
        """
        inputs = on_device(inputs, device_of(self._model))
        with torch.no_grad():
            wanted = call(self._teacher, inputs)
        compare = self._soft_loss or soft_loss_for(wanted)
        own = tree_map(_single, inputs) if single else inputs

        def distance(output: Any) -> Tensor:
            return compare(output, wanted) + self._hidden_loss()

        return lambda: call(self._model, own), distance

    def _hidden_loss(self) -> Tensor | float:
        return sum(
            values_loss(self._said[self._model, name], self._said[self._teacher, name])
            for name in self._hidden
        ) / max(1, len(self._hidden))


@contextmanager
def _in_single_precision(model: nn.Module) -> Iterator[None]:
    """Hold what is half as float32 inside: small steps would be rounded away."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.dtype for tensor in tensors]
    for tensor in tensors:
        tensor.data = _single(tensor.data)
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(dtype)


def _single(value: Any) -> Any:
    """Return a tensor in at least float32, and anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def _repeatable(data: Batches) -> Iterable[Any]:
    return list(data) if isinstance(data, Iterator | list | tuple) else data


def _forever(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the inputs of all batches, again and again."""
    while True:
        empty = True
        for batch in data:
            empty = False
            yield split_batch(batch)[0]
        if empty:
            raise DataError("there is nothing to heal on: the data has no batch.")


class _Pupil:
    """A cut model in training, which can be put aside after any step."""

    def __init__(self, model: nn.Module, steps: int, lr: float, sizes: Sizes, seed: int) -> None:
        require_at_least_one("steps", steps, "healing takes steps")
        require_nonnegative("lr", lr)
        require_low_rank(model)
        self._model, self._steps = model, steps
        self.identity: dict[str, Any] = {}
        """What a file of its state has to be of."""
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = AdamW(trained, lr, weight_decay=0.0)
        self._sampled, self._given = None, list[dict[str, int]]()
        if sizes == "below":
            self._sampled = LoD(model, self._optimizer, threshold=None, sampling="several",
                                full_pass=True, seed=seed)  # fmt: skip
        else:
            self._given = _ranks_in_turn(model, sizes)
        self._lr, self._schedule = lr, cosine(steps, warmup=_warm_up(steps))
        self.losses: list[float] = []

    @property
    def sizes(self) -> Sequence[Mapping[str, int]]:
        """The ranks that it is judged at."""
        return self._given or [{}]

    def step(self, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * self._schedule(len(self.losses))
        self.losses.append(float(self._backward(forward, loss)))
        nn.utils.clip_grad_norm_(self._model.parameters(), _LARGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward(self, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> Tensor:
        if self._sampled is not None:
            return self._sampled.backward(forward, loss) / 2
        with at_ranks(self._model, self._given[len(self.losses) % len(self._given)]):
            value = require_finite_loss(loss(forward()))
            value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def _parts(self) -> list[Any]:
        sampled = [] if self._sampled is None else [self._sampled]
        return [self._model, self._optimizer, *sampled]

    def keep(self, file: Path | None) -> None:
        """Write all state to a file, if there is one, now and then and at the end."""
        if file is None or (len(self.losses) % _KEPT_EVERY and len(self.losses) < self._steps):
            return
        states = [part.state_dict() for part in self._parts()]
        save_state([self.identity, self.losses, *states], file)

    def go_on_from(self, file: Path | None) -> None:
        """Read all state from a file, if it is there."""
        if file is None or not file.exists():
            return
        was, losses, *states = load_state(file)
        if was != self.identity:
            raise CheckpointError(
                f"{file} is of another healing: of another model, teacher or data, or with other "
                "settings. Repeat that call, or remove the file."
            )
        for part, state in zip(self._parts(), states, strict=True):
            part.load_state_dict(state)
        self.losses = losses


def _ranks_in_turn(model: nn.Module, sizes: Sizes) -> list[dict[str, int]]:
    if isinstance(sizes, str) and sizes != "only":
        raise OptionError(f"sizes={sizes!r} is not known. Choose 'below' or 'only', or give ranks.")
    given = [{}] if isinstance(sizes, str) else [resolve_for(model, ranks) for ranks in sizes]
    if not given:
        raise OptionError("sizes=[] leaves nothing to heal. Give ranks, 'below' or 'only'.")
    return given
