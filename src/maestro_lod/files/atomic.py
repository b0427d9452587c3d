"""Atomic writes of files and directories, and locks for directories that one process works in."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, BinaryIO, cast

from maestro_lod.errors import BusyError, CheckpointError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX, _LOCK = ".writing-", ".lock"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place to write a file; it replaces the old one once the block is done.

    Readers see the old file or the new one, never half. The place is a directory of its own beside
    the target, since libraries that write may make temporary files themselves: all of them go away
    with it, and a process that is killed leaves nothing but that directory, which the next one to
    write the file removes.
    """
    # a link is replaced too: in a directory of others it may lead to any file
    target = Path(os.path.realpath(path.parent)) / path.name
    with _temporary_place(target, path) as place:
        yield place / target.name
        with writing(path):
            _put_in_place(place / target.name, target)


@contextmanager
def replacing_files(directory: Path) -> Iterator[Path]:
    """Give a place to write several files; they replace those in a directory once all are written.

    Each file is replaced as a whole; other files in the directory stay.
    """
    target = Path(os.path.realpath(directory))
    with writing(directory):
        target.mkdir(parents=True, exist_ok=True)
    with _temporary_place(target / "files", directory) as place:
        yield place
        with writing(directory):
            for written in sorted(place.iterdir()):
                _put_in_place(written, target / written.name)


@contextmanager
def _temporary_place(target: Path, path: Path) -> Iterator[Path]:
    """Make a directory for files that will replace a target; it is removed after the block."""
    with writing(path):
        for left in target.parent.glob(f"{_PREFIX}{glob.escape(target.name)}-*"):
            if _deserted(left):
                shutil.rmtree(left, ignore_errors=True)
        place, handle = _own_place(target)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)  # the next one to write clears what stays
        if handle in _held:  # not in a forked child
            _close(handle)


def _put_in_place(written: Path, target: Path) -> None:
    """Replace a file by one that was written to a temporary place."""
    written.chmod(_mode(target, written.parent))  # safetensors lets only the owner read
    with written.open("r+b") as file:
        os.fsync(file.fileno())
    os.replace(written, target)  # noqa: PTH105
    _sync_directory(target.parent)


def _own_place(target: Path) -> tuple[Path, int | None]:
    """Make a directory next to a file, locked while this process lives, where there are locks."""
    while True:
        place = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{_PREFIX}{target.name}-"))
        try:
            handle = _held_place(place)
        except (BlockingIOError, FileNotFoundError):  # taken for a deserted one at that moment
            continue
        except OSError:
            return place, None
        return place, handle


def _held_place(place: Path) -> int | None:
    """Lock a directory without waiting and return the handle; None on systems without locks."""
    if fcntl is None:
        return None
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    _held.add(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        place.stat()  # it may have been removed meanwhile
    except OSError:
        _close(handle)
        raise
    return handle


def _deserted(place: Path) -> bool | None:
    """Return whether the process that wrote there has ended; None if that is not known."""
    try:
        handle = _held_place(place)
    except BlockingIOError:
        return False
    except OSError:
        return None
    if handle is None:
        return None
    _close(handle)
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report errors of files in the `with` block as errors of writing this one."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path} ({error.strerror or error}).") from error


def _mode(target: Path, directory: Path) -> int:
    """Return the permissions of a file that is there, or of one that would be created plainly."""
    if target.is_symlink() or not target.exists():
        target = directory / f"{target.name}.plain"
        target.touch()
    return stat.S_IMODE(target.stat().st_mode)


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill; in one rename it takes the place of none or an empty one.

    One process at a time: the next one clears what a killed one has left.
    """
    with alone_for(path), filling_directory(path) as place:
        yield place


@contextmanager
def alone_for(path: Path) -> Iterator[None]:
    """Let no other process put a directory in that place while the block runs."""
    target = Path(os.path.realpath(path))
    with writing(path):
        target.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path, lock=target.with_name(f".{target.name}{_LOCK}")):
        yield


@contextmanager
def filling_directory(path: Path) -> Iterator[Path]:
    """Do what `replacing_directory` does for the process that is `alone_for` that place."""
    target = Path(os.path.realpath(path))
    place = target.with_name(f".filling-{target.name}")
    with writing(path):
        _remove(place)
        place.mkdir()
    try:
        yield place
        remove_leftovers(place)
        with writing(path):
            if target.exists():
                shutil.copymode(target, place)
            _sync_directory(place)
            os.rename(place, target)  # noqa: PTH104
            _sync_directory(target.parent)
    finally:
        with suppress(OSError):
            _remove(place)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed processes left while writing there; call it inside `alone_in`."""
    for place in directory.glob(f"{_PREFIX}*"):
        if _deserted(place) is not False:
            with writing(place):
                _remove(place)


def _remove(place: Path) -> None:
    """Remove a directory with all that is in it, a file or a link, if there is one."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def open_to_append(path: Path) -> IO[str]:
    """Open a text file of our own to append to it; a link to another file is refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


# -- directories of others -----------------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it, without a buffer; pipes and devices, which may never end, are not."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return cast("BinaryIO", os.fdopen(handle, "rb", buffering=0))


def require_no_link_out(directory: Path) -> None:
    """Refuse a directory with links to files elsewhere."""
    for file in sorted(directory.iterdir()):
        require_no_link(file)


def require_no_link(file: Path) -> None:
    """Refuse a link to a file outside of its directory, unless to the blobs of a hub's cache."""
    if not file.is_symlink() or file.is_dir():
        return
    inside = file.parent.resolve()
    allowed = {inside}
    if inside.parent.name == "snapshots":
        allowed.add(inside.parents[1] / "blobs")
    try:
        found = file.resolve().parent
    except RuntimeError:  # links to each other, up to Python 3.12
        found = None
    if found not in allowed:
        raise CheckpointError(
            f"{file} is a link to a file outside of the directory. Put the file in its place."
        )


# -- one process at a time -----------------------------------------------------------------------

_held: set[int] = set()
"""File handles that locks hang on."""


def _forget_locks() -> None:
    """Close the locks in a forked child: a worker that outlives its parent must not hold them."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def alone_in(directory: Path, *, lock: Path | None = None) -> Iterator[None]:
    """Let no other process into a directory while the block runs; the second is told of the first.

    The system holds the lock, for as long as the process lives: nothing has to be cleared after a
    kill. The file says who it is. Where the file system knows no locks, a warning says so.
    """
    lock = lock or directory / _LOCK
    handle = _locked(directory, lock)
    try:
        if handle is not None:
            now = datetime.now().astimezone().isoformat(" ", "seconds")
            who = f"process {os.getpid()} on {socket.gethostname()} since {now}"
            with suppress(OSError):  # a full disk is told where it matters
                os.ftruncate(handle, 0)
                os.write(handle, who.encode())
        yield
    finally:
        if handle is not None and handle in _held:  # not in a forked child
            with suppress(OSError):  # then it stays, which keeps nobody out
                lock.unlink(missing_ok=True)
            _close(handle)


@contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Wait until no other process is in a block for that file; an OSError where nobody can tell."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no locks")
    handle = os.open(path, os.O_RDWR)
    _held.add(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle in _held:  # not in a forked child
            _close(handle)


def _holder(handle: int) -> str:
    """Return what the holder of a lock says of itself, which it does just after it has it."""
    for _ in range(20):
        if said := os.pread(handle, 200, 0).decode(errors="replace"):
            return said
        time.sleep(0.05)
    return "another process"


def _locked(directory: Path, lock: Path) -> int | None:
    """Return the handle that a lock hangs on; None where there are no locks."""
    while fcntl is not None:
        with writing(lock):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        _held.add(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(lock.stat(), os.fstat(handle)):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError:
            who = _holder(handle)
            _close(handle)
            raise BusyError(
                f"{directory} is in use by {' '.join(who.split())}. Wait for it to end, or give "
                "another directory."
            ) from None
        except OSError as error:
            _close(handle)
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise CheckpointError(f"cannot lock {lock} ({error.strerror}).") from error
            break
        _close(handle)  # of a file that its owner has removed meanwhile: try the new one
    warnings.warn(
        f"{directory} cannot be locked on this file system: let no other process write there.",
        stacklevel=4,
    )
    return None


def _close(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _sync_directory(directory: Path) -> None:
    """Make a rename last through a crash of the machine, where the system can do that."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
