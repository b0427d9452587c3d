"""One process at a time works in a directory, and whoever comes second is told who is first.

Run as a script, this file tries two trainings in one directory as often as it is told: see `main`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from maestro_lod.cli import main as cli
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.atomic import alone_in, remove_leftovers, replacing_directory


def test_the_second_is_told_who_is_first(tmp_path: Path) -> None:
    told = rf"in use by process {os.getpid()} on \S+ since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    with (
        alone_in(tmp_path),
        pytest.raises(OptionError, match=told),
        alone_in(tmp_path),
    ):
        raise AssertionError("two are in")
    with alone_in(tmp_path):  # and once more
        pass
    assert not [*tmp_path.iterdir()]


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), alone_in(tmp_path):
        raise ValueError("mine")
    with alone_in(tmp_path):
        pass


def test_a_lock_whose_file_is_removed_at_that_moment_is_not_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, the owner may end and a third process may begin."""
    flock, taken = fcntl.flock, []

    def meanwhile(handle: int, how: int) -> None:
        if not taken:
            taken.append(True)
            (tmp_path / ".lock").unlink()
            (tmp_path / ".lock").write_text("of a third")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with alone_in(tmp_path), pytest.raises(OptionError, match="in use"), alone_in(tmp_path):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_a_warning_says_so(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    entered = False
    with (
        pytest.warns(UserWarning, match="cannot be locked on this file system"),
        alone_in(tmp_path),
    ):
        entered = True
    assert entered


def test_a_system_without_locks_can_import_the_library(tmp_path: Path) -> None:
    script = "import sys; sys.modules['fcntl'] = None; import maestro_lod.files.atomic"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_other_trouble_with_a_lock_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        pytest.raises(CheckpointError, match=r"cannot write .*nowhere"),
        alone_in(tmp_path / "nowhere"),
    ):
        pass
    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(CheckpointError, match=r"cannot lock .*Input/output error"),
        alone_in(tmp_path),
    ):
        pass


def test_leftovers_may_be_links_and_files(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / ".writing-x").symlink_to(kept)
    (tmp_path / ".writing-y").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".writing-z").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()


# -- directories in one rename ---------------------------------------------------------------------


def test_a_directory_is_there_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with replacing_directory(out) as place:
        (place / "a").write_text("a")
        assert not out.exists()
        with pytest.raises(OptionError, match="out is in use"), replacing_directory(out):
            pass
    assert (out / "a").read_text() == "a"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_directory_that_is_there_must_be_empty(tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir(mode=0o750)
    link.symlink_to(out)
    with replacing_directory(link) as place:
        (place / "a").touch()
    assert link.is_symlink() and (out / "a").exists()
    assert out.stat().st_mode & 0o777 == 0o750
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*not empty"),
        replacing_directory(out),
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


FILLING = """
import os, signal, sys
from pathlib import Path
from maestro_lod.files.atomic import replacing_directory
with replacing_directory(Path(sys.argv[1])) as place:
    (place / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing_that_the_next_does_not_clear(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", FILLING, out], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists() and len([*tmp_path.iterdir()]) == 2
    with replacing_directory(out) as place:
        (place / "whole").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["whole"]


# -- trainings -----------------------------------------------------------------------------------

OWN = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 24
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((6,), float(index)), index % 3

def model(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def data(batch):
    loader = DataLoader(
        Slow(), batch_size=batch, num_workers=2, persistent_workers=True,
        multiprocessing_context="fork",
    )
    return {"train": loader}
"""


def lod(*arguments: str) -> int:
    """Start the program in a fork of this process; returns its number."""
    child = os.fork()
    if child == 0:
        os.setsid()
        sink = os.open(f"output-{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            cli.main([*arguments])
        except SystemExit as error:
            os._exit(int(error.code or 0))
    return child


def ended(child: int) -> tuple[int, str]:
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), Path(f"output-{child}.txt").read_text()


def workers_of(parent: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def two_trainings(number: int) -> str:
    """Start two trainings in one directory at once, and say how they ended."""
    out = f"two-{number}"
    children = [lod("train", "own.yaml", "--set", f"seed={n}", "--out", out) for n in (1, 2)]
    ends = [ended(child) for child in children]
    ends.sort()
    told = re.search(rf"lod: {out} is in use by process (\d+) on \S+ since .*\.", ends[1][1])
    if [code for code, _ in ends] != [0, 2] or told is None or int(told[1]) not in children:
        return f"wrong: {ends}"
    *said, _ = ends[1][1].strip().splitlines()  # what was to be trained, and why it is not
    if [line.split(":")[0] for line in said] not in ([], [f"training own into {out}"]):
        return f"more than a line of error: {ends[1]}"
    if list(Path(out).glob(".*")):
        return f"leftovers: {ends[1]}"
    return "one went on, the other was told"


def killed_with_workers(number: int) -> str:
    """Kill a training whose workers live on; the next start has to go on at once."""
    out = Path(f"killed-{number}")
    holder = lod("train", "own.yaml", "--out", str(out))
    deadline = time.monotonic() + 60
    while not (out / "checkpoint.safetensors").exists() or len(workers_of(holder)) < 2:
        if time.monotonic() > deadline:
            return f"never began: {ended(holder)}"
        time.sleep(0.005)
    workers = workers_of(holder)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # or they would notice and end
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    living = [worker for worker in workers if alive(worker)]
    try:
        code, text = ended(lod("resume", str(out)))
        still = [worker for worker in living if alive(worker)]
    finally:
        for worker in living:
            os.kill(worker, signal.SIGKILL)
    if len(still) != 2 or not (out / "result.json").exists() or list(out.glob(".*")):
        return f"the workers did not live on, or leftovers: {still} {text}"
    return "went on at once" if code == 0 else f"wrong: {code} {text}"


def main() -> None:
    """Try both as often as the first argument says, and print as JSON how often they ended how.

    Every start is a fork of this process, because the imports take longer than the training.
    """
    import torch

    torch.set_num_threads(1)
    Path("own.py").write_text(OWN)
    Path("own.yaml").write_text(
        "model: own:model\ndata: own:data\nepochs: 2\nbatch: 8\nthreads: 1\n"
        "checkpoint_every: 0\nrecalibration: 0\n"
    )
    with suppress(SystemExit):  # what is imported late is there before the forks
        cli.main(["train", "own.yaml", "--out", "first", "--quiet"])
    ends = {
        attempt.__name__: Counter(attempt(number) for number in range(int(sys.argv[1])))
        for attempt in (two_trainings, killed_with_workers)
    }
    print(json.dumps(ends), file=sys.stderr)  # noqa: T201  # the trainings print too


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers as Linux tells")
def test_two_trainings_and_a_killed_one_with_living_workers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "10"],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr) == {
        "two_trainings": {"one went on, the other was told": 10},
        "killed_with_workers": {"went on at once": 10},
    }


if __name__ == "__main__":
    main()
