"""Directories of transformers models, as hubs hold them, and texts to calibrate such a model on.

Weights are read from safetensors files alone: what is pickled can run code when it is read. Needs
the extra maestro-lod[huggingface].
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from maestro_lod.errors import CheckpointError, DataError, listed
from maestro_lod.installing import install
from maestro_lod.integrations.huggingface import architecture_of

CONFIG = "config.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TEXTS = (".txt", ".jsonl", ".parquet")
_PIECE = 2**16  # characters


def open_model(directory: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the model of a directory, in eval mode; nothing is downloaded, no pickle is read.

    The architecture is one of the installed transformers. `dtype` is that of the file unless given.
    """
    _require_model(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory / CONFIG} cannot be read ({_line(error)}).") from error
    kind: Any = architecture_of(config, directory)
    try:
        loaded = kind.from_pretrained(
            directory, config=config, dtype=dtype or "auto", local_files_only=True,
            use_safetensors=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{directory} cannot be loaded ({_line(error)}).") from error
    model: PreTrainedModel = loaded.eval()
    return model


def _require_model(directory: Path) -> None:
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}: it is no transformers model.")
    files = sorted(directory.iterdir())
    if any(file.suffix == ".safetensors" for file in files):
        return
    pickled = [file.name for file in files if file.suffix in _PICKLED]
    if pickled:
        raise CheckpointError(
            f"{directory} holds pickled weights only ({listed(pickled)}), which can run code when "
            "they are read. Load them where you trust them, and write safetensors: "
            "AutoModel.from_pretrained(…).save_pretrained(…)."
        )
    raise CheckpointError(f"{directory} has no weights: no safetensors file is there.")


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def text_batches(
    file: Path, directory: Path, *, length: int = 256, batch: int = 4, most: int = 16
) -> list[dict[str, Tensor]]:
    """Return batches of the texts in a file, in the tokens of the model in a directory.

    A model that continues text gets windows of `length` tokens from all texts one after the other,
    any other the texts themselves, cut to that length, those of about one length together.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    tokenizer: Any = _tokenizer(directory)
    texts = read_texts(file)
    if "CausalLM" in (config.architectures or [""])[0]:
        return _windows(tokenizer, texts, file, length, batch, most)
    chosen = sorted((text for _, text in zip(range(batch * most), texts, strict=False)), key=len)
    return [
        dict(
            tokenizer(chosen[i : i + batch], padding=True, truncation=True, max_length=length,
                      return_tensors="pt")
        )
        for i in range(0, len(chosen), batch)
    ]  # fmt: skip


def _tokenizer(directory: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise DataError(
            f"{directory} has no tokenizer that can be read ({_line(error)}). Give the data as "
            "module:function, which returns batches of token ids."
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
        raise DataError(f"{file} is no text: give a file that ends in {listed(_TEXTS)}.")
    if not file.is_file():
        raise DataError(f"{file} does not exist.")
    found = False
    for text in {".txt": _lines, ".jsonl": _rows, ".parquet": _columns}[file.suffix](file):
        if text:
            found = True
            yield text
    if not found:
        raise DataError(f"{file} holds no text.")


def _pieces(read: Callable[[int], str]) -> Iterator[str]:
    """Yield what is read line by line or as a whole, without white space around it.

    What is longer than a piece is split before white space. The space begins the next piece, since
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
        raise DataError(f"{file} is no text in UTF-8 ({error}).") from error


def _rows(file: Path) -> Iterator[str]:
    with _opened(file) as lines:
        for row in _texts_in(file, lines):
            yield from _pieces(StringIO(row).read)


def _texts_in(file: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        try:
            text = json.loads(line)["text"] if line.strip() else ""
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise DataError(f"{file}, line {number + 1}, is no JSON object with a text 'text'.")
        yield text


def _columns(file: Path) -> Iterator[str]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")  # comes with datasets
    except ImportError:
        raise DataError(f"{file} needs pyarrow: {install('data')}.") from None
    with parquet.ParquetFile(file) as table:
        if "text" not in table.schema_arrow.names:
            names = listed(table.schema_arrow.names)
            raise DataError(f"{file} has no column 'text'; its columns: {names}.")
        for part in table.iter_batches(columns=["text"]):
            for text in part.column(0).to_pylist():
                yield from _pieces(StringIO(text or "").read)
