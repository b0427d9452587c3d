"""Extracted models as files that other programs run, each verified before it is there.

.onnx           ONNX, for onnxruntime and everything else that reads it
.pt2            torch.export, for torch and what is built on it
.safetensors    tensors alone; `load` puts them into the user's own model
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from maestro_lod.deploy import pt2_file
from maestro_lod.deploy.verification import (
    INT8_TOLERANCE,
    TOLERANCE,
    Runner,
    require_numbers,
    require_same_outputs,
    tensors_in,
    tolerance_of,
)
from maestro_lod.errors import LayerError, OptionError, listed, suggest
from maestro_lod.files.atomic import replacing
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.checkpoint import plain_state, save_plain
from maestro_lod.model.cost import count_params
from maestro_lod.model.inputs import Call, Example, as_call, device_of, in_mode
from maestro_lod.model.surgery import extract
from maestro_lod.sizes.timing import batch_of, drawn_call, interleaved, ratios, run
from maestro_lod.text import install_command

__all__ = ["FORMATS", "INT8_TOLERANCE", "TOLERANCE", "Exported", "export", "opened"]

FORMATS = ("onnx", "pt2", "safetensors")

_ROUNDS = 9


@dataclass(frozen=True)
class Exported:
    """A file that computes what the model does, and what it costs."""

    path: Path
    format: str
    quantize: str | None
    params: int
    weight_bytes: int
    """Parameters times the bytes of each, in the model."""
    bytes: int
    """The size of the file."""
    difference: float
    """The largest difference of an output to the model's, relative to the largest output."""
    batch: int | None
    """The one batch size that the file takes; None if it takes any."""
    seconds: float
    """The median time of one run at the example's batch size, by what runs the format."""
    over_eager: float
    """That time over the time of the model in eager torch, in the same rounds."""

    @property
    def size_ratio(self) -> float:
        """The size of the file over that of the parameters alone."""
        return self.bytes / max(self.weight_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "path": str(self.path), "size_ratio": self.size_ratio}

    def __str__(self) -> str:
        kind = self.format if self.quantize is None else f"{self.format} {self.quantize}"
        batch = "any batch size" if self.batch is None else f"batch size {self.batch} only"
        return (
            f"{self.path}: {kind}, {self.params:,} params, {self.bytes:,} bytes "
            f"({self.size_ratio:.2f}× the weights), max difference {self.difference:.1e}, "
            f"{self.seconds * 1e3:.2f} ms ({self.over_eager:.2f}× eager), {batch}"
        )


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    example: Example,
    format: str | None = None,
    quantize: Literal["int8"] | None = None,
) -> Exported:
    """Write a model to a file that was proven to compute the same; the model is untouched.

    A low-rank model is extracted first, at its stored ranks. The format is that of the suffix:
    ".onnx", ".pt2" or ".safetensors". Of the example's floats only the shapes count; whole numbers,
    such as token ids, are used as they are. The leading dimension is the batch; files take any
    batch size where the model can be traced so. `quantize="int8"`, for ONNX, stores weights in 8
    bits and quantizes activations as they come.

    The file is written beside its place, run on random inputs at two batch sizes and compared to
    the model (see `TOLERANCE`), and only then put there: what fails leaves nothing behind.
    """
    path = Path(path)
    format = _known_format(path, format)
    _require_possible(model, format, quantize)
    plain = extract(model) if low_rank_layers(model) else model
    call, device = as_call(example), device_of(plain)
    usual = drawn_call(call, device)
    with replacing(path) as temporary, in_mode(plain, training=False), torch.no_grad(), _quiet():
        require_numbers(plain, run(plain, usual))  # before anything else, for a clear error
        runner, batch = _written(plain, call, temporary, format, quantize)
        other = [] if batch else [drawn_call(call, device, batch=1 if batch_of(call) > 1 else 3)]
        limit = INT8_TOLERANCE if quantize else tolerance_of(plain)
        difference = require_same_outputs(plain, runner, [usual, *other], limit, path)
        times = _timed(plain, None if format == "safetensors" else runner, usual)
    weight_bytes = sum(p.nbytes for p in plain.parameters())
    size = path.stat().st_size
    return Exported(
        path, format, quantize, count_params(plain), weight_bytes, size, difference, batch, *times
    )


def _require_possible(model: nn.Module, format: str, quantize: str | None) -> None:
    """Refuse what no file of the format can hold, and formats whose tools are not installed."""
    if quantize not in (None, "int8") or (quantize and format != "onnx"):
        raise OptionError(
            f"quantize={quantize!r} is not there for {format}. Choose 'int8' with an .onnx file."
        )
    if format == "onnx":
        _onnx_file()
    strange = [name for name, _ in model.named_modules() if set(name) & set('"\\\n\r')]
    if strange and format != "safetensors":  # the others have names in code, as they are
        raise OptionError(
            f"a layer is called {strange[0]!r}: torch cannot trace names with quotes or "
            "backslashes. Rename it, or export to safetensors."
        )


def _written(
    plain: nn.Module, call: Call, path: Path, format: str, quantize: str | None
) -> tuple[Runner, int | None]:
    """Write a file; return what runs it, and its batch size where it takes one alone."""
    if format == "safetensors":
        save_plain(plain, path)
        return _reloaded(plain, path), None
    program, batch = _traced(plain, call, format)
    with _refusing(plain, format):
        if format == "onnx":
            _onnx_file().write(program, path, int8=quantize is not None)
        else:
            pt2_file.write(program, path)
    return _opened(path, format), batch


def _timed(plain: nn.Module, runner: Runner | None, call: Call) -> tuple[float, float]:
    """Return the seconds of a file, or of the model without one, and those over the model's."""
    variants: dict[str, Callable[[], object]] = {"eager": lambda: run(plain, call)}
    if runner is not None:
        variants["file"] = lambda: runner(call)
    times = interleaved(variants, rounds=_ROUNDS)
    seconds = times.get("file", times["eager"])
    return statistics.median(seconds), statistics.median(ratios(seconds, times["eager"]))


def opened(path: str | os.PathLike[str]) -> Runner:
    """Return what runs an exported .onnx or .pt2 file: a call in, a list of tensors out."""
    path = Path(path)
    return _opened(path, _known_format(path, None))


def _opened(path: Path, format: str) -> Runner:
    if format == "onnx":
        runner: Runner = _onnx_file().opened(path)
        return runner
    if format == "pt2":
        return pt2_file.opened(path)
    raise OptionError(f"{path} holds tensors and does not run. Use load(path, into=model).")


# -- formats -----------------------------------------------------------------------------------


def _known_format(path: Path, format: str | None) -> str:
    wanted = path.suffix.removeprefix(".") if format is None else format
    if wanted not in FORMATS:
        what = f"format {wanted!r}" if wanted else f"{path.name} without a suffix"
        raise OptionError(
            f"{what} is not known.{suggest(wanted, FORMATS)} Formats: {listed(FORMATS)}."
        )
    return wanted


def _onnx_file() -> Any:
    try:
        return importlib.import_module("maestro_lod.deploy.onnx_file")
    except ImportError as error:
        raise OptionError(
            f"ONNX files need {error.name}, which is not installed: {install_command('export')}."
        ) from error


def _traced(model: nn.Module, call: Call, format: str) -> tuple[ExportedProgram, int | None]:
    """Trace a model for any batch size if it can be, else for the example's, which is returned.

    That the batch is fixed is told in a warning, with torch's reason.
    """
    device, size = device_of(model), batch_of(call)
    several = max(size, 2)  # tracing takes a batch of one for a constant
    traced = drawn_call(call, device, batch=several)
    batch, shapes = Dim("batch"), cast("Any", ShapesCollection)()
    for tensor in tensors_in((traced.args, traced.kwargs)):
        if tensor.ndim and tensor.shape[0] == several:
            shapes[tensor] = {0: batch}
    try:
        exported = torch.export.export(model, traced.args, traced.kwargs, dynamic_shapes=shapes)
        return exported, None
    except Exception as error:  # whatever it is, the attempt at one size tells if it is the batch
        traced = drawn_call(call, device)
        with _refusing(model, format):
            exported = torch.export.export(model, traced.args, traced.kwargs)
        warnings.warn(
            f"{type(model).__name__} is exported for batch size {size} only: it cannot be traced "
            f"for any size ({_in_one_line(error)}).",
            stacklevel=4,
        )
        return exported, size


def _reloaded(model: nn.Module, path: Path) -> Runner:
    """Return a copy of the model whose state comes from the file and from nowhere else."""
    twin = copy.deepcopy(model)
    for tensor in twin.state_dict().values():
        tensor.zero_()
    twin.load_state_dict(plain_state(path))
    return lambda call: tensors_in(twin(*call.args, **call.kwargs))


# -- surroundings ------------------------------------------------------------------------------


@contextmanager
def _refusing(model: nn.Module, format: str) -> Iterator[None]:
    """Tell what a tool could not do as a fault of the model, in one line."""
    try:
        yield
    except Exception as error:
        raise LayerError(
            f"{type(model).__name__} cannot be exported as {format} ({_in_one_line(error)})."
        ) from error


def _in_one_line(error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch says about itself while it exports, and nothing else."""

    def about_the_model(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(about_the_model)
    with warnings.catch_warnings():
        for message in (
            r"`isinstance\(treespec, LeafSpec\)` is deprecated",
            r"_check_is_size will be removed",
            r"The tensor attributes .*_flat_weights.* were assigned during export",
        ):
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            logger.removeFilter(about_the_model)
