"""Storage of a search: an Optuna study in a journal, in a database or in memory."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import optuna
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from maestro_lod.errors import OptionError
from maestro_lod.files.atomic import waited_for

_STUCK = 30  # seconds after which the lock file of a killed process is removed
_RETRY = 1.0  # seconds before a database is opened a second time
_HEAD = b'{"op_code":'
_LARGEST = 2**30  # bytes of a journal; a trial takes some thousands

Direction: TypeAlias = Literal["maximize", "minimize"]
Storage: TypeAlias = str | os.PathLike[str]


def open_study(
    storage: Storage | None, name: str, directions: Sequence[Direction], about: Mapping[str, Any]
) -> optuna.Study:
    """Open or create a search; raise OptionError if it has other settings."""
    # a URL may hold a password
    place = re.sub(r"(://[^/@:]*):[^/]*@", r"\1:…@", str(storage or "in memory"))
    try:
        with _quiet():
            study = optuna.create_study(
                storage=_opened(storage),
                study_name=name,
                sampler=RandomSampler(),  # draws nothing jointly
                directions=directions,
                load_if_exists=True,
            )
        # in this order: another process may be creating the search, and records its settings first
        begun = bool(study.get_trials(deepcopy=False))
        saved = study.user_attrs.get("search")
    except Exception as error:  # of the file system, a driver, a server, a file that is no journal
        raise OptionError(
            f"storage {place} cannot be used ({first_line(error)}). Give a path, or the URL of a "
            "database, such as sqlite:///search.db."
        ) from error
    settings = json.loads(json.dumps(about))
    if saved is None and not begun:
        study.set_user_attr("search", settings)
        saved = settings
    if saved is None:
        raise OptionError(f"{name!r} in storage {place} is not a search of lod. Give another name.")
    for key in [*settings, *saved]:
        if settings.get(key) != saved.get(key):
            raise OptionError(
                f"the search {name!r} in storage {place} has {key}={saved.get(key)}, not "
                f"{settings.get(key)}. Give the same to continue it, or another name or storage."
            )
    return study


def _opened(storage: Storage | None) -> BaseStorage:
    if storage is None:
        return InMemoryStorage()
    if "://" in (url := str(storage)):
        return _database(url)
    path = Path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    _require_journal(path)
    path.touch()
    lock = _lock_on(path)
    _mend(path, lock)
    return JournalStorage(JournalFileBackend(str(path), lock))


def _require_journal(path: Path) -> None:
    """Raise ValueError for a file that cannot be a journal, before it is locked or read."""
    if not path.exists():
        return
    if not path.is_file() and not path.is_dir():  # opening it raises an error
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > _LARGEST:
        raise ValueError(f"it has {size:,} bytes, more than any journal")
    with path.open("rb") as file:
        if file.read(len(_HEAD)) not in (b"", _HEAD):
            raise ValueError("the file is not a journal of Optuna")


def _lock_on(path: Path) -> JournalFileOpenLock:
    """Return the system's lock on a journal; without one, a lock file.

    Optuna's default is a symbolic link. If its owner is killed and the path is relative, the link
    is broken and later processes wait for ever.
    """
    lock = _SystemLock(path)
    try:
        lock.acquire()
    except OSError:
        return JournalFileOpenLock(str(path), grace_period=_STUCK)
    lock.release()
    return lock


class _SystemLock(JournalFileOpenLock):
    """Lock on the journal itself, which the system releases when its owner is killed.

    A lock file would remain after a kill, and other processes would wait until they break it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path, self._held = path, ExitStack()

    def acquire(self) -> bool:
        held = ExitStack()
        held.enter_context(waited_for(self._path))
        self._held = held
        return True

    def release(self) -> None:
        held, self._held = (
            self._held,
            ExitStack(),
        )  # another process may acquire it before this returns
        held.close()


def _database(url: str) -> RDBStorage:
    # processes wait for a writer, by default only for 5 seconds
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    try:
        return RDBStorage(url, engine_kwargs=options)
    except Exception:  # of two processes that create the tables at the same time, one fails
        time.sleep(_RETRY)
        return RDBStorage(url, engine_kwargs=options)


def _mend(path: Path, lock: JournalFileOpenLock) -> None:
    """Remove an incomplete last line, left by a power cut or a full disk, from a journal.

    The next entry would be appended to that line, and both would be lost.
    """
    lock.acquire()
    try:
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            os.truncate(path, whole.rfind(b"\n") + 1)
    finally:
        lock.release()


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from announcing the study."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
