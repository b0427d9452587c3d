"""`lod compress` and `lod distill`, from directories and recipes to files that load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import maestro_lod as lod
from maestro_lod.cli.main import main
from maestro_lod.errors import OptionError
from maestro_lod.integrations.huggingface import from_pretrained
from maestro_lod.integrations.model_texts import open_model
from maestro_lod.model.checkpoint import load
from maestro_lod.model.cost import count_params
from tests.support.directories import write_bert, write_llama, write_texts

BOTH = ["--to", "dense", "--to", "safetensors"]
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
    weights = small / "model.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    assert f"{model.num_parameters():,} of" in shown
    assert f"{weights.stat().st_size - header:,} of" in shown
    dense = 16 * 32 + 2 * (4 * 16 * 16 + 3 * 16 * 32) + 5 * 16
    assert sum(p.numel() for p in lod.extract(model).parameters()) <= 0.9 * dense
    assert model(input_ids=torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, 32)
    given = ["--teacher", llama, "--data", texts["txt"], "--steps", "3", "--batches", "2"]
    assert lod_command("distill", small, *given, "--out", distilled) == 0
    assert lod.ranks(from_pretrained(distilled)) == lod.ranks(model)


def test_a_directory_of_several_sizes_is_read_at_each_of_them(llama, texts, tmp_path, capsys):
    texts["txt"].write_text("the cat sat on a mat and a dog ran far away\n" * 200)
    out, data = tmp_path / "sizes", ["--data", texts["txt"], "--batches", "2", "--quiet"]
    given = ["--sizes", "0.95,0.9", "--share-tied"]
    assert lod_command("compress", llama, *data, *given, "--out", out) == 0
    dense = 16 * 32 + 2 * (4 * 16 * 16 + 3 * 16 * 32) + 5 * 16
    for size in (0.95, 0.9):
        small = from_pretrained(out, max_params=size)
        assert count_params(lod.extract(small)) <= size * dense
    plain = tmp_path / "plain"
    assert lod_command("deploy", out, "--max-params", "0.9", "--out", plain) == 0
    loaded, ids = AutoModelForCausalLM.from_pretrained(plain).eval(), torch.tensor([[2, 3, 4]])
    assert count_params(loaded) <= 0.9 * dense
    torch.testing.assert_close(loaded(input_ids=ids).logits, small.eval()(input_ids=ids).logits)
    assert not (plain / "frontier.json").exists()
    assert lod_command("deploy", out, "--int8", "--out", tmp_path / "no") == 2
    with pytest.raises(OptionError, match="no submodel meets"):
        from_pretrained(out, max_params=0.1)
    with pytest.raises(OptionError, match="Give one of them"):
        from_pretrained(out, max_params=0.9, ranks=1)
    (out / "frontier.json").unlink()
    with pytest.raises(OptionError, match=r"has no frontier\.json to choose a size by"):
        from_pretrained(out, max_params=0.9)
    capsys.readouterr()
    for limits in ([], ["--sizes", "0.9", "--max-params", "0.9"]):
        assert lod_command("compress", llama, *data, *limits, "--out", tmp_path / "no") == 2
        assert "give one of --max-params and --sizes" in capsys.readouterr().err


def test_own_batches_and_no_correction(llama, own, tmp_path):
    module = next(own.glob("own_*.py")).stem
    limits = ["--max-params", "0.95", "--no-correction", "--quiet"]
    data = ["--data", f"{module}:ids"]
    assert lod_command("compress", llama, *data, *limits, "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_directory_is_complete_and_merged_weights_load_everywhere(llama, texts, tmp_path, capsys):
    texts["txt"].write_text("the cat sat on a mat and a dog ran far away\n" * 200)
    (llama / "own.py").touch()
    arguments = ["compress", llama, "--data", texts["txt"], "--max-params", "0.9", "--quiet"]
    shown = {}
    for name, formats in (("small", []), ("dense", ["--to", "dense"])):
        assert lod_command(*arguments, "--out", tmp_path / name, *formats) == 0
        shown[name] = capsys.readouterr().out
        assert "not copied: own.py (code)" in shown[name]
    ids = torch.arange(16).view(2, 8)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    dense = open_model(tmp_path / "dense")
    assert lod.ranks(small) and not lod.ranks(dense)
    torch.testing.assert_close(small(ids).logits, dense(ids).logits, rtol=0, atol=1e-5)
    text = "the cat sat on a mat"
    expected = AutoTokenizer.from_pretrained(llama)(text)["input_ids"]
    for name in ("small", "dense"):
        found = AutoTokenizer.from_pretrained(tmp_path / name)(text)["input_ids"]
        assert found == expected
        card = (tmp_path / name / "README.md").read_text()
        printed = re.search(r"perplexity (\S+) before, (\S+) after", shown[name])
        assert printed and "| perplexity | {} | {} |".format(*printed.groups()) in card
        assert f"Quality was measured on held-out batches of {texts['txt']}." in card


WRITING = "maestro_lod.integrations.huggingface.save_pretrained"
CLEANING = "maestro_lod.cli.unfinished.Unfinished._remove_parts"


@pytest.mark.slow
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
    assert 1 < before == pytest.approx(after, rel=0.05)
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
    texts, tmp_path, capsys
):
    bert = write_bert(tmp_path / "bert")
    texts["txt"].write_text("the cat sat on a mat and a dog ran far away\n" * 300)
    data, small = ["--data", texts["txt"], "--batches", "3", "--quiet"], tmp_path / "small"
    limit = ["--max-params", "0.3", "--no-correction"]
    assert lod_command("compress", bert, *data, *limit, "--out", small) == 0
    model = from_pretrained(small)
    given = ["distill", small, "--teacher", bert, *data, "--steps", "60", "--out"]
    found = []
    for name, lr in (("better", 2e-5), ("worse", 0.3)):
        capsys.readouterr()
        assert lod_command(*given, tmp_path / name, "--lr", lr) == 0
        shown = capsys.readouterr().out
        found.append(re.findall(r"batches: (\S+) before distillation, ([\d.]+) after", shown)[0])
        assert ("the weights from before are kept" in shown) == (name == "worse")
    (first, better), (again, worse) = (map(float, pair) for pair in found)
    assert first == again and better < first < worse
    kept, distilled = (from_pretrained(tmp_path / name) for name in ("worse", "better"))
    ids = torch.tensor([[2, 3, 4]])
    outputs = [each(input_ids=ids).last_hidden_state for each in (model, kept, distilled)]
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(("kind", "code"), [("graph", 0), ("on_meta", 2)])
def test_graphs_are_compressed_and_models_without_values_are_one_line(own, kind, code, capsys):
    module = next(own.glob("own_*.py")).stem
    Path("mine.yaml").write_text(f"model: {module}:{kind}\ndata: {module}:data\nepochs: 1\n")
    assert lod_command("compress", "mine.yaml", "--max-params", "0.5", "--out", "out") == code
    told = capsys.readouterr().err
    assert "bug in lod" not in told and "Traceback" not in told
    assert Path("out").exists() == (code == 0)


def test_a_failed_export_leaves_no_directory_and_no_lost_work(own, tmp_path, monkeypatch):
    def failed(*_: object, **__: object) -> None:
        raise lod.MaestroError("no export")

    arguments = ["compress", "mine.yaml", "--max-params", "0.6", "--out", tmp_path / "out"]
    with monkeypatch.context() as patched:
        patched.setattr("maestro_lod.cli.commands.compressing.export", failed)
        assert lod_command(*arguments, "--to", "safetensors", "--to", "onnx") == 2
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.unfinished" / "block 0.safetensors").exists()
    assert lod_command(*arguments) == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.slow
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
        ((llama, *data, *limit, *BOTH, *out), 2, "write the same file"),
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
