"""What probes of `findings.py` are made of: each the smallest program that shows a fault."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SMALL = ["data.limit=60", "batch=8", "epochs=2", "penalty=0.02", "threshold=0.1", "threads=1"]
FIRST, SECOND = "3ab0e5b", "39eaffd"
"""The commits that were reviewed."""


PROGRAM = """
import sys
sys.path[:] = [place for place in sys.path if place]  # as for an installed program
try:
    from maestro_lod.cli.main import main
except ModuleNotFoundError:
    try:
        from maestro_lod.app.cli import main
    except ModuleNotFoundError:
        from maestro_lod.cli import main
"""
"""Imports `lod`, which had other places before."""
START = f"{PROGRAM}\nsys.exit(main())"


EARLIER = {
    "resume": ("keep", "checkpoint"),
    "on_progress": ("progress",),
    "distill_steps": ("healing",),
    "correct": ("sequential",),
}
"""Options of functions, and the names that they had before."""
EARLIER_WORDS = {"distill": "heal", "--no-correction": "--fast"}
"""Commands and options of `lod`, likewise."""


@dataclass(frozen=True)
class Probe:
    """A fault that a review found."""

    review: str
    """The commit that was reviewed."""
    finding: int
    kind: str
    test: str
    run: Callable[[], object]


PROBES: dict[str, Probe] = {}
"""By what is wrong, in the order of the findings."""


class Fault(Exception):
    """What was found is still there."""


def probe(
    finding: int, title: str, test: str, *, review: str = FIRST, kind: str = ""
) -> Callable[[Callable[[], object]], None]:
    def noted(run: Callable[[], object]) -> None:
        assert title not in PROBES
        PROBES[title] = Probe(review, finding, kind, f"tests/{test}", run)

    return noted


def refuses(work: Callable[[], object]) -> None:
    """Expect an error of the library's own."""
    from maestro_lod import MaestroError

    try:
        work()
    except MaestroError:
        return
    except Exception as error:  # whatever it is, it is of somebody else
        raise Fault(f"ends in {type(error).__name__}") from error
    raise Fault("nothing is said")


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Fault(otherwise)


def works(work: Callable[[], object]) -> None:
    """Expect no error, of whatever kind."""
    try:
        work()
    except Exception as error:  # which one it is says nothing about whose fault it is
        raise Fault(f"refused with {type(error).__name__}") from error


def of(*names: str) -> Any:
    """Return a function or class of the library by the first of its names that there is."""
    for name in names:
        module, _, last = name.rpartition(".")
        try:
            return getattr(importlib.import_module(f"maestro_lod.{module}"), last)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"there is none of {names}")


def called(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the library; an option that it does not know gets its earlier name."""
    known = inspect.signature(function).parameters
    names = {
        name: next((each for each in (name, *EARLIER.get(name, ())) if each in known), name)
        for name in options
    }
    return function(*arguments, **{names[name]: value for name, value in options.items()})


def lod(
    *arguments: str, seconds: float = 300, where: str = "", before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `lod …` in a fork; in a process of its own, where nothing is imported, if need be.

    That is the case for another working directory, or if something has to be done `before`.
    """
    if importlib.util.find_spec("maestro_lod.pretrained.distillation") is None:
        arguments = tuple(EARLIER_WORDS.get(word, word) for word in arguments)
    if where or before:
        return subprocess.run(
            [sys.executable, "-c", f"{before}\n{START}", *arguments],
            cwd=where or None,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def program() -> None:
        sys.argv = ["lod", *arguments]
        exec(START, {"__name__": "__main__"})

    return forked(program, seconds)


def forked(work: Callable[[], object], seconds: float) -> subprocess.CompletedProcess[str]:
    """Do something in a fork of this process, and return how it ended and what it said."""
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 0
            try:
                work()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        until, done = time.monotonic() + seconds, (0, 0)
        while not done[0]:
            done = os.waitpid(child, os.WNOHANG)
            if not done[0] and time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise subprocess.TimeoutExpired("lod", seconds)
            time.sleep(0.02)
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read())
    return subprocess.CompletedProcess([], os.waitstatus_to_exitcode(done[1]), *said)


def one_line(*arguments: str, seconds: float = 300) -> None:
    """Expect that `lod …` ends in an answer or in one line that is the library's own."""
    try:
        done = lod(*arguments, seconds=seconds)
    except subprocess.TimeoutExpired:
        raise Fault(f"no answer within {seconds:.0f} s") from None
    bug = any(words in done.stderr for words in ("bug in lod", "fault of lod"))
    expect(not bug, "a traceback, called a fault of lod")
    expect("Traceback" not in done.stderr, "a traceback")
    expect(done.returncode in (0, 1, 2), f"exit code {done.returncode}")


def trained(name: str = "run", *changes: str) -> Path:
    """Train a small run; two epochs, unless told otherwise."""
    options = [part for change in (*SMALL, *changes) for part in ("--set", change)]
    done = lod("train", "digits", "--out", name, *options)
    assert done.returncode == 0, done.stderr
    return Path(name)
