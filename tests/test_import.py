"""What `import maestro_lod` brings along, and what it offers."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import maestro_lod

OPTIONAL = {
    *("sklearn", "scipy", "pandas", "matplotlib", "PIL", "yaml", "typer", "click", "rich"),
    *("lightning", "transformers", "datasets", "accelerate", "torchvision", "optuna", "flwr"),
    *("onnx", "onnxscript", "onnxruntime", "tensorboard"),
}


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(list(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_import_adds_nothing_to_torch_and_safetensors():
    base = modules_after("import torch, safetensors.torch")
    ours = modules_after("import maestro_lod")
    added = ours - base - set(sys.stdlib_module_names)
    assert added == {"maestro_lod"}


def test_public_names_exist_and_are_documented():
    assert maestro_lod.__doc__
    assert sorted(maestro_lod.__all__) == list(maestro_lod.__all__)
    for name in maestro_lod.__all__:
        thing = getattr(maestro_lod, name)
        assert inspect.getdoc(thing), name
        assert thing.__module__.startswith("maestro_lod."), name


def test_public_methods_are_documented():
    for cls in (maestro_lod.LoD, maestro_lod.RankSampler):
        methods = inspect.getmembers(cls, inspect.isfunction)
        undocumented = [n for n, f in methods if not n.startswith("_") and not inspect.getdoc(f)]
        assert undocumented == []


def test_every_error_belongs_to_one_family():
    errors = inspect.getmembers(sys.modules["maestro_lod.errors"], inspect.isclass)
    own = [cls for _, cls in errors if cls.__module__ == "maestro_lod.errors"]
    assert len(own) > 1
    assert all(issubclass(cls, maestro_lod.MaestroError) for cls in own)


def test_everything_can_be_imported_without_extras():
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(OPTIONAL)!r}))"
    code = f"""{block}
from maestro_lod import *
import maestro_lod
try:
    maestro_lod.tune
except maestro_lod.MaestroError as error:
    print(error)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install 'maestro-lod[tune]'" in done.stdout
