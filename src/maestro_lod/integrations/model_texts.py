"""Directories of transformers models, as hubs hold them, and texts to calibrate such a model on.

Weights are read from safetensors files alone: what is pickled can run code when it is read. Needs
the extra maestro-lod[huggingface].
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from maestro_lod.errors import CheckpointError, DataError, listed
from maestro_lod.files.json_files import parse_json
from maestro_lod.integrations.model_directory import (
    architecture_of,
    first_line,
    read_config,
    read_generation_config,
    read_weights,
)
from maestro_lod.integrations.quantizer import METHOD
from maestro_lod.text import install_command

_TEXTS = (".txt", ".jsonl", ".parquet")
_PIECE = 2**16  # characters


def open_model(directory: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the model of a directory, in eval mode; nothing is downloaded, no pickle is read.

    The architecture is one of the installed transformers, and every tensor of it is in the files:
    missing, foreign and differently shaped ones are refused. `dtype` is that of the file unless
    given.
    """
    config = read_config(directory)
    _require_original(config, directory)
    kind: Any = architecture_of(config, directory)
    weights = read_weights(directory)
    try:
        with _without_report():
            loaded, found = kind.from_pretrained(
                None, config=config, state_dict=weights, dtype=dtype or "auto",
                local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # of another library, for content of other people
        raise CheckpointError(f"{directory} cannot be loaded ({first_line(error)}).") from error
    _require_all_tensors(found, directory, kind.__name__)
    model: PreTrainedModel = loaded.eval()
    read_generation_config(model, directory)
    return model


def _require_original(config: Any, directory: Path) -> None:
    """Refuse a directory that holds a compressed model."""
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
        raise CheckpointError(
            f"{directory} holds a compressed model. Give the original, or read it with "
            "maestro_lod.integrations.huggingface.from_pretrained."
        )


def _require_all_tensors(found: dict[str, Any], directory: Path, kind: str) -> None:
    """Refuse weights of which some would be left out, or filled with random values."""
    wrong = {
        "missing": found["missing_keys"],
        "not of this model": found["unexpected_keys"],
        "of another shape": {key for key, *_ in found["mismatched_keys"]},
    }
    if any(wrong.values()):
        lists = "; ".join(f"{what}: {listed(sorted(keys))}" for what, keys in wrong.items() if keys)
        raise CheckpointError(
            f"{directory} does not hold the tensors of {kind}, its architecture: {lists}. Load it "
            "with transformers, make the model what it should be, and save it: "
            "model.save_pretrained(…)."
        )


@contextmanager
def _without_report() -> Iterator[None]:
    """Let transformers say nothing of missing tensors: an error does."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def text_batches(
    file: Path, directory: Path, *, length: int = 256, batch: int = 4, most: int = 16
) -> list[dict[str, Tensor]]:
    """Return batches of the texts in a file, in the tokens of the model in a directory.

    A model that continues text gets windows of `length` tokens from all texts one after the other,
    any other the texts themselves, cut to that length, those of about one length together.
    """
    kind = architecture_of(read_config(directory), directory)
    tokenizer: Any = _tokenizer(directory)
    texts = read_texts(file)
    if continues_text(kind):
        return _windows(tokenizer, texts, file, length, batch, most)
    chosen = sorted((text for _, text in zip(range(batch * most), texts, strict=False)), key=len)
    return [
        dict(
            tokenizer(chosen[i : i + batch], padding=True, truncation=True, max_length=length,
                      return_tensors="pt")
        )
        for i in range(0, len(chosen), batch)
    ]  # fmt: skip


def continues_text(kind: type) -> bool:
    """Return whether models of a class predict the next token, as those of GPT-2 do."""
    return "CausalLM" in kind.__name__ or "LMHead" in kind.__name__


@torch.no_grad()
def _tokenizer(directory: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of another library, for content of other people
        raise DataError(
            f"{directory} has no tokenizer that can be read ({first_line(error)}). Give the data "
            "as module:function, which returns batches of token ids."
        ) from error


def _windows(
    tokenizer: Any, texts: Iterator[str], file: Path, length: int, batch: int, most: int
) -> list[dict[str, Tensor]]:
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= length * batch * most:
            break
    if len(ids) < length:
        raise DataError(f"{file} has {len(ids)} tokens, fewer than one window of {length}.")
    count = min(len(ids) // length, batch * most)
    windows = torch.tensor(ids[: count * length]).view(count, length)
    return [{"input_ids": windows[i : i + batch]} for i in range(0, count, batch)]


def read_texts(file: Path) -> Iterator[str]:
    """Yield the texts of a file: the lines of .txt, or `text` in rows of .jsonl and .parquet.

    A text of more than 65,536 characters comes as several, split before white space where there is
    any: a tokenizer needs more than a hundred times the memory of a text.
    """
    if file.suffix not in _TEXTS:
        raise DataError(f"{file} is not a text file. Give a file that ends in {listed(_TEXTS)}.")
    if not file.is_file():
        raise DataError(f"{file} does not exist.")
    found = False
    for text in {".txt": _lines, ".jsonl": _rows, ".parquet": _columns}[file.suffix](file):
        if text:
            found = True
            yield text
    if not found:
        raise DataError(f"{file} has no text. Give a file with text.")


def _pieces(read: Callable[[int], str]) -> Iterator[str]:
    """Yield the text of a reader in pieces, without white space around them.

    Longer parts are split before white space. The space begins the next piece, since
    many tokenizers make it part of the word behind it.
    """
    rest = ""
    while part := read(_PIECE):
        text = rest + part
        end = len(text)
        if len(part) == _PIECE and not part.endswith("\n"):  # there is more of it
            words = text.rsplit(maxsplit=1)
            end = len(words[0]) if len(words) == 2 else end
        yield (text[:end] if rest else text[:end].lstrip()).rstrip()
        rest = text[end:]
    yield rest.rstrip()


def _lines(file: Path) -> Iterator[str]:
    with _opened(file) as lines:
        yield from _pieces(lines.readline)


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    try:
        with file.open(encoding="utf-8") as lines:
            yield lines
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not text in UTF-8 ({error}). Convert it.") from error


def _rows(file: Path) -> Iterator[str]:
    with _opened(file) as lines:
        for row in _texts_in(file, lines):
            yield from _pieces(StringIO(row).read)


def _texts_in(file: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        try:
            text: str = parse_json(line, {"text": str})["text"] if line.strip() else ""
        except ValueError as error:
            raise DataError(
                f"{file}, line {number + 1}, is no JSON object with a text 'text' ({error})."
            ) from None
        yield text


def _columns(file: Path) -> Iterator[str]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")  # comes with datasets
    except ImportError:
        raise DataError(f"{file} needs pyarrow: {install_command('data')}.") from None
    try:
        with parquet.ParquetFile(file) as table:
            if "text" not in table.schema_arrow.names:
                names = listed(table.schema_arrow.names)
                raise DataError(f"{file} has no column 'text'; its columns: {names}.")
            for part in table.iter_batches(columns=["text"]):
                for text in part.column(0).to_pylist():
                    yield from _pieces(StringIO(text or "").read)
    except DataError:
        raise
    except (OSError, ValueError, TypeError) as error:  # damaged, or numbers in place of text
        raise DataError(f"{file} cannot be read as texts ({first_line(error)}).") from error
