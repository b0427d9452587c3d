"""Directories and files that somebody hostile could have made, each by a change of a sound one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from maestro_lod.files.state import load_state, save_state

Change = Callable[[Path], None]

RAN = "ran"
CODE = f"import pathlib; pathlib.Path(__file__).with_name({RAN!r}).touch()\n"
MODULES = ("safetensors", "torch", "yaml", "optuna", "pyarrow", "evil", "modeling_evil")
VALUES: dict[str, Any] = {
    "null": None, "true": True, "number": -7, "huge": 10**30, "text": "../../x\0", "list": [[]],
    "object": {"a": {"b": []}},
}  # fmt: skip
TEXTS = {
    "nothing": b"", "half": b'{"a": [', "no text": b"\xff\xfe\x00", "a list": b"[1, 2]",
    "deep": b"[" * 200_000, "long number": b"9" * 6000, "deep objects": b'{"a":' * 3000,
}  # fmt: skip
CONFIGS = {
    "recursive": "&a {model: *a, data: *a, epochs: 1}",
    "recursive list": "epochs: &a [*a]",
    "aliases": "n0: &n0 [x]\n"
    + "".join(f"n{i}: &n{i} [*n{i - 1}, *n{i - 1}]\n" for i in range(1, 60)),
    "deep": "epochs: " + "[" * 5000,
    "deep but closed": "epochs: " + "[" * 200 + "]" * 200,
    "python": "!!python/object/apply:os.system [touch ran]",
    "tag": "epochs: !!bool maybe",
    "empty int": 'epochs: !!int ""',
    "date": "epochs: !!timestamp no",
    "NUL": 'data: {name: digits, directory: "a\\0b"}\nmodel: lenet\nepochs: 1',
    "list": "[]",
    "text": "just a text",
    "keys": "{1: 2, 3: 4}",
    "binary": "epochs: !!binary aGVsbG8=",
}  # fmt: skip


def write_code(directory: Path) -> None:
    """Put modules there that leave a trace when they are imported."""
    for name in MODULES:
        (directory / f"{name}.py").write_text(CODE)


def _json(name: str, key: str | None, value: Any) -> Change:
    def change(directory: Path) -> None:
        content = json.loads((directory / name).read_text()) if key else value
        if key:
            content[key] = value
        (directory / name).write_text(json.dumps(content))

    return change


def _bytes(name: str, content: bytes) -> Change:
    return lambda directory: (directory / name).write_bytes(content) and None


def _link(name: str, outside: Path) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(outside)

    return change


def _special(name: str, how: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        if how == "pipe":
            os.mkfifo(directory / name)
        elif how == "directory":
            (directory / name).mkdir()
        else:
            (directory / name).symlink_to(name)

    return change


def _settings(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / "config.yaml"
        settings = yaml.safe_load(path.read_text()) | changes
        if settings.get("code") == ".":
            settings["code"] = str(directory)
        path.write_text(yaml.safe_dump(settings))

    return change


def run_directories(outside: Path) -> Iterator[tuple[str, Change]]:
    """Give changes of a finished run; `outside` is a file that none of them may lead to."""
    for name, text in CONFIGS.items():
        yield f"config.yaml: {name}", _bytes("config.yaml", text.encode())
    for key in ("model", "data", "loss", "method"):
        yield f"config.yaml names {key} evil:f", _settings(**{key: "evil:f", "code": "."})
        yield f"config.yaml names {key} os:system", _settings(**{key: "os:system"})
    yield "config.yaml has code alone", _settings(code=".")
    for key, value in (("epochs", 10**30), ("threads", "x"), ("device", "cuda:99"), ("seed", [1])):
        yield f"config.yaml: {key}={value}", _settings(**{key: value})
    for file in ("result.json", "frontier.json", "environment.json", "metrics.jsonl"):
        for name, text in TEXTS.items():
            yield f"{file}: {name}", _bytes(file, text)
        yield f"{file} is a link", _link(file, outside)
    for key in ("settings", "weights", "full_ranks", "summary", "ledger", "size", "test"):
        for name, value in VALUES.items():
            yield f"result.json: {key} is {name}", _json("result.json", key, value)
    for name in ("config.yaml", "model.safetensors", "checkpoint.safetensors", "report.html"):
        yield f"{name} is a link", _link(name, outside)
    for name in ("config.yaml", "result.json", "model.safetensors"):
        for how in ("pipe", "directory", "link to itself"):
            yield f"{name} is a {how}", _special(name, how)
    for name in ("frontier-look-ahead.jsonl", ".lock", "deployment.json"):
        yield f"{name} is a link", _link(name, outside)
    for name, text in TEXTS.items():
        yield f"model.safetensors: {name}", _bytes("model.safetensors", text)


def model_directories(outside: Path) -> Iterator[tuple[str, Change]]:
    """Give changes of a transformers model's directory."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        for name, text in TEXTS.items():
            yield f"{file}: {name}", _bytes(file, text)
        yield f"{file} is a link", _link(file, outside)
    for key in ("architectures", "model_type", "hidden_size", "num_hidden_layers", "vocab_size",
                "num_attention_heads", "hidden_act", "torch_dtype", "pad_token_id"):  # fmt: skip
        for name, value in VALUES.items():
            yield f"config.json: {key} is {name}", _json("config.json", key, value)
    remote = {"AutoConfig": "modeling_evil.C", "AutoModel": "modeling_evil.M"}
    yield "config.json names code", _json("config.json", "auto_map", remote)
    index = "model.safetensors.index.json"
    for name in (str(outside), "../outside/secret", "w.bin", "evil.py"):

        def change(directory: Path, name: str = name) -> None:
            (directory / "model.safetensors").unlink()
            (directory / index).write_text(json.dumps({"weight_map": {"a": name}}))

        yield f"{index} names {Path(name).name}", change
    for name, text in TEXTS.items():
        yield f"model.safetensors: {name}", _bytes("model.safetensors", text)
    yield "model.safetensors is a link", _link("model.safetensors", outside)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        for how in ("pipe", "directory", "link to itself"):
            yield f"{name} is a {how}", _special(name, how)


def compressed_directories(outside: Path) -> Iterator[tuple[str, Change]]:
    """Give changes of a directory that `lod compress` wrote of a transformers model."""
    for name, value in VALUES.items():
        yield f"quantization_config is {name}", _json("config.json", "quantization_config", value)
        for key in ("layers", "by_rank", "version", "quant_method"):
            yield f"{key} is {name}", _described(lambda found, k=key, v=value: found.update({k: v}))
        for key in ("form", "rank", "factors_of", "dense_only"):
            yield f"{key} of a layer is {name}", _described(_first_layer(key, value))
    for form in ("dense", "factored", "shared", "bias"):
        yield f"form of a layer is {form}", _described(_first_layer("form", form))
    for rank in (0, 1, 10**4, 10**9):
        yield f"rank of a layer is {rank}", _described(_first_layer("rank", rank))
    foreign = {"evil": {"form": "dense"}}
    yield "a foreign layer", _described(lambda found: found["layers"].update(foreign))
    yield "no layer", _described(lambda found: found["layers"].clear())
    for key in ("architectures", "hidden_size", "vocab_size", "tie_word_embeddings"):
        for name, value in VALUES.items():
            yield f"config.json: {key} is {name}", _json("config.json", key, value)
    remote = {"AutoConfig": "modeling_evil.C", "AutoModel": "modeling_evil.M"}
    yield "config.json names code", _json("config.json", "auto_map", remote)
    for file in ("config.json", "model.safetensors", "lod.safetensors", "generation_config.json"):
        for name, text in TEXTS.items():
            yield f"{file}: {name}", _bytes(file, text)
        yield f"{file} is a link", _link(file, outside)


def _described(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change what config.json says of the low-rank layers."""

    def changed(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text())
        change(content["quantization_config"])
        (directory / "config.json").write_text(json.dumps(content))

    return changed


def _first_layer(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: next(iter(found["layers"].values())).update({key: value})


def updates(good: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Give what somebody could send in place of a federated update."""
    key = next(iter(good))
    for name, value in VALUES.items():
        yield f"an update that is {name}", value
        yield f"an entry that is {name}", {**good, key: value}
    for name, value in good.items():
        for filler in (float("nan"), float("inf"), -float("inf"), 1e39):
            filled = torch.full(value.shape, filler, dtype=torch.float64)
            yield f"{name} is {filler}", {**good, name: filled}
        for dtype in (torch.complex64, torch.complex128):
            yield f"{name} is {dtype}", {**good, name: value.to(dtype)}
        yield f"{name} has no element", {**good, name: value.new_empty(0)}
        yield f"{name} has a dimension more", {**good, name: value[None]}
    yield "missing", {k: v for k, v in good.items() if k != key}
    yield "foreign", {**good, "evil": torch.ones(1)}
    yield "another shape", {**good, key: torch.ones(3, 3, 3)}


def write_update(update: Any, path: Path) -> Any:
    """Write an update, and return it as it is read."""
    save_state(update, path)
    return load_state(path)


def copied(sound: Path, place: Path, change: Change) -> Path:
    """Return a hostile copy of a sound directory."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sound, place)
    write_code(place)
    change(place)
    return place
