"""ExecuTorch files compute what the model does, in a process without this library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.deploy import export as module
from maestro_lod.deploy.manifest import matches_manifest, read_digests
from maestro_lod.errors import OptionError, OutputError
from maestro_lod.model.inputs import ModelInputs

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="executorch is not installed"
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of timing: how long things take is not tested."""
    monkeypatch.setattr(module, "ROUNDS", 1)


class Several(nn.Module):
    """Tensors with and without a batch, a keyword, a constant and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor, twice: bool = False) -> Any:
        y = self.line(x) * scale + shift
        return (y, {"twice": 2 * y if twice else y}, None)


def several(batch: int) -> ModelInputs:
    generator = torch.Generator().manual_seed(batch)
    x, scale, shift = (torch.randn(*s, generator=generator) for s in ((batch, 6), (6,), (batch, 6)))
    return ModelInputs((x, scale), {"shift": shift, "twice": True})


_ALONE = """
import sys, torch
from executorch.runtime import Runtime
from pathlib import Path
from safetensors.torch import load_file
values = load_file(sys.argv[2])
method = Runtime.get().load_program(Path(sys.argv[1])).load_method("forward")
got, = method.execute([values["x"]])
torch.testing.assert_close(got, values["y"], atol=1e-4, rtol=1e-4)
assert not any("maestro" in name for name in sys.modules)
"""


@needs_executorch
@pytest.mark.slow
def test_pte_files_run_in_executorch_alone(tmp_path: Path) -> None:
    small = lod.extract(lod.decompose(lod.MODELS["lenet"]()), 0.3).eval()
    done = lod.export(small, tmp_path / "lenet.pte", example=torch.empty(4, 1, 28, 28))
    assert (done.format, done.batch) == ("pte", 4)
    assert done.difference < 1e-4
    assert done.size_ratio < 1.2
    x = torch.randn(4, 1, 28, 28)
    with torch.no_grad():
        save_file({"x": x, "y": small(x)}, tmp_path / "values")
    command = [sys.executable, "-c", _ALONE, str(done.path), str(tmp_path / "values")]
    subprocess.run(command, check=True, cwd=tmp_path)


@needs_executorch
def test_the_tensors_of_a_call_are_the_inputs(tmp_path: Path) -> None:
    model = Several().eval()
    done = lod.export(model, tmp_path / "m.pte", example=several(4))
    run, call = module.open_runner(done.path), several(4)
    y, more, _ = call.call(model)
    torch.testing.assert_close(run(call), [y.detach(), more["twice"].detach()])
    with pytest.raises(RuntimeError):  # its memory is planned for four
        run(several(5))
    assert done.batch == 4
    assert "batch size 4 only" in str(done)


@needs_executorch
def test_a_file_that_differs_or_does_not_run_is_never_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from maestro_lod.deploy import pte_file

    line, path = nn.Linear(6, 2), tmp_path / "m.pte"
    monkeypatch.setattr(pte_file, "run_elsewhere", lambda _, calls: [[torch.zeros(1, 2)]])
    with pytest.raises(OutputError, match=r"m\.pte was not written"):
        lod.export(line, path, example=torch.empty(1, 6))
    monkeypatch.undo()
    monkeypatch.setattr(pte_file, "write", lambda _, path: path.write_bytes(b"nothing"))
    with pytest.raises(OutputError, match="ExecuTorch cannot run"):
        lod.export(line, path, example=torch.empty(1, 6))
    assert not [*tmp_path.iterdir()]


@needs_executorch
def test_deployed_pte_files_are_in_the_manifest(tmp_path: Path) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(32, 32)), ranks=4)
    out = tmp_path / "phone"
    done = lod.deploy_size(model, None, out, example=torch.empty(1, 32), formats=["pte"])
    assert [deployed.file.path.name for deployed in done.files] == ["model.pte"]
    assert set(read_digests(out) or ()) == {"model.pte"}
    assert matches_manifest(out / "model.pte")


def test_without_executorch_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    for name in [n for n in sys.modules if n.startswith(("executorch.", "maestro_lod.deploy.pte"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(OptionError, match=r"ExecuTorch files need executorch.*\[executorch\]"):
        lod.export(nn.Linear(6, 2), tmp_path / "m.pte", example=torch.empty(1, 6))
