"""What a long piece of work has finished, in a directory, so that the next call goes on from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maestro_lod.errors import OptionError
from maestro_lod.files.atomic import replacing
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
        said, wanted = directory / _OF, json.dumps(of, sort_keys=True, default=str)
        if not said.exists():
            with replacing(said) as file:
                file.write_text(wanted)
        elif (was := said.read_text()) != wanted:
            raise OptionError(
                f"{directory} holds unfinished work of another call ({was}, not {wanted}). "
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
