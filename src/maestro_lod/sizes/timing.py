"""Try out a model as it is deployed: on a call with drawn values, in eval mode, side by side."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from maestro_lod.errors import LayerError, OptionError
from maestro_lod.model.inputs import Call
from maestro_lod.progress import ProgressLine

ROUNDS = 15
"""Of a timing that is shown to users."""
_CALLS, _SECONDS = 3, 3e-3  # one timing has at least so many calls and lasts at least so long


def drawn_call(call: Call, device: torch.device, *, batch: int | None = None) -> Call:
    """Return the call with random floats, whole numbers kept, at another batch size if given.

    The batch is the leading dimension of the first tensor, and of all others that have it too;
    rows of whole numbers are repeated in turn. The same call is drawn every time.
    """
    generator = torch.Generator(device).manual_seed(0)
    size = batch_of(call)

    def draw(value: Tensor) -> Tensor:
        if batch is not None and value.ndim and value.shape[0] == size:
            rows = torch.arange(batch, device=value.device) % max(size, 1)
            value = value.index_select(0, rows)
        return drawn(value, device, generator)

    args, kwargs = tree_map_only(Tensor, draw, (call.args, call.kwargs))
    return Call(args, kwargs)


def drawn(value: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return random floats of the same shape and layout, or whole numbers as they are."""
    if value.is_floating_point():
        return torch.empty_like(value, device=device).normal_(generator=generator)
    if value.is_meta:
        raise OptionError(
            f"the example holds {value.dtype} values on the meta device, which cannot be guessed. "
            "Give a real example."
        )
    return value.to(device)


def batch_of(call: Call) -> int:
    """Return the leading dimension of the first tensor of a call."""
    tensors = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
    if not tensors or not tensors[0].ndim:
        raise OptionError("the example has no tensor with a batch dimension. Give a batch of one.")
    return int(tensors[0].shape[0])


def run(model: nn.Module, call: Call) -> Any:
    """Call a model; what goes wrong is told as a fault of the example."""
    try:
        return model(*call.args, **call.kwargs)
    except Exception as error:
        raise LayerError(
            f"{type(model).__name__} does not run on this example "
            f"({type(error).__name__}: {error})."
        ) from error


def eager(model: nn.Module, call: Call) -> Callable[[], object]:
    """Return what runs a copy of the model in eval mode on a call."""
    model = copy.deepcopy(model).eval()
    return lambda: run(model, call)


@torch.inference_mode()
def interleaved(
    variants: Mapping[Any, Callable[[], object]], *, rounds: int
) -> dict[Any, list[float]]:
    """Time variants in turn: seconds per call by round, each round begun by a random one.

    What slows the machine down for a while meets all variants, so ratios within a round are
    steadier than times. A timing is the best of a few calls, since the machine may be interrupted.
    """
    asynchronous = torch.accelerator.is_available()
    wait = torch.accelerator.synchronize if asynchronous else (lambda: None)
    for call in variants.values():
        call()
        call()
    times: dict[Any, list[float]] = {key: [] for key in variants}
    keys, draw = list(variants), random.Random(0)
    tell = ProgressLine("measuring")
    for done in range(rounds):
        start = draw.randrange(len(keys))  # neighbours, which are compared, stay neighbours
        for key in keys[start:] + keys[:start]:
            times[key].append(_seconds(variants[key], wait))
            tell(lambda done=done: f"round {done + 1} of {rounds}")  # type: ignore[misc]
    return times


def ratios(times: Sequence[float], over: Sequence[float]) -> list[float]:
    """Return how long one variant took over another, within each round."""
    return [one / other for one, other in zip(times, over, strict=True)]


def _seconds(call: Callable[[], object], wait: Callable[[], object]) -> float:
    timings: list[float] = []
    while len(timings) < _CALLS or sum(timings) < _SECONDS:
        wait()
        start = time.perf_counter()
        call()
        wait()
        timings.append(time.perf_counter() - start)
    return min(timings)
