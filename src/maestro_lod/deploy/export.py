"""Export of a model to a file that other programs run, verified before it is written.

.onnx           ONNX, for onnxruntime and other runtimes
.pt2            torch.export, for torch and AOTInductor
.safetensors    tensors alone, for `load(path, into=model)`
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
    output_tolerance,
    require_numbers,
    require_same_outputs,
)
from maestro_lod.errors import LayerError, OptionError, listed, suggest
from maestro_lod.files.atomic import replacing
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.checkpoint import plain_state, save_plain
from maestro_lod.model.cost import count_params
from maestro_lod.model.inputs import Example, ModelInputs, in_mode, model_device, tensors_in
from maestro_lod.model.surgery import extract
from maestro_lod.sizes.timing import interleaved, ratios, run
from maestro_lod.text import install_command

__all__ = ["FORMATS", "INT8_TOLERANCE", "TOLERANCE", "Exported", "export", "open_runner"]

FORMATS = ("onnx", "pt2", "safetensors")

_ROUNDS = 9


@dataclass(frozen=True)
class Exported:
    """A file with the same outputs as the model, its size and its time."""

    path: Path
    format: str
    quantize: str | None
    params: int
    weight_bytes: int
    """The bytes of the model's parameters."""
    bytes: int
    """The size of the file."""
    difference: float
    """The largest difference of an output to the model's, relative to the largest output."""
    batch: int | None
    """The only batch size that the file takes; None if it takes any."""
    seconds: float
    """The median time of one run at the example's batch size."""
    over_eager: float
    """The time of the file over the time of the model in eager torch, in the same rounds."""

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
    """Write a model to a file, after verifying that the file has the same outputs.

    A low-rank model is extracted first, at its stored ranks. A temporary file is run on random
    inputs at two batch sizes and compared with the model, up to `TOLERANCE`, before it is moved to
    `path`; a failure leaves no file. Files take any batch size, if the model can be traced for it.

    >>> exported = export(model, "model.onnx", example=x)

    Args:
        model: The model, which is not changed.
        path: The file to write; an existing one is replaced.
        example: An input of the model, whose leading dimension is the batch. Floats only need the
            right shapes; integers, such as token ids, are used as inputs.
        format: "onnx", "pt2" or "safetensors"; by default the suffix of the path.
        quantize: "int8" stores the weights of an ONNX file in 8 bits, and quantizes activations at
            run time.

    Returns:
        The file, its size, its time, and its largest difference from the model.

    Raises:
        LayerError: The model cannot be exported in this format, or returns only NaN.
        OptionError: The format is not known, its tools are not installed, or `quantize` does not
            fit.
        OutputError: The outputs of the file differ from those of the model.
    """
    path = Path(path)
    format = _known_format(path, format)
    _require_possible(model, format, quantize)
    plain = extract(model) if low_rank_layers(model) else model
    call, device = ModelInputs.from_example(example), model_device(plain)
    usual = call.drawn(device)
    with replacing(path) as temporary, in_mode(plain, training=False), torch.no_grad(), _quiet():
        require_numbers(plain, run(plain, usual))  # before anything else, for a clear error
        runner, batch = _written(plain, call, temporary, format, quantize)
        other = [] if batch else [call.drawn(device, batch=1 if call.batch_size > 1 else 3)]
        limit = INT8_TOLERANCE if quantize else output_tolerance(plain)
        difference = require_same_outputs(plain, runner, [usual, *other], limit, path)
        times = _timed(plain, None if format == "safetensors" else runner, usual)
    weight_bytes = sum(p.nbytes for p in plain.parameters())
    size = path.stat().st_size
    return Exported(
        path, format, quantize, count_params(plain), weight_bytes, size, difference, batch, *times
    )


def _require_possible(model: nn.Module, format: str, quantize: str | None) -> None:
    """Raise OptionError if a format cannot hold the model, or its tools are not installed."""
    if quantize not in (None, "int8") or (quantize and format != "onnx"):
        raise OptionError(
            f"quantize={quantize!r} is not available for {format}. Use 'int8' with an .onnx file."
        )
    if format == "onnx":
        _onnx_file()
    untraceable = [name for name, _ in model.named_modules() if set(name) & set('"\\\n\r')]
    if untraceable and format != "safetensors":  # the others use the names in code
        raise OptionError(
            f"torch cannot trace a layer whose name has quotes or backslashes: {untraceable[0]!r}. "
            "Rename it, or export to safetensors."
        )


def _written(
    plain: nn.Module, call: ModelInputs, path: Path, format: str, quantize: str | None
) -> tuple[Runner, int | None]:
    """Write a file; return its runner, and its batch size if it takes only one."""
    if format == "safetensors":
        save_plain(plain, path)
        return _reloaded(plain, path), None
    program, batch = _traced(plain, call, format)
    with _refusing(plain, format):
        if format == "onnx":
            _onnx_file().write(program, path, int8=quantize is not None)
        else:
            pt2_file.write(program, path)
    return _open_runner(path, format), batch


def _timed(plain: nn.Module, runner: Runner | None, call: ModelInputs) -> tuple[float, float]:
    """Return the seconds of a file, or of the model itself, and their ratio to the model's."""
    variants: dict[str, Callable[[], object]] = {"eager": lambda: run(plain, call)}
    if runner is not None:
        variants["file"] = lambda: runner(call)
    times = interleaved(variants, rounds=_ROUNDS)
    seconds = times.get("file", times["eager"])
    return statistics.median(seconds), statistics.median(ratios(seconds, times["eager"]))


def open_runner(path: str | os.PathLike[str]) -> Runner:
    """Load an exported .onnx or .pt2 file, and return a function that runs it."""
    path = Path(path)
    return _open_runner(path, _known_format(path, None))


def _open_runner(path: Path, format: str) -> Runner:
    if format == "onnx":
        runner: Runner = _onnx_file().open_runner(path)
        return runner
    if format == "pt2":
        return pt2_file.open_runner(path)
    raise OptionError(
        f"{path} contains only tensors and cannot be run. Use load(path, into=model)."
    )


# -- formats -----------------------------------------------------------------------------------


def _known_format(path: Path, format: str | None) -> str:
    name = path.suffix.removeprefix(".") if format is None else format
    if name not in FORMATS:
        problem = f"format {name!r}" if name else f"{path.name} without a suffix"
        raise OptionError(
            f"{problem} is not known.{suggest(name, FORMATS)} Formats: {listed(FORMATS)}."
        )
    return name


def _onnx_file() -> Any:
    try:
        return importlib.import_module("maestro_lod.deploy.onnx_file")
    except ImportError as error:
        raise OptionError(
            f"ONNX files need {error.name}, which is not installed: {install_command('export')}."
        ) from error


def _traced(model: nn.Module, call: ModelInputs, format: str) -> tuple[ExportedProgram, int | None]:
    """Trace a model for any batch size; if that fails, warn and use the example's batch size.

    Returns:
        The traced model, and the only batch size that it takes; None if it takes any.
    """
    device, size = model_device(model), call.batch_size
    several = max(size, 2)  # torch.export treats a batch of one as a constant
    traced = call.drawn(device, batch=several)
    batch, shapes = Dim("batch"), cast("Any", ShapesCollection)()
    for tensor in traced.tensors:
        if tensor.ndim and tensor.shape[0] == several:
            shapes[tensor] = {0: batch}
    try:
        exported = torch.export.export(model, traced.args, traced.kwargs, dynamic_shapes=shapes)
        return exported, None
    except (
        Exception
    ) as error:  # any error: the second attempt tells whether the batch was the reason
        traced = call.drawn(device)
        with _refusing(model, format):
            exported = torch.export.export(model, traced.args, traced.kwargs)
        warnings.warn(
            f"{type(model).__name__} is exported for batch size {size} only: it cannot be traced "
            f"for any size ({_in_one_line(error)}).",
            stacklevel=4,
        )
        return exported, size


def _reloaded(model: nn.Module, path: Path) -> Runner:
    """Return the runner of a copy of the model with the state of the file alone."""
    twin = copy.deepcopy(model)
    for tensor in twin.state_dict().values():
        tensor.zero_()
    twin.load_state_dict(plain_state(path))
    return lambda call: tensors_in(call.call(twin))


# -- surroundings ------------------------------------------------------------------------------


@contextmanager
def _refusing(model: nn.Module, format: str) -> Iterator[None]:
    """Raise LayerError, with one line of its reason, for any error of a tool."""
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
    """Silence torch's warnings about its own internals during an export."""

    def is_relevant(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(is_relevant)
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
            logger.removeFilter(is_relevant)
