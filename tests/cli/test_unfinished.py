"""A command that is killed while it writes goes on and ends like one that was not."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from maestro_lod.cli.unfinished import unfinished
from maestro_lod.errors import BusyError, MaestroError, OptionError
from tests.support.faults import failing_disk

FILES = {"a": b"1" * 9, "b": b"2" * 5}


def command(out: Path) -> None:
    """Stand in for a long command: a part is kept, then two files are written."""
    with unfinished(out) as work:
        work.parts.mkdir(exist_ok=True)
        (work.parts / "part").touch()
        work.write(fill)


def fill(place: Path) -> None:
    for name, content in FILES.items():
        with (place / name).open("wb") as file:
            file.write(content)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def require_whole(out: Path) -> None:
    assert {file.name: file.read_bytes() for file in out.iterdir()} == FILES
    assert names(out.parent) == [out.name]  # no parts, no lock, nothing half-written


def forked(child: Callable[[], object]) -> int:
    """Return the exit code of a function in a process of its own, which ends without cleaning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child ignores
        pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a process of its own")
def test_the_same_command_goes_on_wherever_it_was_killed(tmp_path: Path) -> None:
    def killed(out: Path, at: int) -> None:
        with failing_disk(None) as disk, pytest.MonkeyPatch.context() as patch:
            counted = itertools.count(1)
            patch.setattr(disk, "does", lambda: os._exit(137) if next(counted) == at else None)
            command(out)

    for at in itertools.count(1):
        out = tmp_path / str(at) / "out"
        code = forked(lambda out=out, at=at: killed(out, at))
        assert code in (0, 137)
        if code == 0:
            assert at > 10
            break
        parts = out.with_name("out.unfinished")
        if out.exists():  # as a whole, whatever else there is
            assert {file.name: file.read_bytes() for file in out.iterdir()} == FILES
        if out.exists() and not parts.exists():  # all but the last cleaning was done
            with pytest.raises(OptionError, match="exists already"):
                command(out)
        else:
            command(out)
        require_whole(out)


def test_a_full_disk_leaves_nothing_half_and_the_same_command_goes_on(tmp_path: Path) -> None:
    for at in itertools.count(1):
        out = tmp_path / str(at) / "out"
        out.parent.mkdir()
        try:
            with failing_disk(at) as disk:
                command(out)
        except (MaestroError, OSError):
            if not out.exists() or out.with_name("out.unfinished").exists():
                command(out)
        if len(names(out.parent)) > 1:  # what the disk did not remove, the next call does
            with pytest.raises(OptionError, match="exists already"):
                command(out)
        require_whole(out)
        if disk.done < at:
            break


def test_what_cannot_be_filled_leaves_no_directory(tmp_path: Path) -> None:
    def half(place: Path) -> None:
        fill(place)
        raise OptionError("no export")

    with pytest.raises(OptionError, match="no export"), unfinished(tmp_path / "out") as work:
        work.write(half)
    assert names(tmp_path) == []
    command(tmp_path / "out")
    require_whole(tmp_path / "out")


def test_directories_with_content_are_refused_even_beside_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command(out)
    with pytest.raises(OptionError, match="exists already"):
        command(out)
    shutil.copytree(out, tmp_path / "out.unfinished")
    (tmp_path / "out.unfinished" / "written").write_text("1")
    with pytest.raises(OptionError, match="exists already"):
        command(out)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="exists already"):
        command(tmp_path / "file")


def test_one_process_works_on_a_directory(tmp_path: Path) -> None:
    with (
        unfinished(tmp_path / "out"),
        pytest.raises(BusyError, match="in use"),
        unfinished(tmp_path / "out"),
    ):
        raise AssertionError


def test_a_name_may_end_in_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command(Path())
    require_whole(tmp_path / "here")
