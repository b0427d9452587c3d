"""Files that are there as a whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.errors import CheckpointError
from maestro_lod.files.atomic import open_to_append, remove_leftovers, replacing, replacing_files
from maestro_lod.files.state import save_state


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_new_file_is_there_once_the_block_is_done(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path) as place:
        assert place.name == "file.txt"
        place.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as place:
        place.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_what_else_is_written_there_goes_away(tmp_path: Path) -> None:
    with replacing(tmp_path / "file.txt") as place:
        place.with_name(".tmpXYZ").write_text("a temporary file of a library")
        place.write_text("whole")
    assert names(tmp_path) == ["file.txt"]


def test_several_files_replace_those_of_a_directory_once_all_are_written(tmp_path: Path) -> None:
    for name in ("a", "other"):
        (tmp_path / name).write_text("old")
    (tmp_path / "a").chmod(0o640)
    with replacing_files(tmp_path) as place:
        for name in ("a", "b"):
            (place / name).write_text("new")
        assert names(tmp_path)[1:] == ["a", "other"]
        assert (tmp_path / "a").read_text() == "old"
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"a": "new", "b": "new", "other": "old"}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_of_several_files_none_is_replaced_if_the_block_fails(
    tmp_path: Path, error: type[BaseException]
) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), replacing_files(tmp_path) as place:
        (place / "a").write_text("half")
        raise error
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_trouble_with_files_names_the_target(tmp_path: Path) -> None:
    target = tmp_path / "nowhere" / "file.txt"
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*nowhere/file\.txt"),
        replacing(target) as place,
    ):
        place.write_text("never")
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*file\.txt"),
        replacing(tmp_path / "file.txt"),
    ):
        pass  # nothing was written
    assert names(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from maestro_lod.files.atomic import replacing
with replacing(Path(sys.argv[1])) as place:
    place.write_text("half")
    place.with_name(".tmpXYZ").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_can_be_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "file.txt", tmp_path / ".other"
    path.write_text("old")
    other.mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 3
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".other", "file.txt"]
    remove_leftovers(tmp_path / "nowhere")


def test_the_next_to_write_a_file_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    path, other = tmp_path / "file [1].txt", tmp_path / "other.txt"
    for target in (path, other):
        subprocess.run([sys.executable, "-c", KILLED, target], check=False)
    assert len(names(tmp_path)) == 2
    with replacing(path) as place:
        place.write_text("new")
    assert path.read_text() == "new"
    assert [name.rpartition("-")[0] for name in names(tmp_path)] == [".writing-other.txt", ""]


def test_what_a_living_process_writes_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with replacing(path) as slow:
        slow.write_text("slow")
        remove_leftovers(tmp_path)
        with replacing(path) as fast:
            fast.write_text("fast")
        assert path.read_text() == "fast"
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["file.txt"]


def export(path: Path) -> None:
    lod.export(nn.Linear(4, 4), path, example=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda path: lod.save(lod.decompose(nn.Linear(4, 4)), path), "model.safetensors"),
        (lambda path: save_state({"a": torch.ones(1)}, path), "state.safetensors"),
        (export, "model.safetensors"),
        (export, "model.pt2"),
        (export, "model.onnx"),
    ],
    ids=["save", "save_state", "safetensors", "pt2", "onnx"],
)
def test_files_may_be_read_by_whom_the_user_wants(
    write: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / name)
    finally:
        os.umask(before)
    assert stat.filemode((tmp_path / name).stat().st_mode) == "-rw-r-----"
    assert names(tmp_path) == [name]


def test_permissions_of_what_others_write_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for the mask means setting it, for all threads of the process."""

    def refuse(_: int) -> int:
        raise AssertionError("the mask of the process was changed")

    monkeypatch.setattr(os, "umask", refuse)
    with replacing(tmp_path / "file.txt") as place:
        place.write_text("whole")


def test_permissions_stay_and_links_are_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real.name)
    with replacing(link) as place:
        place.write_text("new")
    assert not link.is_symlink() and link.read_text() == "new" and real.read_text() == "old"
    with replacing(real) as place:
        place.write_text("new")
    assert stat.filemode(real.stat().st_mode) == "-rw-------"
    assert names(tmp_path) == ["link.txt", "real.txt"]


def test_nothing_is_appended_to_what_a_link_leads_to(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    with pytest.raises(OSError):
        open_to_append(link)
    assert real.read_text() == "old"


def test_trouble_of_others_is_theirs(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), replacing(tmp_path / "file.txt"):
        raise ConnectionResetError("a worker died")
    assert names(tmp_path) == []
