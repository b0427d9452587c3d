"""A short training after a cut, by what the original says about the data instead of targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from maestro_lod.errors import DataError, OptionError, require_at_least_one, require_nonnegative
from maestro_lod.layers.ranks import at_ranks, require_low_rank, resolve_for, unwrapped
from maestro_lod.pretrained.calibration import Batches, split_batch
from maestro_lod.pretrained.outputs import SoftLoss, soft_loss_for
from maestro_lod.train.evaluate import call, device_of, in_mode, on_device
from maestro_lod.train.finite import require_finite_loss
from maestro_lod.train.lod import LoD

Sizes: TypeAlias = Literal["below", "only"] | Sequence[Mapping[str, int | float]]
"""What is healed: the model with all sizes below it, only the model itself, or these ranks."""

_WARM_UP = 0.05  # of the steps, in which the learning rate rises
_LARGEST_GRADIENT = 1.0


def heal(
    model: nn.Module,
    data: Batches,
    *,
    teacher: nn.Module,
    steps: int = 500,
    lr: float = 5e-4,
    sizes: Sizes = "below",
    soft_loss: SoftLoss | None = None,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a cut model, in place, to give the outputs of its teacher; returns each step's loss.

    `data` are batches as for `calibrate`; targets are not looked at, and when the data ends it
    begins again. `soft_loss(output, teacher)` compares outputs: without one, scores that a
    transformers model calls `logits` by cross-entropy, any other output by its squared distance;
    `maestro_lod.pretrained.outputs.scores_loss` is for scores that are a plain tensor. `sizes` is
    "below" to train, beside the model, ranks of it that are sampled as LoD does, so that all
    smaller sizes stay good; "only" to train the model alone; or a list of ranks to be trained in
    turn. Dropout is off and norms keep their statistics: the model is repaired, not trained anew.
    `progress` is told the number of steps that are done, and the loss.
    """
    require_at_least_one("steps", steps, "healing takes steps")
    require_nonnegative("lr", lr)
    model, teacher = unwrapped(model), unwrapped(teacher)
    if teacher is model:
        raise OptionError("teacher is the model itself: keep a copy of the original for it.")
    require_low_rank(model)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: _share_of_rate(step, steps))
    backward = _backward(model, optimizer, sizes, seed)
    losses = []
    with in_mode(model, training=False), in_mode(teacher, training=False):
        for step, inputs in enumerate(itertools.islice(_forever(data), steps)):
            inputs = on_device(inputs, device_of(model))
            with torch.no_grad():
                wanted = call(teacher, inputs)
            compare = soft_loss or soft_loss_for(wanted)
            loss = backward(
                lambda inputs=inputs: call(model, inputs),  # type: ignore[misc]
                lambda output, c=compare, w=wanted: c(output, w),  # type: ignore[misc]
            )
            nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(loss))
            if progress is not None:
                progress(step + 1, losses[-1])
    return losses


def _share_of_rate(step: int, steps: int) -> float:
    """Rise for a moment, then fall along half a cosine to nothing."""
    warm = max(1, round(_WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _forever(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the inputs of all batches, again and again."""
    data = list(data) if isinstance(data, Iterator) else data
    while True:
        empty = True
        for batch in data:
            empty = False
            yield split_batch(batch)[0]
        if empty:
            raise DataError("there is nothing to heal on: the data has no batch.")


_Backward: TypeAlias = Callable[[Callable[[], Any], Callable[[Any], Tensor]], Tensor]


def _backward(model: nn.Module, optimizer: AdamW, sizes: Sizes, seed: int) -> _Backward:
    """Return what does the passes of one step: given forward and loss, as `LoD.backward`."""
    if sizes == "below":
        train = LoD(model, optimizer, threshold=None, sampling="several", full_pass=True, seed=seed)
        return lambda forward, loss: train.backward(forward, loss) / 2
    if isinstance(sizes, str) and sizes != "only":
        raise OptionError(f"sizes={sizes!r} is not known. Choose 'below' or 'only', or give ranks.")
    given = [{}] if isinstance(sizes, str) else [resolve_for(model, ranks) for ranks in sizes]
    if not given:
        raise OptionError("sizes=[] leaves nothing to heal. Give ranks, 'below' or 'only'.")
    turns = itertools.cycle(given)

    def one_size(forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> Tensor:
        with at_ranks(model, next(turns)):
            value = require_finite_loss(loss(forward()))
            value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    return one_size
