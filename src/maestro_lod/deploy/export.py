"""Export of a model to a file that other programs run, verified before it is written.

.onnx           ONNX, for onnxruntime and other runtimes
.pt2            torch.export, for torch and AOTInductor
.pte            ExecuTorch with XNNPACK, for phones and small computers
.safetensors    tensors alone, for `load(path, into=model)`
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

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
from maestro_lod.sizes.timing import ROUNDS, interleaved, relative, run
from maestro_lod.text import install_command

__all__ = ["FORMATS", "INT8_TOLERANCE", "TOLERANCE", "Exported", "export", "open_runner"]

FORMATS = ("onnx", "pt2", "pte", "safetensors")
QUANTIZED = ("onnx", "pte")
"""Formats that can have 8 bits."""


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
    calibration: Iterable[Example] = (),
) -> Exported:
    """Write a model to a file, after verifying that the file has the same outputs.

    A low-rank model is extracted first, at its stored ranks. A temporary file is run on random
    inputs at two batch sizes and compared with the model, up to `TOLERANCE`, before it is moved to
    `path`; a failure leaves no file. Files take any batch size, if the model can be traced for it;
    .pte files take that of the example alone.

    >>> exported = export(model, "model.onnx", example=x)

    Args:
        model: The model, which is not changed.
        path: The file to write; an existing one is replaced.
        example: An input of the model, whose leading dimension is the batch. Floats only need the
            right shapes; integers, such as token ids, are used as inputs.
        format: "onnx", "pt2", "pte" or "safetensors"; by default the suffix of the path.
        quantize: "int8" stores the weights of an .onnx or .pte file in 8 bits, by the quantizer of
            its runtime. Activations are quantized too.
        calibration: Inputs like the example from which `quantize` takes the ranges of activations.
            Without any, ranges are computed at run time, which takes longer.

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
    call = ModelInputs.from_example(example)
    samples = [part for batch in calibration for part in _parts(batch, call.batch_size)]
    _require_possible(model, format, quantize, samples)
    plain = extract(model) if low_rank_layers(model) else model
    device = model_device(plain)
    samples = [sample.to(device) for sample in samples]
    usual = call.drawn(device)
    with replacing(path) as temporary, in_mode(plain, training=False), torch.no_grad(), _quiet():
        require_numbers(plain, run(plain, usual))  # before anything else, for a clear error
        batch = _write(plain, call, temporary, format, quantize, samples)
        second = 1 if call.batch_size > 1 else 3
        if samples:  # the ranges of activations are those of real inputs
            calls = [samples[0]] if batch else [samples[0], samples[0].rows(0, second)]
        else:
            calls = [usual] if batch else [usual, call.drawn(device, batch=second)]
        limit = INT8_TOLERANCE if quantize else output_tolerance(plain)
        runner = _runner(plain, temporary, format, calls)
        difference = require_same_outputs(plain, runner, calls, limit, path)
        if format == "pte":
            runner = _open_runner(temporary, format)
        times = _timed(plain, None if format == "safetensors" else runner, usual)
    weight_bytes = sum(p.nbytes for p in plain.parameters())
    size = path.stat().st_size
    return Exported(
        path, format, quantize, count_params(plain), weight_bytes, size, difference, batch, *times
    )


def _parts(batch: Example, size: int) -> list[ModelInputs]:
    """Return a batch in parts of one size; the last one repeats the first rows."""
    call = ModelInputs.from_example(batch)
    return [call.rows(start, size) for start in range(0, call.batch_size, size)]


def _require_possible(
    model: nn.Module, format: str, quantize: str | None, samples: list[ModelInputs]
) -> None:
    """Raise OptionError if a format cannot hold the model, or its tools are not installed."""
    if quantize not in (None, "int8") or (quantize and format not in QUANTIZED):
        raise OptionError(
            f"quantize={quantize!r} is not available for {format}. Use 'int8' with an .onnx or "
            ".pte file."
        )
    if samples and not quantize:
        raise OptionError("calibration has no effect without quantize. Add quantize='int8'.")
    if format != "safetensors":
        _tools(format)
    untraceable = [name for name, _ in model.named_modules() if set(name) & set('"\\\n\r')]
    if untraceable and format != "safetensors":  # the others use the names in code
        raise OptionError(
            f"torch cannot trace a layer whose name has quotes or backslashes: {untraceable[0]!r}. "
            "Rename it, or export to safetensors."
        )


def _write(
    plain: nn.Module,
    call: ModelInputs,
    path: Path,
    format: str,
    quantize: str | None,
    samples: list[ModelInputs],
) -> int | None:
    """Write a file; return its batch size if it takes only one."""
    if format == "safetensors":
        save_plain(plain, path)
        return None
    program, batch = _traced(plain, call, format)
    if quantize and format == "pte":
        with _refusing(plain, format):
            any_call = call.drawn(model_device(plain))
            quantized = _tools(format).quantized(
                program, samples or [any_call], dynamic=not samples
            )
        program, batch = _traced(quantized, ModelInputs(tuple(call.tensors), {}), format)
    with _refusing(plain, format):
        if quantize and format == "onnx":
            _tools(format).write_int8(program, path, samples)
        else:
            _tools(format).write(program, path)
    return batch


def _runner(plain: nn.Module, path: Path, format: str, calls: list[ModelInputs]) -> Runner:
    """Return a function that runs a new file on these calls, in their order."""
    if format == "safetensors":
        return _reloaded(plain, path)
    if format == "pte":  # its runtime ends the process at some errors
        outputs = iter(_tools(format).run_elsewhere(path, calls))
        return lambda _: cast("list[Tensor]", next(outputs))
    return _open_runner(path, format)


def _timed(plain: nn.Module, runner: Runner | None, call: ModelInputs) -> tuple[float, float]:
    """Return the seconds of a file, or of the model itself, and their ratio to the model's."""
    variants: dict[str, Callable[[], object]] = {"eager": lambda: run(plain, call)}
    if runner is not None:
        variants["file"] = lambda: runner(call)
    times = interleaved(variants, rounds=ROUNDS)
    return relative(times, "eager" if runner is None else "file", "eager")


def open_runner(path: str | os.PathLike[str]) -> Runner:
    """Load an exported .onnx, .pt2 or .pte file, and return a function that runs it."""
    path = Path(path)
    return _open_runner(path, _known_format(path, None))


def _open_runner(path: Path, format: str) -> Runner:
    if format == "safetensors":
        raise OptionError(
            f"{path} contains only tensors and cannot be run. Use load(path, into=model)."
        )
    runner: Runner = _tools(format).open_runner(path)
    return runner


# -- formats -----------------------------------------------------------------------------------


def _known_format(path: Path, format: str | None) -> str:
    name = path.suffix.removeprefix(".") if format is None else format
    if name not in FORMATS:
        problem = f"format {name!r}" if name else f"{path.name} without a suffix"
        raise OptionError(
            f"{problem} is not known.{suggest(name, FORMATS)} Formats: {listed(FORMATS)}."
        )
    return name


_EXTRAS = {"onnx": "export", "pte": "executorch"}


def _tools(format: str) -> Any:
    """Import the module of a format; raise OptionError if its tools are not installed."""
    try:
        return importlib.import_module(f"maestro_lod.deploy.{format}_file")
    except ImportError as error:
        names = {"onnx": "ONNX", "pte": "ExecuTorch"}
        raise OptionError(
            f"{names[format]} files need {error.name}, which is not installed: "
            f"{install_command(_EXTRAS[format])}."
        ) from error


def _traced(model: nn.Module, call: ModelInputs, format: str) -> tuple[ExportedProgram, int | None]:
    """Trace a model for any batch size; if that fails, warn and use the example's batch size.

    Returns:
        The traced model, and the only batch size that it takes; None if it takes any.
    """
    device, size = model_device(model), call.batch_size
    if format == "pte":
        model, call = _of_tensors(model, call)
        with _refusing(model, format):  # some of its files for several sizes fail at all but one
            return torch.export.export(model, call.drawn(device).args), size
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


def _of_tensors(model: nn.Module, call: ModelInputs) -> tuple[nn.Module, ModelInputs]:
    """Return a model that takes only the tensors of a call, and its call."""

    class OfTensors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Tensor) -> Any:
            values = iter(tensors)
            return call.map_tensors(lambda _: next(values)).call(self.model)

    OfTensors.__name__ = type(model).__name__
    wrapped = OfTensors()
    wrapped.training = model.training  # a traced model cannot change its mode
    return wrapped, ModelInputs(tuple(call.tensors), {})


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
