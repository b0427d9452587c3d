"""Any command line: never a traceback, an exit code that is documented, nothing written if refused.

Commands and options are asked from the program, so that new ones are tried too. What would take
long (training, searching, exporting, timing) is cut off where it begins: a line that gets there was
accepted. Run as a script, this file tries as many lines as it is told.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from maestro_lod.baselines.compare import command as comparing
from maestro_lod.cli import main as cli
from maestro_lod.cli import run as run_module
from maestro_lod.cli.commands import results, training
from maestro_lod.cli.settings_list import all_settings
from maestro_lod.cli.tuning.recipes import Tuning
from maestro_lod.pretrained import compression


class Accepted(BaseException):
    """A command line has come to the work that it asks for."""


LONG_WORK = [
    (run_module, "fit"), (results, "find_frontier"), (results, "write_deployment"),
    (results, "compare"), (compression, "compress"), (comparing, "do_compare"),
    (Tuning, "tune"), (Tuning, "explore"), (training, "launch"),
]  # fmt: skip


def accept(*_: Any, **__: Any) -> None:
    raise Accepted


@contextmanager
def sandbox() -> Iterator[Path]:
    """Stand in a directory with a small run and some files, in which long work is cut off."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("LOD_DATA", "LOD_TRUST", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("LOD_CACHE", folder)
        os.chdir(folder)
        try:
            changes = ("data.limit=60", "batch=8", "epochs=1", "threads=1")
            options = [part for change in changes for part in ("--set", change)]
            with redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
                cli.main(["train", "digits", "--out", "work/run", *options])
            assert not end.value.code
            Path("work/text.txt").write_text("some words\n")
            Path("work/own.yaml").write_text("model: lenet\ndata: digits\nepochs: 1\n")
            Path("work/broken.yaml").write_text("model: [\n")
            Path("work/empty").mkdir()
            shutil.copytree("work", "as-it-was")
            os.chdir("work")
            for owner, name in LONG_WORK:
                patch.setattr(owner, name, accept)
            yield Path.cwd()
        finally:
            os.chdir(here)


# -- what is tried -------------------------------------------------------------------------------

PLACES = [
    "run", "empty", "text.txt", "own.yaml", "broken.yaml", "nowhere", "run/model.safetensors",
    "run/result.json", "", ".", "digits", "lenet-mnist", "digts",
]  # fmt: skip
ODD = [
    "", " ", "-", "--", "0", "-0", "-1", "1", "2", "0.5", "25%", "1e-9", "1e400", "-1e400", "nan",
    "inf", "9" * 40, "9" * 5000, "1_000", "0x10", "true", "null", "[]", "{}", "[1,", "'", '"', "%",
    "\\", "§", "ü", "漢字", "🙂", "\u202e", "\ud800", "a" * 3000, "a\nb", "a,b", "*", "~", "../up",
    "onnx", "pt2", "macs", "lod", "dense", "greedy", "1.5x", "300k", "0.5,0.25",
]  # fmt: skip
SENSIBLE = ["1", "2", "8", "0.5", "0.25", "25%", "new", "onnx", "lod,narrow", "text.txt"]
texts = st.text(st.characters(exclude_characters=":/\x00"), max_size=12)
odd = st.one_of(st.sampled_from(ODD), st.sampled_from(PLACES), st.integers().map(str), texts)


@lru_cache
def options_of(command: str) -> dict[str, bool]:
    """Return the options that a command has, and whether each takes a value."""
    found = [p for p in cli._load(command).params if p.param_type_name == "option"]
    return {name: not p.is_flag for p in found for name in p.opts}


@st.composite
def assignments(draw: st.DrawFn) -> str:
    """KEY=VALUE of a setting that exists, nearly exists or does not."""
    keys = st.sampled_from([setting.key for setting in all_settings()])
    key = draw(st.one_of(keys, keys, keys.map(lambda k: k[:-1]), keys.map("{}.x".format), texts))
    sensible = st.sampled_from(["1", "2", "0.1", "true", "null", "none", "dense"])
    return draw(st.sampled_from([f"{key}=", f"{key}=", f"={key}"])) + draw(st.one_of(sensible, odd))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A line that is mostly right, with something odd in it here and there."""
    command = draw(st.sampled_from([*cli.COMMANDS]))
    of_recipe = command in ("train", "tune", "compare", "summary", "compress")
    line = [draw(st.sampled_from(["digits" if of_recipe else "run"] * 3 + PLACES))]
    known = options_of(command)
    if "--out" in known and draw(st.integers(0, 3)):
        line += ["--out", "new"]
    if command in ("tune", "compress") and draw(st.integers(0, 3)):
        line += ["--max-params", "5000", *["--min-accuracy", "0.5"] * (command == "tune")]
    for _ in range(draw(st.integers(0, 4)) if known else 0):
        name, takes_a_value = draw(st.sampled_from([*known.items()]))
        if name == "--set":
            line += [name, draw(assignments())]
        elif takes_a_value:
            value = draw(st.one_of(st.sampled_from(SENSIBLE), odd))
            line += [name, value] if draw(st.booleans()) else [f"{name}={value}"]
        else:
            line.append(name)
    line = [command, *line]
    if draw(st.integers(0, 7)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(odd))
    if draw(st.integers(0, 7)) == 0:
        del line[draw(st.integers(0, len(line) - 1))]
    return line


# -- how it ends ---------------------------------------------------------------------------------


def files_in(directory: Path) -> dict[str, tuple[int, int]]:
    found = {str(path): path.lstat() for path in directory.rglob("*")}
    return {name: (told.st_size, told.st_mtime_ns) for name, told in found.items()}


def end_of(line: list[str], directory: Path) -> str:
    """Run a line and say how it ended; whatever breaks a promise is an AssertionError."""
    before = files_in(directory)
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main(line)
    except Accepted:
        code: Any = "accepted"
    except SystemExit as end:
        code = end.code or 0
    said = err.getvalue()
    changed = files_in(directory) != before
    if changed:
        os.chdir("..")
        shutil.rmtree(directory)
        shutil.copytree("as-it-was", directory)
        os.chdir(directory)
    assert "Traceback" not in said, f"{line}\n{said}"
    assert code in ("accepted", 0, 1, 2) or (code == 3 and line[0] == "deploy"), (line, code)
    if code in (1, 2):
        shown = said or out.getvalue()  # the help goes to either
        assert shown.count("\n") == 1 or "Usage" in shown or "DAMAGED" in shown, f"{line}\n{said}"
    assert not (code == 2 and changed), f"{line} is refused after something was written"
    return "accepted" if code == "accepted" else f"exit code {code}"


def tried(times: int, tell: Callable[[str], None] = lambda end: None) -> Counter[str]:
    """Try so many lines and count how they end."""
    ends: Counter[str] = Counter()
    with sandbox() as directory:

        @settings(max_examples=times, phases=[Phase.generate, Phase.shrink])
        @given(command_lines())
        def one(line: list[str]) -> None:
            ends[end_of(line, directory)] += 1
            tell(str(line))

        one()
    return ends


@pytest.mark.slow
def test_no_command_line_ends_in_a_traceback_or_is_refused_too_late() -> None:
    assert tried(60)["exit code 2"] > 20


def test_what_is_right_is_accepted_and_a_fault_is_seen() -> None:
    # the fault goes before the sandbox does, which would otherwise leave its own patch behind
    with sandbox() as directory, pytest.MonkeyPatch.context() as faulty:
        for line, end in {
            "train digits --out new": "accepted",
            "deploy run --out new --max-macs 25%": "accepted",
            "verify run": "exit code 0",
            "frontier nowhere": "exit code 2",
        }.items():
            assert end_of(line.split(), directory) == end
        faulty.setattr(results, "find_frontier", lambda *_, **__: [][0])
        with pytest.raises(AssertionError, match="Traceback"):
            end_of(["frontier", "run"], directory)


def main() -> None:
    """Print as JSON how so many command lines ended; an error says which one broke a promise."""
    settings.load_profile("default")  # other lines each time
    settings.register_profile("count", deadline=None, database=None)
    settings.load_profile("count")
    print(json.dumps(tried(int(sys.argv[1]))))  # noqa: T201


if __name__ == "__main__":
    main()
