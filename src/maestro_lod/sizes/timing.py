"""Interleaved timing of deployed models on the same inputs."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from maestro_lod.errors import LayerError
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.progress import ProgressLine

ROUNDS = 15
"""Of a timing that is shown to users."""
_CALLS, _SECONDS = 3, 3e-3  # one timing has at least so many calls and lasts at least so long


def run(model: nn.Module, call: ModelInputs) -> Any:
    """Call a model; report its errors as errors of the example."""
    try:
        return call.call(model)
    except Exception as error:
        raise LayerError(
            f"{type(model).__name__} does not run on this example "
            f"({type(error).__name__}: {error})."
        ) from error


def eager(model: nn.Module, call: ModelInputs) -> Callable[[], object]:
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
    """Return the ratios of two variants' times within each round."""
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
