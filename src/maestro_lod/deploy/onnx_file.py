"""ONNX files: one file, each weight once, run by onnxruntime. Needs the extra `export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime  # type: ignore[import-untyped]
import onnxscript  # noqa: F401  # needed by torch.onnx: fail at import if it is missing
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-untyped]
from torch import Tensor
from torch.export import ExportedProgram

from maestro_lod.model.inputs import ModelInputs


def write(program: ExportedProgram, path: Path, *, int8: bool) -> None:
    """Write a traced model, with int8 weights on request, and check the file."""
    outputs = len(program.graph_signature.user_outputs)
    names = ["output"] if outputs == 1 else [f"output_{i}" for i in range(outputs)]
    converted = torch.onnx.export(
        program, dynamo=True, output_names=names, external_data=False, verbose=False
    )
    assert converted is not None
    model = _slim(converted.model_proto)
    if int8:
        # Unsigned weights: signed ones saturate on processors without int8 products of their own.
        model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
        quantize_dynamic(model, path, weight_type=QuantType.QUInt8)
        model = _slim(onnx.load(path))
    onnx.save(model, path)
    onnx.checker.check_model(
        path, full_check=not int8
    )  # the checker does not know onnxruntime's operators


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
        feed = {name: t.cpu().numpy() for name, t in zip(names, call.tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run
