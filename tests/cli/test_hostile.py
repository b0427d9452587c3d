"""Whatever somebody else made is opened without running, reading or writing anything but it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.cli import main as cli
from maestro_lod.errors import MaestroError
from maestro_lod.integrations.federated import receive
from tests.conftest import Snapshot
from tests.support import hostile

SECRET = "a secret that no page may show"
RUN_COMMANDS = {
    "summary": [], "report": [], "verify": [], "resume": [], "bench": [], "frontier": [],
    "deploy": ["--out", "made"],
}  # fmt: skip
SLOW = ("bench", "frontier", "deploy")
"""Before they work they read what `summary` reads, so these are only given what is refused."""
MODEL_COMMANDS = {
    "compress": ["--data", "texts.txt", "--max-params", "0.5", "--no-correction", "--out", "made"],
    "distill": ["--teacher", "{}", "--data", "texts.txt", "--steps", "1", "--out", "made"],
    "verify": [], "summary": [], "report": [],
}  # fmt: skip
ANSWERED, REFUSED = "answered", "refused in one line"
_OPENED: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _OPENED.append(os.fsdecode(arguments[0]))


def run_program(arguments: list[str]) -> tuple[int, str, str]:
    """Run `lod …` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(arguments)
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("the program did not end")


class Outside:
    """A folder that nothing may touch, beside the directories that are opened."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.place, self.file = place, place / "secret.json"
        self.file.write_text(json.dumps({"secret": SECRET}))
        self._before = self._now()

    def _now(self) -> list[tuple[str, bytes, int]]:
        files = sorted(self.place.iterdir())
        return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in files]

    def require_untouched(self, opened: list[str], *texts: str) -> None:
        assert self._now() == self._before
        inside = [os.path.realpath(path) for path in opened if "\0" not in path]
        assert str(self.file) not in inside
        assert not any(SECRET in text for text in texts)


def end_of(arguments: list[str], directory: Path, outside: Outside) -> str:
    """Return how a command ends on a hostile directory."""
    searched = [*sys.path]
    del _OPENED[:]
    code, out, err = run_program(arguments)
    pages = [page.read_text() for page in directory.glob("*.html") if not page.is_symlink()]
    outside.require_untouched([*_OPENED], out, err, *pages)
    assert not (directory / hostile.RAN).exists(), "code of the directory has run"
    added = [Path(place) for place in sys.path if place not in searched]
    assert not any(place.resolve().is_relative_to(outside.place.parent) for place in added), added
    assert "Traceback" not in err and "bug in lod" not in err, err
    if code == 0:
        return ANSWERED
    said = [line for line in err.splitlines() if line.startswith("lod: ")]
    assert len(said) == 1 and err.endswith(f"{said[0]}\n"), err
    return REFUSED


@contextlib.contextmanager
def place_of(folder: Path) -> Iterator[Outside]:
    """Work in a folder with something beside it that must stay as it is."""
    sys.addaudithook(_watch)
    before = Path.cwd()
    (folder / "work").mkdir()
    os.chdir(folder / "work")
    try:
        yield Outside(folder / "outside")
    finally:
        os.chdir(before)


def try_directories(
    sound: Path, outside: Outside, changes: Any, commands: dict[str, list[str]], every: int = 1
) -> tuple[Counter[str], list[str]]:
    """Open hostile copies of a directory by commands; return the ends, and what went wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    for name, change, command in cases_of(changes(outside.file), commands)[::every]:
        directory = hostile.copied(sound, Path("hostile").absolute(), change)
        for made in Path.cwd().glob("made*"):  # or the next one is refused for what is there
            shutil.rmtree(made)
        options = [word.format(sound) for word in commands[command]]
        try:
            ends[end_of([command, "hostile", *options], directory, outside)] += 1
        except Exception as error:
            ends["failed"] += 1
            wrong.append(f"{command}, {name}: {type(error).__name__}: {str(error)[-400:]}")
    return ends, wrong


def cases_of(changes: Any, commands: dict[str, list[str]]) -> list[tuple[str, Any, str]]:
    """Return each change with each command that is tried on it."""
    return [
        (name, change, command)
        for name, change in changes
        for command in commands
        if command not in SLOW or name.startswith("config.yaml") or name.endswith("link")
    ]


def finished_run(place: Path) -> Path:
    small = ["epochs=1", "data.limit=48", "threads=1"]
    sets = [word for each in small for word in ("--set", each)]
    code, _, err = run_program(["train", "digits", *sets, "--quiet", "--out", str(place)])
    assert code == 0, err
    return place


def try_runs(folder: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    with place_of(folder) as outside:
        sound = finished_run(folder / "sound")
        return try_directories(sound, outside, hostile.run_directories, RUN_COMMANDS, every)


def try_models(folder: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    from tests.support.directories import LINES, write_bert

    with place_of(folder) as outside:
        sound = write_bert(folder / "sound")
        Path("texts.txt").write_text("\n".join(LINES))
        return try_directories(sound, outside, hostile.model_directories, MODEL_COMMANDS, every)


def try_compressed(folder: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    from tests.support.directories import LINES, write_bert

    with place_of(folder) as outside:
        original, sound = write_bert(folder / "original"), folder / "sound"
        Path("texts.txt").write_text("\n".join(LINES))
        code, _, err = run_program(
            ["compress", str(original), *MODEL_COMMANDS["compress"][:-1], str(sound)]
        )
        assert code == 0, err
        commands = MODEL_COMMANDS | {
            "distill": [word.format(original) for word in MODEL_COMMANDS["distill"]]
        }
        return try_directories(sound, outside, hostile.compressed_directories, commands, every)


def updated() -> nn.Module:
    torch.manual_seed(0)
    return lod.decompose(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


def try_updates(folder: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    model = updated()
    before = Snapshot.of(model)
    for name, update in [*hostile.updates(dict(model.state_dict()))][::every]:
        try:
            receive(model, hostile.write_update(update, folder / "update.safetensors"))
            ends[ANSWERED] += 1
        except MaestroError as error:
            before.assert_unchanged(model)
            assert "\n" not in str(error)
            ends[REFUSED] += 1
        except Exception as error:
            ends["failed"] += 1
            wrong.append(f"{name}: {error!r}")
    return ends, wrong


Ends = tuple[Counter[str], list[str]]
KINDS: dict[str, tuple[Callable[[Path, int], Ends], int]] = {
    "run directories": (try_runs, 17), "model directories": (try_models, 29),
    "compressed directories": (try_compressed, 23), "update files": (try_updates, 1),
}  # fmt: skip
"""How each kind is tried, and which part of the cases, one of so many, is a sample for a test."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_somebody_else_made_is_opened_safely(kind: str, tmp_path: Path) -> None:
    attempt, every = KINDS[kind]
    _, wrong = attempt(tmp_path, every)
    assert not wrong, "\n".join(wrong)


def test_there_are_hundreds_of_cases() -> None:
    outside = Path("outside")
    runs = cases_of(hostile.run_directories(outside), RUN_COMMANDS)
    models = cases_of(hostile.model_directories(outside), MODEL_COMMANDS)
    models += cases_of(hostile.compressed_directories(outside), MODEL_COMMANDS)
    updates = [*hostile.updates(dict(updated().state_dict()))]
    made = {name for name, _, _ in (*runs, *models)} | {name for name, _ in updates}
    assert len(made) >= 300
    assert len(runs) + len(models) + len(updates) >= 1000


if __name__ == "__main__":
    found = {}
    for kind, (attempt, _) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            ends, wrong = attempt(Path(folder), 1)
            found[kind] = dict(ends)
            sys.stderr.write(
                f"{kind}: {time.monotonic() - begun:.0f} s\n" + "\n".join(wrong) + "\n"
            )
    sys.stdout.write(json.dumps(found) + "\n")
