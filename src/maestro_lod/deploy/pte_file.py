"""ExecuTorch files: one method for the XNNPACK backend. Needs the extra `executorch`.

The files run in ExecuTorch's runtime on phones and small computers, without Python and torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.export import ExportedProgram

from maestro_lod.errors import OutputError
from maestro_lod.model.inputs import ModelInputs, tensors_in


@contextmanager
def _without_messages() -> Iterator[None]:
    """Discard what the tools say about themselves, which C++ writes to the descriptor."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


with _without_messages():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

_METHOD = "forward"

_PROCESS = """
import sys
sys.path[:] = [place for place in sys.path if place]  # not the working directory
import torch
from executorch.extension.pybindings import _C  # the runtime alone, without the exporter
from safetensors.torch import load_file, save_file
path, inputs, outputs = sys.argv[1:]
given = load_file(inputs)
program = _C._load_for_executorch(path)
tensors = {}
for call in range(1 + max(int(name.split(".")[0]) for name in given)):
    names = [name for name in given if name.startswith(f"{call}.")]
    results = program.run_method("forward", [given[f"{call}.{i}"] for i in range(len(names))])
    for i, tensor in enumerate(x for x in results if isinstance(x, torch.Tensor)):
        tensors[f"{call}.{i}"] = tensor.contiguous()
save_file(tensors, outputs)
"""
"""Runs a file on the calls in another file, with ExecuTorch's runtime alone."""


def write(program: ExportedProgram, path: Path) -> None:
    """Write a traced model."""
    with _without_messages():
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)


def quantized(
    program: ExportedProgram, samples: Sequence[ModelInputs], *, dynamic: bool
) -> torch.nn.Module:
    """Return a traced model in 8 bits; samples of its inputs give the ranges of activations.

    If the ranges are dynamic, a sample is needed for those of the weights.
    """
    with _without_messages():
        settings = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
        prepared = prepare_pt2e(program.module(), XNNPACKQuantizer().set_global(settings))
        for sample in samples:
            prepared(*sample.tensors)
        model: torch.nn.Module = convert_pt2e(prepared)
    return model


def run_elsewhere(path: Path, calls: Sequence[ModelInputs]) -> list[list[Tensor]]:
    """Run a file in a process of its own, without this library, and return the outputs by call.

    The runtime ends its process at some errors, which must not be this one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch) / "inputs", Path(scratch) / "outputs"
        given = {
            f"{i}.{j}": tensor.cpu().clone()
            for i, call in enumerate(calls)
            for j, tensor in enumerate(_contiguous(call))
        }
        save_file(given, inputs)
        command = [sys.executable, "-c", _PROCESS, str(path), str(inputs), str(outputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise OutputError(
                f"the .pte file was not written: ExecuTorch cannot run it ({reason}). Try another "
                "format, such as onnx."
            )
        found = load_file(outputs)
    counts = [sum(name.startswith(f"{i}.") for name in found) for i in range(len(calls))]
    return [[found[f"{i}.{j}"] for j in range(count)] for i, count in enumerate(counts)]


def open_runner(path: Path) -> Callable[[ModelInputs], list[Tensor]]:
    """Load a file, and return a function that runs it by ExecuTorch with torch's threads."""
    with _without_messages():
        if portable_lib._threadpool_get_thread_count() != torch.get_num_threads():
            portable_lib._unsafe_reset_threadpool(torch.get_num_threads())
        program = Runtime.get().load_program(path)
        method = program.load_method(_METHOD)

    def run(call: ModelInputs) -> list[Tensor]:
        return tensors_in(method.execute(_contiguous(call)))

    return run


def _contiguous(call: ModelInputs) -> list[Tensor]:
    return [tensor.contiguous() for tensor in call.tensors]
