"""What `import maestro_lod` brings along, and what it offers."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import maestro_lod
from maestro_lod.text import install_command

ROOT = Path(__file__).parents[2]
OPTIONAL = {
    *("sklearn", "scipy", "pandas", "matplotlib", "PIL", "yaml", "typer", "click", "rich"),
    *(
        "lightning",
        "pydantic",
        "transformers",
        "datasets",
        "accelerate",
        "torchvision",
        "optuna",
        "flwr",
    ),
    *("onnx", "onnxscript", "onnxruntime", "tensorboard", "pydantic"),
}


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(list(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.slow
def test_import_adds_nothing_to_torch_and_safetensors():
    base = modules_after("import torch, safetensors.torch")
    ours = modules_after("from maestro_lod import *")
    added = ours - base - set(sys.stdlib_module_names)
    assert added == {"maestro_lod"}


def test_torch_is_imported_when_it_is_needed_and_not_before():
    assert not modules_after("import maestro_lod") & {"torch", "safetensors", "numpy"}
    assert "torch" in modules_after("import maestro_lod; maestro_lod.decompose")


@pytest.mark.parametrize("command", ["--help", "--version", "recipes"])
def test_help_and_the_list_of_recipes_import_nothing_heavy(command):
    run = f"""
from maestro_lod.cli.main import main
try:
    main([{command!r}])
except SystemExit as ended:
    assert not ended.code
import sys; sys.stdout.write(chr(10))"""
    code = f"{run}\nimport json\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "typer" in loaded
    assert not loaded & {"torch", "datasets", "numpy", "sklearn", "safetensors", "optuna"}


def test_the_program_needs_no_package_of_data_sets():
    loaded = modules_after("import maestro_lod.cli.commands.training, maestro_lod.cli.trained")
    assert not loaded & {"datasets", "pandas", "pyarrow", "sklearn", "tokenizers", "sacrebleu"}


def test_every_public_name_has_one_home_that_editors_know_too():
    source = Path(maestro_lod.__file__).read_text()
    for module, names in maestro_lod._HOMES.items():
        for name in names:
            line = rf"    from maestro_lod\.{re.escape(module)} import (\([^)]*|.*)\b{name}\b"
            assert re.search(line, source), name
    homes = {name for names in maestro_lod._HOMES.values() for name in names}
    assert homes | {"MaestroError"} == {*maestro_lod.__all__, *maestro_lod._EXTRAS}
    assert not {*maestro_lod.__all__} & {*maestro_lod._EXTRAS}
    assert homes <= {*dir(maestro_lod)}


def test_every_name_of_an_extra_says_what_to_install():
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(OPTIONAL)!r}))"
    code = f"""{block}
import maestro_lod
for name in maestro_lod._EXTRAS:
    try:
        getattr(maestro_lod, name)
    except maestro_lod.MaestroError as error:
        print(error)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name, extra in maestro_lod._EXTRAS.items():
        assert re.search(rf"lod\.{name} needs .*{re.escape(install_command(extra))}", done.stdout)


@pytest.mark.slow
def test_type_checkers_see_the_class_of_a_model(tmp_path):
    code = """
import torch
from torch import nn
import maestro_lod as lod


class Net(nn.Module):
    width: int = 3


model = lod.decompose(Net())
reveal_type(model)
reveal_type(lod.fuse(model))
reveal_type(lod.extract(model, 0.5))
reveal_type(lod.load("model.safetensors", into=Net()))
with lod.at_ranks(model, 0.5) as smaller:
    reveal_type(smaller)
reveal_type(lod.LoD(model, torch.optim.SGD(model.parameters())))
reveal_type(lod.summary(model))
lod.decompos(model)
"""
    script = tmp_path / "program.py"
    script.write_text(code)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    revealed = re.findall(r'Revealed type is "([^"]+)"', done.stdout)
    assert revealed[:5] == ["program.Net"] * 5, done.stdout + done.stderr
    assert revealed[5] == "maestro_lod.train.lod.LoD"
    assert revealed[6].startswith("maestro_lod.model.cost.")
    assert "has no attribute" in done.stdout and done.stdout.count("error:") == 1


def test_the_version_is_said_in_one_place():
    assert metadata.version("maestro-lod") == maestro_lod.__version__


def test_public_names_exist_and_are_documented():
    assert maestro_lod.__doc__
    for name in maestro_lod.__all__:
        thing = getattr(maestro_lod, name)
        assert inspect.getdoc(thing), name
        assert (getattr(thing, "__module__", "") or type(thing).__module__).startswith(
            "maestro_lod."
        )


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


def test_everything_else_can_be_imported_without_extras():
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(OPTIONAL)!r}))"
    command = [sys.executable, "-W", "error", "-c", f"{block}\nfrom maestro_lod import *"]
    subprocess.run(command, check=True)


def test_every_class_variable_has_a_type() -> None:
    # Python 3.10 cannot read the annotations of a class with a bare one
    sources = Path(__file__).parents[2].joinpath("src").rglob("*.py")
    bare = [p.name for p in sources if re.search(r": ClassVar( |$)", p.read_text("utf-8"), re.M)]
    assert bare == []
