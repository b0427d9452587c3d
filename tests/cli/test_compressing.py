"""`lod compress` and `lod distill`, from directories and recipes to files that load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import maestro_lod as lod
from maestro_lod.cli.main import main
from maestro_lod.integrations.huggingface import from_pretrained
from maestro_lod.model.checkpoint import load
from tests.support.directories import write_llama, write_texts

CODE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10))

def data(batch):
    torch.manual_seed(1)
    pairs = [(torch.randn(batch, 12), torch.randint(10, (batch,))) for _ in range(4)]
    return {"train": pairs, "validation": pairs[:1]}

def inputs():
    return data(32)["train"]

def graph():
    return torch.fx.symbolic_trace(build())

def on_meta():
    return build().to("meta")

def ids():
    return [{"input_ids": torch.arange(16).view(2, 8)} for _ in range(3)]

def nothing():
    return []

def number():
    return 3
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    return write_texts(tmp_path)


def lod_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "mine.yaml").write_text(f"model: {name}:build\ndata: {name}:data\nepochs: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_directory_becomes_one_that_loads_then_is_distilled(llama, texts, tmp_path, capsys):
    texts["txt"].write_text("the cat sat on a mat and a dog ran far away\n" * 200)
    small, distilled = tmp_path / "small", tmp_path / "distilled"
    limits = ["--max-params", "0.9", "--batches", "2", "--share-tied"]
    assert lod_command("compress", llama, "--data", texts["txt"], *limits, "--out", small) == 0
    shown, beside = capsys.readouterr()
    assert "%|" not in beside  # transformers' bars, in a pipe
    model = from_pretrained(small)
    weights = small / "lod.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    assert f"{model.num_parameters():,} of" in shown
    assert f"{weights.stat().st_size - header:,} of" in shown
    dense = 16 * 32 + 2 * (4 * 16 * 16 + 3 * 16 * 32) + 5 * 16
    assert sum(p.numel() for p in lod.extract(model).parameters()) <= 0.9 * dense
    assert model(input_ids=torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, 32)
    given = ["--teacher", llama, "--data", texts["txt"], "--steps", "3", "--batches", "2"]
    assert lod_command("distill", small, *given, "--out", distilled) == 0
    assert lod.ranks(from_pretrained(distilled)) == lod.ranks(model)


def test_own_batches_and_no_correction(llama, own, tmp_path):
    module = next(own.glob("own_*.py")).stem
    limits = ["--max-params", "0.95", "--no-correction", "--quiet"]
    data = ["--data", f"{module}:ids"]
    assert lod_command("compress", llama, *data, *limits, "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "lod.safetensors").is_file()


WRITING = "maestro_lod.integrations.huggingface.save_pretrained"
CLEANING = "maestro_lod.cli.unfinished.Unfinished._remove_parts"


@pytest.mark.parametrize("stage", [WRITING, CLEANING], ids=["writing", "cleaning"])
@pytest.mark.parametrize("command", ["compress", "distill"])
def test_a_killed_command_goes_on(llama, own, tmp_path, command, stage, monkeypatch):
    module = next(own.glob("own_*.py")).stem
    data, small, out = ["--data", f"{module}:ids"], tmp_path / "small", tmp_path / "out"
    limits = ["--max-params", "0.95", "--quiet"]
    arguments = ["compress", llama, *data, *limits, "--out"]
    if command == "distill":
        assert lod_command("compress", llama, *data, *limits, "--out", small) == 0
        arguments = ["distill", small, "--teacher", llama, *data, "--steps", "2", "--out"]

    def killed(*_: object) -> None:
        raise SystemExit(137)

    unfinished = tmp_path / "out.unfinished"
    with monkeypatch.context() as patched:
        patched.setattr(stage, killed)
        assert lod_command(*arguments, out) == 137
    assert any(unfinished.glob("*.safetensors"))
    assert out.exists() == (stage == CLEANING)
    assert lod_command(*arguments, out) == 0
    assert not unfinished.exists()
    assert lod_command(*arguments, tmp_path / "undisturbed") == 0
    for file in (tmp_path / "undisturbed").iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name


def test_the_quality_before_and_after_and_the_way_out_are_printed(llama, own, texts, capsys):
    texts["txt"].write_text("the cat sat on a mat and a dog ran far away\n" * 300)
    data = ["--data", texts["txt"], "--batches", "2", "--share-tied", "--quiet"]
    assert lod_command("compress", llama, *data, "--max-params", "0.9", "--out", "most") == 0
    shown = capsys.readouterr().out
    before, after = map(float, re.findall(r"perplexity (\S+) before, (\S+) after", shown)[0])
    assert 1 < before < after < 1.05 * before
    assert "noticeably worse" not in shown
    assert lod_command("compress", "mine.yaml", "--max-params", "0.3", "--out", "few") == 0
    assert re.search(
        r"held-out batches: loss .* before, .* after; accuracy", capsys.readouterr().out
    )
    module = next(own.glob("own_*.py")).stem
    options = ["--max-params", "0.2", "--no-correction", "--data", f"{module}:inputs"]
    assert lod_command("compress", "mine.yaml", *options, "--out", "least") == 0
    shown = capsys.readouterr().out
    assert re.search(r"squared distance to the original's outputs.* 0 before", shown)
    assert "noticeably worse than the original: give more --distill-steps, or a larger" in shown


def test_distillation_reports_one_size_before_and_after_and_keeps_the_better(
    llama, texts, tmp_path, capsys
):
    texts["txt"].write_text("the cat sat on a mat and a dog ran far away\n" * 300)
    data, small = ["--data", texts["txt"], "--batches", "3", "--quiet"], tmp_path / "small"
    limit = ["--max-params", "0.8", "--share-tied"]
    assert lod_command("compress", llama, *data, *limit, "--out", small) == 0
    model = from_pretrained(small)
    given = ["distill", small, "--teacher", llama, *data, "--steps", "20", "--out"]
    found = []
    for name, lr in (("better", 1e-3), ("worse", 3.0)):
        capsys.readouterr()
        assert lod_command(*given, tmp_path / name, "--lr", lr) == 0
        shown = capsys.readouterr().out
        found.append(re.findall(r"batches: (\S+) before distillation, ([\d.]+) after", shown)[0])
        assert ("the weights from before are kept" in shown) == (name == "worse")
    (first, better), (again, worse) = (map(float, pair) for pair in found)
    assert first == again and better < first < worse
    kept, distilled = (from_pretrained(tmp_path / name) for name in ("worse", "better"))
    ids = torch.tensor([[2, 3, 4]])
    assert torch.equal(kept(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not torch.equal(distilled(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_model_without_values_is_one_line(own, capsys):
    module = next(own.glob("own_*.py")).stem
    Path("mine.yaml").write_text(f"model: {module}:on_meta\ndata: {module}:data\nepochs: 1\n")
    assert lod_command("compress", "mine.yaml", "--max-params", "0.5", "--out", "out") == 2
    assert "weights without values" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_graph_module_is_compressed(own):
    module = next(own.glob("own_*.py")).stem
    Path("mine.yaml").write_text(f"model: {module}:graph\ndata: {module}:data\nepochs: 1\n")
    assert lod_command("compress", "mine.yaml", "--max-params", "0.5", "--out", "out") == 0


def test_a_failed_export_leaves_no_directory_and_no_lost_work(own, tmp_path, monkeypatch):
    def failed(*_: object, **__: object) -> None:
        raise lod.MaestroError("no export")

    arguments = ["compress", "mine.yaml", "--max-params", "0.6", "--out", tmp_path / "out"]
    with monkeypatch.context() as patched:
        patched.setattr("maestro_lod.cli.commands.compressing.export", failed)
        assert lod_command(*arguments, "--to", "safetensors", "--to", "onnx") == 2
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.unfinished" / "corrected.safetensors").exists()
    assert lod_command(*arguments) == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_recipe_becomes_an_elastic_file_and_onnx(own, tmp_path, capsys):
    out = tmp_path / "out"
    limits = ["--max-params", "0.6", "--to", "onnx", "--int8", "--distill-steps", "2"]
    assert lod_command("compress", "mine.yaml", *limits, "--out", out) == 0, capsys.readouterr()
    module = __import__(next(own.glob("own_*.py")).stem)
    model = load(out / "model.safetensors", into=module.build())
    assert set(lod.ranks(model)) == {"0", "2"}
    for name in ("model.onnx", "model.int8.onnx"):
        assert (out / name).stat().st_size > 0


def test_mistakes_are_one_line_and_exit_code_two_or_one(llama, own, texts, tmp_path, capsys):
    module = next(own.glob("own_*.py")).stem
    limit, out = ["--max-params", "0.5"], ["--out", tmp_path / "out"]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    data = ["--data", texts["txt"]]
    cases = [
        ((llama, *limit, *out), 2, "--data is missing"),
        ((llama, *data, "--max-params", "half", *out), 2, "is not a size"),
        ((llama, *data, *limit, "--to", "gguf", *out), 2, "--to gguf is not known"),
        ((llama, *data, *limit, "--int8", *out), 2, "--int8 needs the format onnx"),
        ((llama, *data, *limit, "--out", tmp_path / "taken"), 2, "exists already"),
        ((tmp_path / "taken", *data, *limit, *out), 1, "has no config.json"),
        ((llama, "--data", f"{module}:nothing", *limit, *out), 2, "has no batch"),
        ((llama, "--data", f"{module}:number", *limit, *out), 2, "returned an int"),
        ((llama, "--data", "missing.txt", *limit, *out), 2, "does not exist"),
        (("no-recipe", *limit, *out), 2, "no-recipe"),
        (("digitz", *limit, *out), 2, "neither a directory nor a recipe. Did you mean 'digits'?"),
        (("meta/Small-1B", *limit, *out), 2, "hf download meta/Small-1B --local-dir Small-1B"),
    ]
    for arguments, code, says in cases:
        assert lod_command("compress", *arguments) == code, says
        told = capsys.readouterr().err
        assert says in told
        assert "Traceback" not in told
        assert not (tmp_path / "out").exists()
