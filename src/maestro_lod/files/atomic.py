"""Atomic writes of files and directories, and locks that give a directory to one process."""

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
    """Yield a temporary path to write; the file replaces the target at the end of the block.

    Readers see the old file or the new one, never a part. The path is in a temporary directory next
    to the target, since libraries may create temporary files themselves: all of them are removed
    with it. A killed process leaves only that directory, which the next writer of the file removes.
    """
    # a link is replaced too, since in a directory from another user it may lead to any file
    target = Path(os.path.realpath(path.parent)) / path.name
    with _temporary_place(target, path) as place:
        yield place / target.name
        with writing(path):
            _put_in_place(place / target.name, target)


@contextmanager
def replacing_files(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory; its files replace those in `directory` after the block.

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
    """Create a directory for files that will replace a target; it is removed after the block."""
    with writing(path):
        for leftover in target.parent.glob(f"{_PREFIX}{glob.escape(target.name)}-*"):
            if _deserted(leftover):
                shutil.rmtree(leftover, ignore_errors=True)
        place, handle = _own_place(target)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)  # the next writer removes the rest
        if handle in _held:  # not in a forked child
            _close(handle)


def _put_in_place(written: Path, target: Path) -> None:
    """Replace a file with one from a temporary directory."""
    written.chmod(_mode(target, written.parent))  # safetensors lets only the owner read
    with written.open("r+b") as file:
        os.fsync(file.fileno())
    os.replace(written, target)  # noqa: PTH105
    _sync_directory(target.parent)


def _own_place(target: Path) -> tuple[Path, int | None]:
    """Create a directory next to a file, locked while this process lives if locks exist."""
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
    """Return whether the writer of a directory has ended; None if that is not known."""
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
    """Raise CheckpointError for OS errors in the `with` block, which writes this file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({error.strerror or error}). Check its directory and the disk."
        ) from error


def _mode(target: Path, directory: Path) -> int:
    """Return the permissions of an existing file, or the default ones of a new file."""
    if target.is_symlink() or not target.exists():
        target = directory / f"{target.name}.plain"
        target.touch()
    return stat.S_IMODE(target.stat().st_mode)


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill; one rename moves it to `path`, which must be empty or missing.

    Only one process at a time can do so. Leftovers of a killed process are removed.
    """
    with alone_for(path), filling_directory(path) as place:
        yield place


@contextmanager
def alone_for(path: Path) -> Iterator[None]:
    """Lock the path of a directory that this process creates in the block."""
    target = Path(os.path.realpath(path))
    with writing(path):
        target.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path, lock=target.with_name(f".{target.name}{_LOCK}")):
        yield


@contextmanager
def filling_directory(path: Path) -> Iterator[Path]:
    """Yield a directory as `replacing_directory`, inside `alone_for` the same path."""
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
    """Remove temporary directories of killed processes; call it inside `alone_in`."""
    for place in directory.glob(f"{_PREFIX}*"):
        if _deserted(place) is not False:
            with writing(place):
                _remove(place)


def _remove(place: Path) -> None:
    """Remove a directory with its content, a file or a link, if it exists."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def open_to_append(path: Path) -> IO[str]:
    """Open a text file for appending; raise OSError for a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


# -- directories from elsewhere ------------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it, without a buffer; pipes and devices, which may never end, are not."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return cast("BinaryIO", os.fdopen(handle, "rb", buffering=0))


def require_no_link_out(directory: Path) -> None:
    """Raise CheckpointError if a directory contains links to files outside of it."""
    for file in sorted(directory.iterdir()):
        require_no_link(file)


def require_no_link(file: Path) -> None:
    """Raise CheckpointError for a link out of its directory, except into a hub cache's blobs."""
    if not file.is_symlink() or file.is_dir():
        return
    inside = file.parent.resolve()
    allowed = {inside}
    if inside.parent.name == "snapshots":
        allowed.add(inside.parents[1] / "blobs")
    try:
        parent = file.resolve().parent
    except RuntimeError:  # links to each other, up to Python 3.12
        parent = None
    if parent not in allowed:
        raise CheckpointError(
            f"{file} is a link to a file outside of the directory. Replace the link with the file."
        )


# -- one process at a time -----------------------------------------------------------------------

_held: set[int] = set()
"""File handles that hold locks."""


def _forget_locks() -> None:
    """Close locks in a forked child, since a worker that outlives its parent must not hold them."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def alone_in(directory: Path, *, lock: Path | None = None) -> Iterator[None]:
    """Lock a directory for this process; raise BusyError with the owner if another one has it.

    The operating system holds the lock while the process lives, so nothing is left to clear after a
    kill. The lock file names the owner. On file systems without locks a warning is issued.
    """
    lock = lock or directory / _LOCK
    handle = _locked(directory, lock)
    try:
        if handle is not None:
            now = datetime.now().astimezone().isoformat(" ", "seconds")
            owner = f"process {os.getpid()} on {socket.gethostname()} since {now}"
            with suppress(OSError):  # a full disk matters only to later writes
                os.ftruncate(handle, 0)
                os.write(handle, owner.encode())
        yield
    finally:
        if handle is not None and handle in _held:  # not in a forked child
            with suppress(OSError):  # a file without a lock has no effect
                lock.unlink(missing_ok=True)
            _close(handle)


@contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Wait for the lock of a file; raise OSError on systems without locks."""
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


def _owner(handle: int) -> str:
    """Return the owner of a lock, who writes it to the file just after locking."""
    for _ in range(20):
        if owner := os.pread(handle, 200, 0).decode(errors="replace"):
            return owner
        time.sleep(0.05)
    return "another process"


def _locked(directory: Path, lock: Path) -> int | None:
    """Lock a file and return its handle; None on systems without locks."""
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
            owner = _owner(handle)
            _close(handle)
            raise BusyError(
                f"{directory} is in use by {' '.join(owner.split())}. Wait for it to end, or give "
                "another directory."
            ) from None
        except OSError as error:
            _close(handle)
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise CheckpointError(
                    f"cannot lock {lock} ({error.strerror}). Check its directory."
                ) from error
            break
        _close(handle)  # the owner removed this file: try the new one
    warnings.warn(
        f"{directory} cannot be locked on this file system. Let no other process write to it.",
        stacklevel=4,
    )
    return None


def _close(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _sync_directory(directory: Path) -> None:
    """Flush a rename to disk, on systems that can, so that it survives a crash."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
