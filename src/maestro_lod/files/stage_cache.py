"""Stage cache: the finished stages of one long call, in a directory, so that it can be resumed.

Every function with `resume=` uses such a directory. A directory belongs to one call: it records
digests of the weights and the data and all settings, and a call with another value is refused. A
stage is a file of tensors and plain values, written atomically. A search appends its answers line
by line instead, since it has thousands of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.atomic import open_to_append, replacing, writing
from maestro_lod.files.digests import compute_digest
from maestro_lod.files.json_files import parse_json, read_limited
from maestro_lod.files.state import load_state, save_state

_CALL = "of.json"
_DIGEST_LENGTH = 16


class StageCache:
    """The finished stages of one call, by name; without a directory nothing is stored.

    Args:
        directory: The directory of the stages: new, empty, or that of the same call.
        call: The values that determine the result of the call, by name. Text, numbers and None are
            compared by value, models, tensors, functions and other objects by their digest.

    Raises:
        OptionError: If the directory holds unfinished work of another call, or other files.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, call: Mapping[str, Any] | None = None
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        if self._directory is None:
            return
        self._call = {key: _described(value) for key, value in (call or {}).items()}
        self._is_recorded = (self._directory / _CALL).exists()
        if self._is_recorded:
            _require_same_call(_read_call(self._directory / _CALL), self._call, self._directory)
        elif self._directory.exists() and not _is_empty_directory(self._directory):
            raise OptionError(
                f"{self._directory} holds other files than unfinished work. Choose a new directory."
            )

    def get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a finished stage (nested tensors and plain values), or compute and store it."""
        file = self._file(name)
        if file is not None and file.exists():
            return load_state(file)
        value = compute()
        self.save(name, value)
        return value

    def load(self, name: str) -> Any:
        """Return the value that `save` stored under a name; None if there is none."""
        file = self._file(name)
        return load_state(file) if file is not None and file.exists() else None

    def save(self, name: str, value: Any) -> None:
        """Store nested tensors and plain values under a name; replace earlier ones."""
        file = self._file(name)
        if file is not None:
            self._record_call()
            save_state(value, file)

    def remove(self, name: str) -> None:
        """Remove the value under a name."""
        file = self._file(name)
        if file is not None:
            file.unlink(missing_ok=True)

    @property
    def is_on(self) -> bool:
        """Whether values are stored."""
        return self._directory is not None

    @contextmanager
    def answers(self, name: str) -> Iterator[Answers]:
        """Open the answers of a search for the `with` block."""
        self._record_call()
        answers = Answers(None if self._directory is None else self._directory / f"{name}.jsonl")
        try:
            yield answers
        finally:
            answers.close()

    def _record_call(self) -> None:
        """Write the call to the directory, before the first value is stored in it."""
        if self._directory is None or self._is_recorded:
            return
        file = self._directory / _CALL
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        with replacing(file) as place, writing(file):
            place.write_text(json.dumps(self._call))
        self._is_recorded = True

    def _file(self, name: str) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / f"{quote(name, safe=' ')}.safetensors"


class Answers:
    """Answers of a search to its own questions, line by line in a file.

    A search is a fixed procedure: with the same answers it asks the same questions. A resumed
    search gets its earlier answers, and computes the following ones.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._used = path, 0
        self._known: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        if path is None:
            return
        try:
            raw = read_limited(path) if path.exists() else b""
            whole, ended, rest = raw.rpartition(b"\n")
            self._known = _read_lines(whole, path) if ended else []
            self._file = open_to_append(path)
            if rest:  # an unfinished last line
                self._file.truncate(len(raw) - len(rest))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be used to resume ({error}). Remove its directory, or use another."
            ) from error

    def answer(self, question: Mapping[str, Any], compute: Callable[[], float]) -> float:
        """Return the stored answer to a question, or compute and store it."""
        if self._used < len(self._known):
            line = self._known[self._used]
            stored = line.get("answer", "missing")
            right_kind = stored is None or type(stored) is float
            if line.get("question") != question or not right_kind:
                raise CheckpointError(
                    f"line {self._used + 1} of {self._path} does not answer {dict(question)}: it "
                    "is damaged or of another search. Remove its directory, or choose another one."
                )
            self._used += 1
            return math.inf if stored is None else stored
        value = float(compute())
        if self._file is not None:
            line = {"question": question, "answer": value if math.isfinite(value) else None}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        return value

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _is_empty_directory(directory: Path) -> bool:
    """Return whether a directory is empty, apart from leftovers of killed writes."""
    return directory.is_dir() and all(file.name.startswith(".") for file in directory.iterdir())


def _described(value: Any) -> Any:
    """Return a plain value unchanged, or the first digits of the digest of another value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return compute_digest(value)[:_DIGEST_LENGTH]


def _read_call(file: Path) -> dict[str, Any]:
    try:
        call: dict[str, Any] = parse_json(read_limited(file), dict)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged ({error}). Remove its directory.") from error
    return call


def _require_same_call(kept: Mapping[str, Any], call: Mapping[str, Any], directory: Path) -> None:
    for key in {**kept, **call}:
        if kept.get(key) != call.get(key):
            raise OptionError(
                f"{directory} holds unfinished work of another call: {key} is "
                f"{kept.get(key)!r}, not {call.get(key)!r}. Repeat that call, or remove the "
                "directory."
            )


def _read_lines(whole: bytes, path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, text in enumerate(whole.split(b"\n"), 1):
        try:
            lines.append(parse_json(text, dict))
        except ValueError:
            raise CheckpointError(
                f"line {number} of {path} is damaged. Remove its directory, or choose another one."
            ) from None
    return lines
