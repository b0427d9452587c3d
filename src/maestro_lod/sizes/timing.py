"""Interleaved timing of deployed models on the same inputs."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from maestro_lod.errors import LayerError
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.progress import ProgressLine

ROUNDS = 15
"""The number of rounds of every timing that is reported to users."""
_CALLS, _SECONDS = 3, 3e-3  # the least number of calls and duration of one timing


def run(model: nn.Module, call: ModelInputs) -> Any:
    """Call a model; report its errors as errors of the example."""
    try:
        return call.call(model)
    except Exception as error:
        raise LayerError(
            f"{type(model).__name__} does not run on this example "
            f"({type(error).__name__}: {error}). Give another example."
        ) from error


def eager(model: nn.Module, call: ModelInputs) -> Callable[[], object]:
    """Return a function that runs a copy of the model in eval mode on a call."""
    model = copy.deepcopy(model).eval()
    return lambda: run(model, call)


@torch.inference_mode()
def interleaved(
    variants: Mapping[Any, Callable[[], object]], *, rounds: int
) -> dict[Any, list[float]]:
    """Time variants in turn, and return the seconds per call by round.

    A temporary slowdown of the machine affects all variants of a round, so ratios within a round
    vary less than times. Each round starts at a random variant. A timing is the best of a few
    calls, to exclude interruptions.
    """
    asynchronous = torch.accelerator.is_available()
    wait = torch.accelerator.synchronize if asynchronous else (lambda: None)
    for call in variants.values():
        call()
        call()
    times: dict[Any, list[float]] = {key: [] for key in variants}
    keys, draw = list(variants), random.Random(0)
    progress = ProgressLine("measuring")
    for done in range(rounds):
        start = draw.randrange(len(keys))  # compared variants stay neighbours
        for key in keys[start:] + keys[:start]:
            times[key].append(_seconds(variants[key], wait))
            progress(lambda done=done: f"round {done + 1} of {rounds}")  # type: ignore[misc]
    return times


def relative(times: Mapping[Any, Sequence[float]], key: Any, over: Any) -> tuple[float, float]:
    """Return the seconds of a variant, and its ratio to another; the one over the other agree.

    The ratio is the median of those within rounds, and the seconds are that of the other's median.
    """
    ratio = statistics.median(ratios(times[key], times[over]))
    return ratio * statistics.median(times[over]), ratio


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
