"""Directories of transformers: safetensors alone, and texts in the model's own tokens."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from maestro_lod.errors import CheckpointError, DataError
from maestro_lod.integrations.huggingface import from_pretrained
from maestro_lod.integrations.model_texts import open_model, read_texts, text_batches
from tests.support.directories import WORDS, write_bert, write_llama, write_texts


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_bert(tmp_path / "bert")


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    return write_texts(tmp_path)


def test_shards_are_read_and_ties_kept(llama):
    model = open_model(llama)
    assert len(list(llama.glob("*.safetensors"))) > 1
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_dtype_is_that_of_the_file_unless_given(llama):
    half = open_model(llama, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    half.save_pretrained(llama.parent / "half")
    assert open_model(llama.parent / "half").dtype == torch.bfloat16


def test_pickled_weights_are_refused_and_not_read(bert):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (bert / "ran",))

    (bert / "model.safetensors").unlink()
    (bert / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"pickled weights only \(pytorch_model.bin\)"):
        open_model(bert)
    assert not (bert / "ran").exists()


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a directory."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(QUERY), f"missing: {QUERY}. "),
        (lambda t: t.update({f"x.{QUERY}": t.pop(QUERY)}), f"not of this model: x.{QUERY}."),
        (lambda t: t.update({QUERY: torch.zeros(3, 3)}), f"of another shape: {QUERY}."),
        (lambda t: t.update({"foreign": torch.zeros(2)}), "BertModel, .*: not of this model: fore"),
        (lambda t: [t.pop(f"pooler.dense.{k}") for k in ("weight", "bias")],
         "missing: pooler.dense.bias, pooler.dense.weight. "),
    ],
    ids=["missing", "renamed", "shape", "foreign", "pooler"],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(bert, change, says, capsys):
    rewrite(bert, change)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=says):
        open_model(bert)
    assert "REPORT" not in capsys.readouterr().err  # the error says it all


def test_a_head_that_the_files_lack_is_refused(bert):
    config = json.loads((bert / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (bert / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"missing: classifier.bias, classifier.weight\."):
        open_model(bert)


def test_names_that_transformers_itself_knows_are_read(bert):
    expected = open_model(bert).state_dict()
    rewrite(bert, lambda t: t.update({f"bert.{key}": t.pop(key) for key in list(t)}))
    torch.testing.assert_close(dict(open_model(bert).state_dict()), dict(expected))
    rewrite(bert, lambda t: t.update({"bert.embeddings.position_ids": torch.arange(64)[None]}))
    torch.testing.assert_close(dict(open_model(bert).state_dict()), dict(expected))


@pytest.mark.parametrize("read", [open_model, from_pretrained])
@pytest.mark.parametrize("name", ["w.bin", "../w.safetensors", "{outside}", "a/w.safetensors", 3])
def test_an_index_names_safetensors_files_of_its_directory_alone(llama, read, name, tmp_path):
    outside = tmp_path / "w.safetensors"
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    key, file = next(iter(index["weight_map"].items()))
    (llama / "a").mkdir()
    for place in (outside, llama / "w.bin", llama / "a" / "w.safetensors"):
        shutil.copy(llama / file, place)
    index["weight_map"][key] = name.format(outside=outside) if isinstance(name, str) else name
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is not a safetensors file in it|weight_map"):
        read(llama)


def test_links_lead_nowhere_but_to_the_blobs_of_a_hub(bert, tmp_path):
    model, outside = bert / "model.safetensors", tmp_path / "w.safetensors"
    model.rename(outside)
    model.symlink_to(outside)
    for read in (open_model, from_pretrained):
        with pytest.raises(CheckpointError, match="is a link to a file outside"):
            read(bert)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate([outside, bert / "config.json"]):
        shutil.copy(file, blobs / str(number))
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "0"))
    (snapshot / "config.json").symlink_to(Path("..", "..", "blobs", "1"))
    assert open_model(snapshot).num_parameters() > 0


def test_no_code_comes_with_a_directory(bert, texts, monkeypatch):
    def asked(*_: object) -> str:
        raise AssertionError("a question")

    monkeypatch.setattr("builtins.input", asked)
    (bert / "evil.py").write_text(f"open({str(bert / 'ran')!r}, 'w')\n")
    config = json.loads((bert / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokens", None]}}
    tokens = json.loads((bert / "tokenizer_config.json").read_text()) | code
    (bert / "tokenizer_config.json").write_text(json.dumps(tokens))
    kernels = {"attn_implementation": "evil/kernels"}
    (bert / "config.json").write_text(json.dumps(config | code | kernels))
    open_model(bert)
    assert text_batches(texts["txt"], bert)
    (bert / "config.json").write_text(json.dumps(config | code | {"model_type": "evil"}))
    for read in (open_model, from_pretrained, lambda at: text_batches(texts["txt"], at)):
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read .*custom code"):
            read(bert)
    assert not (bert / "ran").exists()


def test_an_adapter_is_not_left_out_silently(bert):
    (bert / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(CheckpointError, match="Merge it into its model first"):
        open_model(bert)


def test_directories_that_hold_no_model_are_refused(bert, tmp_path):
    with pytest.raises(CheckpointError, match="has no config"):
        open_model(tmp_path)
    (bert / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_model(bert)
    (bert / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        open_model(bert)
    (bert / "config.json").write_text("{")
    (bert / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="config"):
        open_model(bert)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_texts_of_every_kind_of_file(texts, suffix):
    assert list(read_texts(texts[suffix])) == [
        "the cat sat on a mat", "a dog ran", "and the dog ran far away"
    ]  # fmt: skip


def test_a_model_that_continues_text_gets_windows(llama, texts):
    batches = text_batches(texts["txt"], llama, length=4, batch=2, most=8)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert ids.shape == (3, 4)  # 15 words
    assert [WORDS[i] for i in ids[0].tolist()] == ["the", "cat", "sat", "on"]
    assert len(text_batches(texts["txt"], llama, length=4, batch=2, most=1)) == 1
    open_model(llama)(**batches[0])


def test_other_models_get_texts_of_about_one_length_together(bert, texts):
    batches = text_batches(texts["jsonl"], bert, batch=2)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 6), (1, 6)]
    assert batches[0]["attention_mask"].sum() == 9
    open_model(bert)(**batches[0])


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_a_long_text_comes_in_pieces_that_together_are_it(suffix, tmp_path):
    long = " ".join(f"word{i}" for i in range(30_000))
    endless = "x" * 200_000
    texts, file = [long, "short", f"a {endless} b"], tmp_path / f"long.{suffix}"
    if suffix == "txt":
        file.write_text("".join(f"  {text} \n" for text in texts))
    elif suffix == "jsonl":
        file.write_text("".join(json.dumps({"text": f" {text}"}) + "\n" for text in texts))
    else:
        pq.write_table(pa.table({"text": texts}), file)
    pieces = list(read_texts(file))
    assert "".join(pieces) == "".join(texts)
    assert max(map(len, pieces)) <= 2 * 65_536
    until = pieces.index("short")
    assert 1 < until < 10
    assert all(piece.startswith(" word") for piece in pieces[1:until])


def test_the_tokens_of_a_long_line_are_those_of_its_words(llama, tmp_path):
    words = [WORDS[i % 5 + 4] for i in range(24_000)]
    (tmp_path / "line.txt").write_text(" ".join(words))
    (tmp_path / "lines.txt").write_text("\n".join(words))
    one, many = (
        text_batches(tmp_path / name, llama, length=60, batch=100, most=4)
        for name in ("line.txt", "lines.txt")
    )
    assert len(one) == 4
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, many, strict=True))


def test_files_that_hold_no_texts_are_refused(llama, tmp_path):
    bad = {
        "x.csv": ("", "is not a text file"),
        "none.txt": ("\n \n", "none.txt has no text"),
        "bad.jsonl": ('{"text": "a"}\n{"txt": 1}', "line 2"),
        "no.jsonl": ("[1]", "line 1"),
    }
    for name, (content, says) in bad.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=says):
            list(read_texts(tmp_path / name))
    with pytest.raises(DataError, match="does not exist"):
        list(read_texts(tmp_path / "missing.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        list(read_texts(tmp_path / "bytes.txt"))
    pq.write_table(pa.table({"words": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no column 'text'; its columns: words"):
        list(read_texts(tmp_path / "x.parquet"))
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    for name in ("damaged.parquet", "numbers.parquet"):
        with pytest.raises(DataError, match=rf"{name} cannot be read as texts"):
            list(read_texts(tmp_path / name))
    (tmp_path / "short.txt").write_text("the cat")
    with pytest.raises(DataError, match="fewer than one window"):
        text_batches(tmp_path / "short.txt", llama)


def test_a_directory_without_tokenizer_says_what_to_do(llama, texts):
    for file in llama.glob("token*"):
        file.unlink()
    with pytest.raises(DataError, match="module:function"):
        text_batches(texts["txt"], llama)


@pytest.mark.parametrize("content", ["[1]", "3", '{"tokenizer_class": []}', "[" * 100_000])
def test_a_tokenizer_config_that_nobody_writes_is_one_line(bert, texts, content):
    (bert / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match="no tokenizer that can be read") as refused:
        text_batches(texts["txt"], bert)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("count", [10**6, 10**30])
def test_more_layers_than_any_model_has_are_refused_and_not_built(bert, count):
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers=.*at most 10,000"):
        open_model(bert)


def test_a_table_without_its_reader_names_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"x\.parquet needs pyarrow: pip install .*\[data\]"):
        list(read_texts(tmp_path / "x.parquet"))
    brought = importlib.metadata.requires("datasets") or []
    assert any(one.startswith("pyarrow") for one in brought)
