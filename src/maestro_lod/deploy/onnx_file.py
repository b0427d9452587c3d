"""ONNX files: one file, each weight once, run by onnxruntime. Needs the extra `export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime  # type: ignore[import-untyped]
import onnxscript  # noqa: F401  # needed by torch.onnx: fail at import if it is missing
import torch
from onnxruntime.quantization import (  # type: ignore[import-untyped]
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from torch import Tensor
from torch.export import ExportedProgram

from maestro_lod.model.inputs import ModelInputs


def write(program: ExportedProgram, path: Path) -> None:
    """Write a traced model, and check the file."""
    onnx.save(_converted(program), path)
    onnx.checker.check_model(path, full_check=True)


def write_int8(program: ExportedProgram, path: Path, samples: Sequence[ModelInputs]) -> None:
    """Write a traced model in 8 bits; samples of its inputs give the ranges of activations."""
    model = _converted(program)
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    if samples:
        # Seven bits of weights: eight saturate on processors without int8 products of their own.
        quantize_static(
            model, path, _Samples(model, samples), quant_format=QuantFormat.QDQ, per_channel=True,
            reduce_range=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
    else:
        quantize_dynamic(model, path, weight_type=QuantType.QUInt8)  # unsigned do not saturate
    onnx.save(_slim(onnx.load(path)), path)
    onnx.checker.check_model(path)  # without its full check, which does not know all operators


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    """Gives samples of inputs to onnxruntime's quantizer."""

    def __init__(self, model: onnx.ModelProto, samples: Sequence[ModelInputs]) -> None:
        names = [value.name for value in model.graph.input]
        self._feeds = iter([_feed(names, sample) for sample in samples])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def _feed(names: Sequence[str], call: ModelInputs) -> dict[str, Any]:
    return {name: t.cpu().numpy() for name, t in zip(names, call.tensors, strict=True)}


def _converted(program: ExportedProgram) -> onnx.ModelProto:
    outputs = len(program.graph_signature.user_outputs)
    names = ["output"] if outputs == 1 else [f"output_{i}" for i in range(outputs)]
    converted = torch.onnx.export(
        program, dynamo=True, output_names=names, external_data=False, verbose=False
    )
    assert converted is not None
    return _slim(converted.model_proto)


def _slim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove metadata, such as paths and source lines of this machine, in place."""
    graph = model.graph
    for described in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del described.metadata_props[:]
        described.doc_string = ""
    del graph.value_info[:]  # shapes between operations, which follow from the rest
    dims = [d for v in (*graph.input, *graph.output) for d in v.type.tensor_type.shape.dim]
    symbols = [d.dim_param for d in dims if d.dim_param]
    for dim in dims:
        if dim.dim_param and dim.dim_param == symbols[0]:  # the first input's leading one
            dim.dim_param = "batch"
    return model


def open_runner(path: Path) -> Callable[[ModelInputs], list[Tensor]]:
    """Load a file, and return a function that runs it by onnxruntime with torch's threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(call: ModelInputs) -> list[Tensor]:
        return [torch.from_numpy(array) for array in session.run(None, _feed(names, call))]

    return run
