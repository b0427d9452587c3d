"""torch.export files: one compressed archive without paths of this machine, run by torch."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import torch
from torch.export import ExportedProgram

from maestro_lod.deploy.verification import Runner
from maestro_lod.model.inputs import tensors_in


def write(program: ExportedProgram, path: Path) -> None:
    """Write a traced model."""
    program.example_inputs = None
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:  # source lines and paths of this machine
                for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
                    node.meta.pop(key, None)
    loose = io.BytesIO()
    torch.export.save(program, loose)
    # Compress texts, and store everything else at multiples of 64 bytes.
    with zipfile.ZipFile(loose) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            packed = zipfile.ZipInfo(entry.filename)
            if entry.filename.endswith(".json"):
                packed.compress_type = zipfile.ZIP_DEFLATED
            else:
                padding = -(target.start_dir + 30 + len(entry.filename.encode()) + 4) % 64
                packed.extra = b"FB" + struct.pack("<H", padding) + bytes(padding)
            target.writestr(packed, source.read(entry))


def open_runner(path: Path) -> Runner:
    """Load a file, and return a function that runs it by torch."""
    module = torch.export.load(path).module()
    return lambda call: tensors_in(call.call(module))
