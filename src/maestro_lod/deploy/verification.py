"""Verification that an exported file computes the same as its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import LayerError, OutputError
from maestro_lod.model.inputs import ModelInputs, tensors_in
from maestro_lod.sizes.timing import run

TOLERANCE = 1e-4
"""The largest difference of a file's outputs from the model's, relative to the largest output.

For half-precision models it is eight units in the last place instead, if that is more.
"""

INT8_TOLERANCE = 0.2
"""The same for files quantized to int8, which report their difference."""

Runner = Callable[[ModelInputs], list[Tensor]]
"""Runs a file: takes the inputs of a call and returns a list of tensors."""


def require_same_outputs(
    model: nn.Module, runner: Runner, calls: list[ModelInputs], limit: float, path: Path
) -> float:
    """Return the largest difference of a file from its model; raise OutputError above a limit."""
    worst = 0.0
    for call in calls:
        expected, got = tensors_in(run(model, call)), runner(call)
        problem = f"{path.name} was not written: at batch size {call.batch_size} the file returns"
        if [t.shape for t in expected] != [t.shape for t in got]:
            shapes = [tuple(t.shape) for t in got], [tuple(t.shape) for t in expected]
            raise OutputError(f"{problem} outputs of shapes {shapes[0]} instead of {shapes[1]}.")
        for one, other in zip(expected, got, strict=True):
            worst = max(worst, _difference(one.cpu().double(), other.cpu().double()))
        if not worst <= limit:
            raise OutputError(
                f"{problem} outputs that differ by {worst:.1e} of the largest, more than "
                f"{limit:.0e}. Try another format, or the model in float32."
            )
    return worst


def require_numbers(model: nn.Module, outputs: Any) -> None:
    """Raise LayerError for a model whose outputs are all NaN: any file would equal it."""
    values = [t for t in tensors_in(outputs) if t.is_floating_point() and t.numel()]
    if values and all(bool(t.isnan().all()) for t in values):
        raise LayerError(
            f"{type(model).__name__} returns only NaN: its training has diverged. Load the last "
            "good checkpoint."
        )


def _difference(expected: Tensor, got: Tensor) -> float:
    """Return the largest difference relative to the largest finite value.

    It is infinite if a value is finite on one side alone.
    """
    finite = expected.isfinite()
    if not torch.allclose(expected[~finite], got[~finite], equal_nan=True):
        return float("inf")
    expected, got = expected[finite], got[finite]
    if not bool(got.isfinite().all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max()) or 1.0
    return float((expected - got).abs().max()) / scale


def output_tolerance(model: nn.Module) -> float:
    """Return the largest relative difference that the dtypes of a model allow."""
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return max([TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in floats)])
