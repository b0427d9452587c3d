"""Files in 8 bits: calibrated by samples, and tested like models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.deploy import export as module
from maestro_lod.deploy.file_model import FileModel
from maestro_lod.errors import OptionError
from maestro_lod.model.inputs import ModelInputs


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of timing: how long things take is not tested."""
    monkeypatch.setattr(module, "ROUNDS", 1)


def needs(format_: str) -> pytest.MarkDecorator:
    package = {"onnx": "onnx", "pte": "executorch"}[format_]
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


FORMATS = [pytest.param(name, marks=needs(name)) for name in ("onnx", "pte")]


def net() -> nn.Module:
    layers = (nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8))
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("format_", FORMATS)
def test_files_in_8_bits_are_a_quarter_and_answer_like_the_model(
    format_: str, calibrated: bool, tmp_path: Path
) -> None:
    model, x = net(), torch.rand(40, 64) * 3  # unlike what is drawn for an example
    path = tmp_path / f"net.{format_}"
    done = lod.export(
        model, path, example=torch.empty(4, 64), quantize="int8", calibration=[x] * calibrated
    )
    assert done.size_ratio < 0.5
    assert done.difference < 0.1
    as_model = FileModel(done, model, ModelInputs.wrap(x[:4]))
    with torch.no_grad():
        got, expected = as_model(x), model(x)  # 40 rows, of which a .pte file takes 4
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()


@needs("onnx")
def test_the_metric_of_a_quantized_file_is_its_own(tmp_path: Path) -> None:
    model, seen = lod.decompose(net(), ranks=48), []

    def test(plain: nn.Module) -> dict[str, float]:
        seen.append(type(plain).__name__)
        return {"loss": float(len(seen))}

    done = lod.deploy_size(
        model, None, tmp_path / "out", example=torch.empty(1, 64), formats=["onnx"], test=test,
        int8=True, calibration=[torch.randn(16, 64)],
    )  # fmt: skip
    assert seen == ["Sequential", "Sequential", "FileModel"]
    assert [d.test for d in done.files] == [{"loss": 1.0}, {"loss": 3.0}]
    row = next(line for line in str(done).splitlines() if line.startswith("model.int8.onnx"))
    assert row.endswith("3.0000")


def test_a_file_as_a_module_keeps_the_structure_of_outputs(
    tmp_path: Path,
) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor | None]:
            return {"twice": 2 * x, "none": None, "more": x + 1}

    done = lod.export(Two(), tmp_path / "m.pt2", example=torch.empty(3, 2))
    got = FileModel(done, Two(), ModelInputs.wrap(torch.zeros(3, 2)))(torch.ones(7, 2))
    assert torch.equal(got["twice"], torch.full((7, 2), 2.0)) and got["none"] is None


def test_calibration_without_int8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="calibration has no effect"):
        lod.export(
            net(), tmp_path / "m.pt2", example=torch.empty(1, 64), calibration=[torch.empty(1, 64)]
        )
