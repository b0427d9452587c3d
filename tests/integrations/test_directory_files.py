"""A compressed directory is complete: everything but weights, pickles, code and links."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import maestro_lod as lod
from maestro_lod.errors import CheckpointError

hf = pytest.importorskip("transformers")
from maestro_lod.integrations import huggingface  # noqa: E402
from maestro_lod.integrations.directory_files import complete_directory  # noqa: E402
from maestro_lod.integrations.model_texts import open_model  # noqa: E402
from tests.support.directories import LINES, write_bert, write_llama  # noqa: E402

CARD = """---
license: apache-2.0
pipeline_tag: text-generation
datasets: [secret]
---
# The original
"""


def shrunk(source: Path, out: Path) -> Path:
    huggingface.save_pretrained(lod.decompose(open_model(source), ranks=0.25), out)
    return out


def test_what_is_not_a_weight_is_copied(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "llama")
    (source / "README.md").write_text(CARD)
    (source / "LICENSE").write_text("as it is")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "preprocessor_config.json").write_text("{}")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").touch()
    (source / "assets").mkdir()
    (source / "assets" / "picture.png").write_bytes(b"\x89PNG")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").touch()
    out = shrunk(source, tmp_path / "out")
    own = (out / "config.json").read_bytes()
    assert complete_directory(out, source) == {}
    assert (out / "config.json").read_bytes() == own
    found = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert found == {
        "config.json", "generation_config.json", "model.safetensors", "modeling_maestro_lod.py",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE",
        "preprocessor_config.json", "README.md", "README.source.md", "assets/picture.png",
    }  # fmt: skip
    assert (out / "README.source.md").read_text() == CARD
    before, after = (hf.AutoTokenizer.from_pretrained(place) for place in (source, out))
    assert before.get_vocab() == after.get_vocab()
    assert [before(line)["input_ids"] for line in LINES] == [
        after(line)["input_ids"] for line in LINES
    ]


def test_pickles_code_and_links_stay_behind(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "llama")
    (tmp_path / "secret.json").write_text("{}")
    (source / "folder").mkdir()
    (source / "folder" / "linked.json").symlink_to(tmp_path / "secret.json")
    (source / "elsewhere").symlink_to(tmp_path)
    (source / "modeling_own.py").write_text("raise SystemExit")
    (source / "state.json").write_bytes(pickle.dumps({"a": 1}))
    torch.save({"a": torch.ones(1)}, source / "extra.dat")
    (source / "training_args.bin").write_bytes(pickle.dumps({}))
    out = shrunk(source, tmp_path / "out")
    assert complete_directory(out, source) == {
        "extra.dat": "pickled",
        "folder/linked.json": "a link out of the directory",
        "modeling_own.py": "code",
        "state.json": "pickled",
    }
    for name in ("extra.dat", "folder", "elsewhere", "modeling_own.py", "state.json"):
        assert not (out / name).exists()
    assert not (out / "training_args.bin").exists()


def test_modules_of_sentence_transformers_keep_their_weights(tmp_path: Path) -> None:
    source = write_bert(tmp_path / "bert")
    modules = [
        {"idx": 0, "path": ""},
        {"idx": 1, "path": "1_Pooling"},
        {"idx": 2, "path": "2_Dense"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    for folder in ("1_Pooling", "2_Dense", "original"):
        (source / folder).mkdir()
        (source / folder / "config.json").write_text("{}")
    for folder in ("2_Dense", "original"):
        save_file({"weight": torch.ones(2)}, source / folder / "model.safetensors")
    out = shrunk(source, tmp_path / "out")
    complete_directory(out, source)
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "original" / "model.safetensors").exists()
    (source / "modules.json").write_text("[{]")
    with pytest.raises(CheckpointError, match=r"modules\.json is damaged"):
        complete_directory(out, source)


def test_the_card_says_what_the_model_is(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "llama")
    (source / "README.md").write_text(CARD)
    out = shrunk(source, tmp_path / "out")
    complete_directory(out, source, quality={"perplexity": (3.0, 4.25)}, data="a file of texts")
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "llama", "library_name": "transformers", "license": "apache-2.0",
        "pipeline_tag": "text-generation", "tags": ["maestro-lod", "low-rank"],
    }  # fmt: skip
    counts = [
        model.num_parameters() for model in (open_model(source), huggingface.from_pretrained(out))
    ]
    assert f"| parameters | {counts[0]:,} | {counts[1]:,} |" in text
    sizes = [sum(f.stat().st_size for f in d.glob("*.safetensors")) for d in (source, out)]
    assert f"| bytes of weights | {sizes[0]:,} | {sizes[1]:,} |" in text
    assert "| perplexity | 3 | 4.25 |" in text
    assert "Quality was measured on a file of texts." in text
    assert "import maestro_lod" in text
    assert "The licence is that of the source: apache-2.0." in text


@pytest.mark.parametrize(
    "card", [None, "no front matter", "---\n[\n---\n", "---\n- 1\n---\n", "\xff"]
)
def test_a_card_without_a_licence_says_so(card: str | None, tmp_path: Path) -> None:
    source = write_bert(tmp_path / "bert")
    if card is not None:
        (source / "README.md").write_bytes(card.encode("latin-1"))
    out = shrunk(source, tmp_path / "out")
    complete_directory(out, source)
    text = (out / "README.md").read_text()
    assert "The source does not name a licence" in text
    assert "Quality was not measured." in text
