"""What a long piece of work has finished, in a directory, so that the next call goes on from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maestro_lod.errors import OptionError
from maestro_lod.files.atomic import replacing
from maestro_lod.files.json_files import read_json_file
from maestro_lod.files.state import load_state, save_state

_OF = "of.json"


class Kept:
    """Finished parts by name; without a directory nothing is kept."""

    def __init__(self, directory: Path | None = None, of: Mapping[str, Any] | None = None) -> None:
        """Open a directory, new or of the same work: `of` says in plain values which that is."""
        self._directory = directory
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        said, text = directory / _OF, json.dumps(of or {}, sort_keys=True, default=str)
        wanted = json.loads(text)
        if not said.exists():
            with replacing(said) as file:
                file.write_text(text)
        elif (was := read_json_file(said)) != wanted:
            raise OptionError(
                f"{directory} holds unfinished work of another call: {_differing(was, wanted)}. "
                "Repeat that call, or remove the directory."
            )

    def file(self, name: str) -> Path | None:
        """Return where a part is kept."""
        return None if self._directory is None else self._directory / f"{name}.safetensors"

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a part of the work (tensors, numbers, lists, mappings): as kept, or made now."""
        file = self.file(name)
        if file is not None and file.exists():
            return load_state(file)
        made = make()
        if file is not None:
            save_state(made, file)
        return made


def digest_of(value: Any) -> str:
    """Return a digest of tensors and plain values, however nested; the same on every device."""
    digest = hashlib.sha256()
    seen: set[int] = set()

    def add(part: Any) -> None:
        digest.update(f"{type(part).__name__} ".encode())
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {[*part.shape]}".encode())
            part = part.to_dense() if part.layout is not torch.strided else part
            plain = part.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
        elif part is None or isinstance(part, bool | int | float | str | bytes):
            digest.update(repr(part).encode())
        elif isinstance(part, Mapping):
            add(
                sorted(([str(key), inner] for key, inner in part.items()), key=lambda pair: pair[0])
            )
        elif hasattr(part, "tolist"):  # of numpy
            add(part.tolist())
        elif isinstance(part, Iterable):
            for inner in part:
                add(inner)
            digest.update(b"end")
        elif hasattr(part, "__dict__") and id(part) not in seen:
            seen.add(id(part))
            add(vars(part))

    add(value)
    return digest.hexdigest()


def _differing(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Name the settings that differ between two descriptions of a work."""
    names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    return ", ".join(
        f"{name} is {_short(now.get(name))}, not {_short(was.get(name))}" for name in names
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 20 else f"{text[:12]}…"
