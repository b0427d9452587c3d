"""What a search has asked and learnt, line by line in a file, so that a killed search goes on.

A search is a fixed procedure: from the same answers it asks the same questions. So its answers are
all that has to be kept. A search that starts again gets those it had, and computes from there on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from maestro_lod.errors import CheckpointError
from maestro_lod.files.atomic import open_to_append
from maestro_lod.files.json_files import parse_json, read_limited

_FORMAT = "maestro-lod search 1"


class Journal:
    """Answers questions from a file as long as it has answers, then writes down new ones.

    `about` says what is searched; a file about something else is refused. Without a path nothing
    is kept. Use it in a `with` block.
    """

    def __init__(self, path: str | os.PathLike[str] | None, about: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._known: list[dict[str, Any]] = []
        self._used = 0
        self._file: IO[str] | None = None
        if self._path is None:
            return
        header = json.loads(json.dumps({"format": _FORMAT, **about}))
        try:
            raw = read_limited(self._path) if self._path.exists() else b""
            whole, ended, rest = raw.rpartition(b"\n")
            if ended:
                self._known = _read(whole, self._path)
                self._require_same(header, self._known.pop(0))
            elif not json.dumps(header).encode().startswith(rest):  # no start that was killed
                raise _damaged(1, self._path)
            self._file = open_to_append(self._path)
            if rest:  # of the last line; cut off only now that the file is known to be ours
                self._file.truncate(len(raw) - len(rest))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._path} cannot be used as a journal ({error}).") from error
        try:
            if self._file.tell() == 0:
                self._write(header)
        except OSError:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def answer(self, question: Mapping[str, Any], compute: Callable[[], float]) -> float:
        """Return the known answer to a question, or compute it and write it down."""
        if self._used < len(self._known):
            line = self._known[self._used]
            known = line.get("answer", math.nan)
            right_kind = known is None or type(known) is float
            if line.get("question") != question or not right_kind:
                raise CheckpointError(
                    f"line {self._used + 2} of {self._path} does not answer {dict(question)}: it "
                    "is damaged or of another search. Delete it, or give another path."
                )
            self._used += 1
            return math.inf if known is None else known
        value = float(compute())
        self._write({"question": question, "answer": value if math.isfinite(value) else None})
        return value

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _require_same(self, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for key, value in wanted.items():
            if found.get(key) != value:
                raise CheckpointError(
                    f"{self._path} is of another search: {key} is {found.get(key)} there and "
                    f"{value} here. Delete it, or give another path."
                )


def _read(whole: bytes, path: Path) -> list[dict[str, Any]]:
    """Read lines, one or more; `path` says in errors where they came from."""
    lines = []
    for number, text in enumerate(whole.split(b"\n"), 1):
        try:
            lines.append(parse_json(text, dict))
        except ValueError:
            raise _damaged(number, path) from None
    return lines


def _damaged(number: int, path: Path) -> CheckpointError:
    return CheckpointError(
        f"line {number} of {path} is damaged or no line of a journal. Delete the file, or give "
        "another path."
    )
