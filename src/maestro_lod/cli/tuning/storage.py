"""Where a search is kept: an Optuna study in a journal, in a database or in memory."""

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

_STUCK = 30  # seconds, after which a lock that a killed process left on a journal is broken
_RETRY = 1.0  # seconds, after which a database is opened once more
_HEAD = b'{"op_code":'
_LARGEST = 2**30  # bytes of a journal; a trial takes some thousands

Direction: TypeAlias = Literal["maximize", "minimize"]
Storage: TypeAlias = str | os.PathLike[str]


def open_study(
    storage: Storage | None, name: str, directions: Sequence[Direction], about: Mapping[str, Any]
) -> optuna.Study:
    """Open a search, or begin it; refuse one that is about something else."""
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
        # in this order: another process says what it searches before it begins, maybe just now
        begun = bool(study.get_trials(deepcopy=False))
        found = study.user_attrs.get("search")
    except Exception as error:  # of the file system, a driver, a server, a file that is no journal
        raise OptionError(
            f"storage {place} cannot be used ({first_line(error)}). Give a path, or the URL of a "
            "database, such as sqlite:///search.db."
        ) from error
    wanted = json.loads(json.dumps(about))
    if found is None and not begun:
        study.set_user_attr("search", wanted)
        found = wanted
    if found is None:
        raise OptionError(f"{name!r} in storage {place} is no search of ours. Give another name.")
    for key in [*wanted, *found]:
        if wanted.get(key) != found.get(key):
            raise OptionError(
                f"the search {name!r} in storage {place} has {key}={found.get(key)}, not "
                f"{wanted.get(key)}. Give the same to go on with it, or another name or storage."
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
    """Refuse a file that cannot be a journal, before it is locked or read as a whole."""
    if not path.exists():
        return
    if not path.is_file() and not path.is_dir():  # which opening refuses
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > _LARGEST:
        raise ValueError(f"it has {size:,} bytes, more than any journal")
    with path.open("rb") as file:
        if file.read(len(_HEAD)) not in (b"", _HEAD):
            raise ValueError("the file is no journal of Optuna's")


def _lock_on(path: Path) -> JournalFileOpenLock:
    """Return the system's lock on a journal; where there is none, a file that says it is locked.

    Not Optuna's default, a symbolic link: if its owner is killed, relative to the journal's own
    directory it leads nowhere, and then those who come later wait for ever.
    """
    lock = _SystemLock(path)
    try:
        lock.acquire()
    except OSError:
        return JournalFileOpenLock(str(path), grace_period=_STUCK)
    lock.release()
    return lock


class _SystemLock(JournalFileOpenLock):
    """A lock on the journal itself: it ends with its owner, however that ends, and leaves nothing.

    A file beside the journal would stay after a kill, and others wait until they break it.
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
        held, self._held = self._held, ExitStack()  # the next one may have it before this returns
        held.close()


def _database(url: str) -> RDBStorage:
    # sqlite makes others wait while one writes, by default not for long
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    try:
        return RDBStorage(url, engine_kwargs=options)
    except Exception:  # of two who make its tables in the same moment, one fails
        time.sleep(_RETRY)
        return RDBStorage(url, engine_kwargs=options)


def _mend(path: Path, lock: JournalFileOpenLock) -> None:
    """Cut off what a power cut or a full disk left of a journal's last line, in place.

    The next entry would be written behind it, and both be lost.
    """
    lock.acquire()
    try:
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            os.truncate(path, whole.rfind(b"\n") + 1)
    finally:
        lock.release()


def first_line(error: Exception) -> str:
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
