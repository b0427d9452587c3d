"""Trials that processes share: who does which, what a kill loses, and where they are kept.

Run as a script, this file lets processes work on one search: see `main`.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest

from maestro_lod.cli.tuning import storage as storage_module
from maestro_lod.cli.tuning import worker as worker_module
from maestro_lod.cli.tuning.search import Front, Tuned, _Halving, _Tradeoffs, explore, tune
from maestro_lod.cli.tuning.storage import Direction, open_study
from maestro_lod.cli.tuning.trials import (
    Enough,
    Reached,
    Report,
    Trial,
)
from maestro_lod.cli.tuning.worker import Worker, _alive, _process_table
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.files import atomic as files

LIMITS: dict[str, Any] = {
    "max_params": 1000, "min_accuracy": 0.9, "largest": 8.0, "smallest": 0.5
}  # fmt: skip
ALL = [8.0, 4.0, 2.0, 1.0, 0.5]


def within(penalty: float, report: Report) -> None:
    """Two epochs to a model that is small enough, but never accurate enough."""
    report(Reached(1, 0.5, 900, cost=0.5))
    report(Reached(2, 0.6, 900, cost=1.0))


def accurate_below(limit: float) -> Callable[[float, Report], None]:
    def objective(penalty: float, report: Report) -> None:
        report(Reached(1, 0.95 if penalty < limit else 0.5, 900, cost=1.0))

    return objective


def statuses(found: Tuned | Front) -> list[str]:
    return [trial.status for trial in found.trials]


def penalties(found: Tuned) -> list[float | None]:
    return [trial.penalty for trial in found.trials]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with Optuna's tables, which take long to make."""
    path = tmp_path_factory.mktemp("tables") / "search.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}")
    return path


@pytest.fixture
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if getattr(request, "param", "journal") == "journal":
        return str(tmp_path / "deep" / "search.journal")
    shutil.copy(request.getfixturevalue("tables"), tmp_path)
    return f"sqlite:///{tmp_path}/search.db"


both = pytest.mark.parametrize(
    "storage", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)], indirect=True
)


def opened(storage: str, name: str = "lod") -> optuna.Study:
    """The study, as any other user of Optuna sees it."""
    if "://" in storage:
        return optuna.load_study(study_name=name, storage=storage)
    backend = optuna.storages.journal.JournalFileBackend(storage)
    return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(backend))


# -- the processes, in a process of their own ----------------------------------------------------


def main(storage: str) -> None:
    """Let two processes share a search; one is killed in its first trial, the other ends it."""
    begun = Path(sys.argv[2])

    def hanging(penalty: float, report: Report) -> None:
        report(Reached(1, 0.5, 900, cost=0.5))
        written = begun.with_suffix(".new")
        written.write_text(str(report.number))
        written.rename(begun)
        time.sleep(600)

    def steady(penalty: float, report: Report) -> None:
        while not begun.exists():  # so that both have a trial
            time.sleep(0.01)
        within(penalty, report)

    children = {}
    for objective in (hanging, steady):
        if (child := os.fork()) == 0:
            found = tune(objective, **LIMITS, storage=storage)
            rows = [(t.penalty, t.status, t.again, t.spent) for t in found.trials]
            sys.stdout.write(json.dumps([found.status, found.penalty, rows]))
            sys.stdout.flush()
            os._exit(0)
        children[objective] = child
    while not begun.exists():
        time.sleep(0.01)
    os.kill(children[hanging], signal.SIGKILL)
    for child in children.values():
        os.waitpid(child, 0)


@pytest.mark.multiprocess
@both
def test_two_processes_share_a_search_and_a_kill_loses_one_trial(storage: str, tmp_path: Path):
    begun = tmp_path / "begun"
    done = subprocess.run(
        [sys.executable, __file__, storage, str(begun)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout, done.stderr  # of the process that should have ended the search
    status, penalty, rows = json.loads(done.stdout)
    assert (status, penalty) == ("params_only", 0.5)
    killed = int(begun.read_text())
    assert [row[1] for row in rows] == ["stopped" if n == killed else "complete" for n in range(6)]
    assert [row[2] for row in rows if row[2] is not None] == [killed]
    assert sorted(row[0] for row in rows if row[1] == "complete") == sorted(ALL)
    assert sum(row[3] for row in rows) == 5.5  # all trials, and half of one for nothing


# -- going on ------------------------------------------------------------------------------------


@both
def test_a_search_that_is_done_is_not_done_again(storage: str):
    found = tune(within, **LIMITS, storage=storage)
    assert statuses(found) == ["complete"] * 5

    def never(penalty: float, report: Report) -> None:
        raise AssertionError("trained again")

    assert tune(never, **LIMITS, storage=storage) == found


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_ends_the_search_queues_its_trial_again(storage: str, error: type[BaseException]):
    def stopped(penalty: float, report: Report) -> None:
        report(Reached(1, 0.5, 900, cost=0.5))
        if penalty == 4.0:
            raise error
        report(Reached(2, 0.5, 900, cost=1.0))

    with pytest.raises(error):
        tune(stopped, **LIMITS, storage=storage)
    repeats = []

    def resumed(penalty: float, report: Report) -> None:
        if report.repeats:
            repeats.append((penalty, report.number, report.repeats))
            report(Reached(1, 0.5, 900, cost=0.5), resumed=True)
        else:
            report(Reached(1, 0.5, 900, cost=0.5))
        report(Reached(2, 0.5, 900, cost=1.0))

    found = tune(resumed, **LIMITS, storage=storage)
    assert repeats == [(4.0, 2, (1,))]
    assert statuses(found) == ["complete", "stopped", *["complete"] * 4]
    assert penalties(found) == [8.0, 4.0, 4.0, 2.0, 1.0, 0.5]
    assert [trial.spent for trial in found.trials] == [1.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert found.cost == 5.0  # nothing was trained twice


def test_an_epoch_that_was_saved_but_not_reported_counts_once(storage: str):
    def killed(penalty: float, report: Report) -> None:
        report(Reached(1, 0.5, 900, cost=0.25))
        raise KeyboardInterrupt  # its second epoch was saved already

    with pytest.raises(KeyboardInterrupt):
        tune(killed, **LIMITS, storage=storage)

    def resumed(penalty: float, report: Report) -> None:
        if report.repeats:
            report(Reached(2, 0.5, 900, cost=0.5), resumed=True)
            if len(report.repeats) == 1:
                raise KeyboardInterrupt
        report(Reached(4, 0.5, 900, cost=1.0))

    with pytest.raises(KeyboardInterrupt):
        tune(resumed, **LIMITS, storage=storage)
    found = tune(resumed, **LIMITS, storage=storage)
    assert [trial.spent for trial in found.trials] == [0.25, 0.25, 0.5, *[1.0] * 4]


def test_a_trial_that_is_stopped_twice_knows_both_it_repeats(tmp_path: Path):
    storage = tmp_path / "search"

    def stopped(penalty: float, report: Report) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tune(stopped, **LIMITS, storage=storage)
    repeats = []

    def objective(penalty: float, report: Report) -> None:
        repeats.append(report.repeats)
        within(penalty, report)

    found = tune(objective, **LIMITS, storage=storage)
    assert repeats[0] == (2, 1, 0)
    assert penalties(found) == [8.0, 8.0, 8.0, *ALL]


@both
def test_tradeoffs_go_on_too(storage: str):
    def objective(penalty: float, lr: float, report: Report) -> None:
        if report.number == 2:
            raise KeyboardInterrupt
        report(Reached(1, lr, 100, int(100 / penalty), 1.0))

    limits: dict[str, Any] = {"trials": 4, "penalties": (0.1, 1.0), "rates": (0.1, 1.0)}
    with pytest.raises(KeyboardInterrupt):
        explore(objective, **limits, storage=storage)
    found = explore(objective, **limits, storage=storage)
    assert statuses(found) == ["complete", "complete", "stopped", "complete", "complete"]
    assert found.trials[3].again == 2
    assert (found.trials[3].penalty, found.trials[3].lr) == (
        found.trials[2].penalty,
        found.trials[2].lr,
    )


# -- the dead, and those who were only thought dead ----------------------------------------------


def begun(plan: _Halving | _Tradeoffs, storage: str) -> optuna.Study:
    """Open a search as those do who share it."""
    directions: list[Direction] = (
        ["maximize"] if isinstance(plan, _Halving) else ["maximize", "minimize"]
    )
    return open_study(storage, "lod", directions, plan.settings)


def elsewhere(storage: str, process: object = 1, *, here: bool = False, drawn: bool = True) -> Any:
    """Let another process begin the search; return its first trial, which runs."""
    plan = _Halving(few=0.5, **LIMITS)
    row = begun(plan, storage).ask()
    if drawn:
        plan.suggest(row)
    row.set_user_attr("owner", [_process_table() if here else "another machine", process])
    return row


def tell(row: Any, status: str, *, params: int, accuracy: float = 0.5) -> None:
    """Let the other process end its trial."""
    row.set_user_attr("reached", {"epoch": 1, "accuracy": accuracy, "params": params})
    row.set_user_attr("ended", status)
    row.study.tell(row, accuracy)


def take_over(storage: str, number: int) -> None:
    """Let another process think that a trial is dead."""
    plan = _Halving(few=0.5, **LIMITS)
    Worker(plan, within, begun(plan, storage))._queue_again(number)


def never_sleep(seconds: float) -> None:
    raise AssertionError("waited, though there was something to do")


def dead_process() -> str:
    """Return what the owner of a trial has written down that has ended since."""
    with subprocess.Popen(["sleep", "600"]) as process:
        owner = _alive(process.pid)
        process.kill()
    return str(owner)


@both
@pytest.mark.skipif(_process_table() is None, reason="this system does not list its processes")
@pytest.mark.parametrize("drawn", [True, False], ids=["in training", "before λ was drawn"])
def test_a_dead_process_of_this_machine_is_known_at_once(storage: str, drawn: bool):
    elsewhere(storage, dead_process(), here=True, drawn=drawn)
    found = tune(within, **LIMITS, storage=storage, sleep=never_sleep)
    assert statuses(found) == ["stopped", *["complete"] * 5]
    assert penalties(found)[1:] == ALL


@pytest.mark.skipif(_process_table() is None, reason="this system does not list its processes")
def test_a_killed_process_whose_parent_has_not_noticed_is_known_at_once(storage: str):
    process = subprocess.Popen(["sleep", "600"])
    try:
        elsewhere(storage, _alive(process.pid), here=True)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists()
        found = tune(within, **LIMITS, storage=storage, sleep=never_sleep)
    finally:
        process.wait()
    assert statuses(found) == ["stopped", *["complete"] * 5]


@pytest.mark.skipif(_process_table() is None, reason="this system does not list its processes")
def test_another_process_with_the_same_number_is_not_waited_for(storage: str):
    elsewhere(storage, f"{os.getpid()} 0", here=True)
    found = tune(within, **LIMITS, storage=storage, sleep=never_sleep)
    assert statuses(found) == ["stopped", *["complete"] * 5]


@pytest.mark.parametrize("known", [True, False], ids=["its number lives here", "or not"])
def test_a_process_of_another_machine_is_dead_once_it_shows_no_life(
    storage: str, known: bool, monkeypatch: pytest.MonkeyPatch
):
    elsewhere(storage, _alive(os.getpid()) if known else dead_process())
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        monkeypatch.setattr(worker_module, "_PATIENCE", 0.0)

    found = tune(within, **LIMITS, storage=storage, sleep=sleep)
    assert len(looks) == 1  # all others were done before, and then it was waited for
    assert statuses(found) == ["stopped", *["complete"] * 5]
    assert penalties(found) == [8.0, 4.0, 2.0, 1.0, 0.5, 8.0]


def test_a_process_that_shows_life_is_waited_for(storage: str, monkeypatch: pytest.MonkeyPatch):
    row = elsewhere(storage)
    monkeypatch.setattr(worker_module, "_PATIENCE", 0.0)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) < 5:
            row.set_user_attr("beat", len(looks))
            return
        tell(row, "satisfied", params=900, accuracy=0.95)

    def beating(penalty: float, report: Report) -> None:
        row.set_user_attr("beat", -penalty)
        within(penalty, report)

    found = tune(beating, **LIMITS, storage=storage, sleep=sleep)
    assert len(looks) == 5
    assert (found.status, found.penalty) == ("satisfied", 8.0)
    assert statuses(found) == ["satisfied", *["complete"] * 4]


def test_a_running_trial_shows_life(storage: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_module, "_BEAT", 0.001)

    def slow(penalty: float, report: Report) -> None:
        beats: set[int] = set()
        end = time.monotonic() + 60
        while len(beats) < 3 and time.monotonic() < end:
            beats |= {opened(storage).trials[report.number].user_attrs.get("beat", 0)}
        assert len(beats) == 3
        report(Reached(1, 0.95, 900))

    before = set(threading.enumerate())
    found = tune(slow, **LIMITS, storage=storage)
    assert statuses(found) == ["satisfied"]
    assert set(threading.enumerate()) <= before


def test_what_breaks_at_the_end_of_a_trial_leaves_it_to_no_one(tmp_path: Path):
    """An error after a trial was written down does not queue it again."""

    def watch(trial: Trial) -> None:
        if trial.status == "complete":
            raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError):
        tune(within, **LIMITS, storage=tmp_path / "search", watch=watch)
    found = tune(within, **LIMITS, storage=tmp_path / "search")
    assert penalties(found) == ALL


@both
@pytest.mark.parametrize("fails", [False, True], ids=["reports", "its files are gone"])
def test_one_who_was_thought_dead_leaves_its_trial_to_the_other(storage: str, fails: bool):
    ends = []

    def objective(penalty: float, report: Report) -> None:
        if report.number == 0:
            take_over(storage, 0)
            if fails:
                raise FileNotFoundError("trial-0")
        try:
            within(penalty, report)
        except Enough as enough:
            ends.append(enough.status)
            raise

    found = tune(objective, **LIMITS, storage=storage)
    assert ends == ([] if fails else ["stopped"])
    assert statuses(found) == ["stopped", *["complete"] * 5]
    assert penalties(found) == [8.0, *ALL]
    assert found.trials[0].reached is None


@both
def test_a_trial_that_two_have_queued_again_is_done_once(storage: str):
    elsewhere(storage)
    take_over(storage, 0)
    opened(storage).enqueue_trial({"penalty": 8.0}, user_attrs={"again": 0})
    found = tune(within, **LIMITS, storage=storage)
    assert statuses(found) == ["stopped", "complete", "over", *["complete"] * 4]
    assert penalties(found) == [8.0, 8.0, 8.0, 4.0, 2.0, 1.0, 0.5]


def test_one_who_is_killed_while_it_queues_another_again_loses_nothing(
    storage: str, monkeypatch: pytest.MonkeyPatch
):
    elsewhere(storage)
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "tell", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            take_over(storage, 0)
    monkeypatch.setattr(worker_module, "_PATIENCE", 0.0)
    found = tune(within, **LIMITS, storage=storage, sleep=never_sleep)
    assert statuses(found) == ["stopped", *["complete"] * 5]


# -- several at once -----------------------------------------------------------------------------


def test_a_trial_is_over_once_another_has_satisfied_the_search(storage: str):
    ends = []

    def objective(penalty: float, report: Report) -> None:
        if penalty == 8.0:  # meanwhile:
            tune(accurate_below(8.0), **LIMITS, storage=storage)
        try:
            within(penalty, report)
        except Enough as enough:
            ends.append(enough.status)
            raise

    found = tune(objective, **LIMITS, storage=storage)
    assert ends == ["over"]
    assert statuses(found) == ["over", "satisfied"]
    assert (found.status, found.penalty) == ("satisfied", 4.0)


def test_after_a_model_that_is_too_large_only_larger_lambdas_are_waited_for(tmp_path: Path):
    storage = str(tmp_path / "search")
    rows = [elsewhere(storage), elsewhere(storage)]

    def sleep(seconds: float) -> None:
        tell(rows.pop(), "complete", params=900)

    found = tune(too_large, **LIMITS, storage=storage, sleep=sleep)
    assert penalties(found) == [8.0, 4.0, 2.0]
    assert (found.status, found.penalty) == ("params_only", 4.0)
    assert rows == []


def test_a_trial_is_over_once_a_larger_lambda_has_given_too_large_a_model(tmp_path: Path):
    storage = str(tmp_path / "search")
    row = elsewhere(storage)

    def objective(penalty: float, report: Report) -> None:
        report(Reached(1, 0.5, 900))
        tell(row, "complete", params=2000)
        report(Reached(2, 0.5, 900))

    found = tune(objective, **LIMITS, storage=storage)
    assert statuses(found) == ["complete", "over"]
    assert found.status == "infeasible"


def too_large(penalty: float, report: Report) -> None:
    report(Reached(1, 0.5, 2000))


def test_of_two_who_find_a_model_in_the_same_moment_the_larger_lambda_is_chosen(tmp_path: Path):
    storage = tmp_path / "search"

    def objective(penalty: float, report: Report) -> None:
        if penalty == 8.0:
            tune(accurate_below(8.0), **LIMITS, storage=storage)
        report(Reached(1, 0.95, 900))

    found = tune(objective, **LIMITS, storage=storage)
    assert statuses(found) == ["satisfied", "satisfied"]
    assert found.penalty == 8.0


# -- the storage ---------------------------------------------------------------------------------


def test_a_search_is_only_continued_with_the_same_limits(storage: str):
    tune(within, **LIMITS, storage=storage, about={"model": "lenet"})
    with pytest.raises(OptionError) as refused:
        tune(within, **{**LIMITS, "max_params": 900}, storage=storage, about={"model": "lenet"})
    assert str(refused.value) == (
        f"the search 'lod' in storage {storage} has max_params=1000, not 900. Give the same to "
        "continue it, or another name or storage."
    )
    with pytest.raises(OptionError, match="has model=lenet, not vgg"):
        tune(within, **LIMITS, storage=storage, about={"model": "vgg"})
    with pytest.raises(OptionError, match="has model=lenet, not None"):
        tune(within, **LIMITS, storage=storage)
    with pytest.raises(OptionError, match="has search=halving, not trade-offs"):
        explore(_unused, trials=1, penalties=(0.1, 1.0), rates=(0.1, 1.0), storage=storage)
    assert statuses(tune(within, **LIMITS, storage=storage, name="other")) == ["complete"] * 5


def _unused(penalty: float, lr: float, report: Report) -> None:
    raise AssertionError("trained")


def test_a_search_that_another_process_begins_meanwhile_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, about = f"sqlite:///{tmp_path}/search.db", {"largest": 8.0}
    looked = optuna.Study.get_trials
    others: list[optuna.Study] = []

    def while_another_begins(study: optuna.Study, **options: Any) -> Any:
        if not others:  # this process has found nothing so far
            others.append(study)
            open_study(storage, "lod", ["maximize"], about).ask()
        return looked(study, **options)

    monkeypatch.setattr(optuna.Study, "get_trials", while_another_begins)
    assert len(open_study(storage, "lod", ["maximize"], about).trials) == 1


def test_a_study_of_others_is_refused(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/search.db"
    study = optuna.create_study(storage=url, study_name="lod")
    study.add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(OptionError, match="is not a search of lod"):
        tune(within, **LIMITS, storage=url)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file/search", "File exists"),
        (".", "Is a directory"),
        ("sqlite:///{}/nowhere/search.db", "unable to open database file"),
        ("nosuch://{}/x", "Can't load plugin"),
        ("postgresql://me:secret@localhost:1/x", "Failed to import DB access module"),
        ("sqlite:///{}/file", "file is not a database"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_one_clear_line(
    place: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_module, "_RETRY", 0.0)
    (tmp_path / "file").write_bytes(b"something else" * 100)
    where = place.format(tmp_path) if "://" in place else str(tmp_path / place)
    with pytest.raises(OptionError) as refused:
        tune(within, **LIMITS, storage=where)
    line = str(refused.value)
    assert line.startswith(f"storage {where.replace('secret', '…')} cannot be used (")
    assert reason in line
    assert "secret" not in line
    assert "\n" not in line
    assert line.endswith("Give a path, or the URL of a database, such as sqlite:///search.db.")


@pytest.mark.parametrize("content", [b"vm", b"vm\n", b"a\nb\n", b'{"a": 1}\n', b"\x00\xff"])
def test_a_file_of_others_is_refused_and_left_as_it_is(content: bytes, tmp_path: Path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(OptionError, match=r"not a journal of Optuna"):
        tune(within, **LIMITS, storage=tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["device", "pipe", "huge", "journal with a huge end"])
def test_what_cannot_be_a_journal_is_never_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise AssertionError("it is read, or its lock is waited for")

    for name in ("_mend", "_lock_on"):
        monkeypatch.setattr(storage_module, name, refuse)
    path = Path("/dev/zero") if kind == "device" else tmp_path / "search"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind != "device":
        path.write_bytes(b'{"op_code":0}\n' if kind.startswith("journal") else b"")
        os.truncate(path, 2**30 + 1)
    reason = "not a regular file" if kind in ("device", "pipe") else "more than any journal"
    with pytest.raises(OptionError, match=reason):
        tune(within, **LIMITS, storage=path)


def changed(storage: str, *commands: str) -> None:
    with closing(sqlite3.connect(storage.removeprefix("sqlite:///"))) as database, database:
        for command in commands:
            database.execute(command)


DAMAGE = {
    "what trials have reached": (
        "DELETE FROM trial_user_attributes",
        r"trial 0 of the search is damaged \(it has ended, but how was not recorded\)",
    ),
    "λ is no number": (
        "UPDATE trial_params SET param_value = 'NaN'",
        r"trial 0 of the search is damaged",
    ),
    "λ is infinite": (
        "UPDATE trial_params SET param_value = 9e999",
        r"trial 0 of the search is damaged \(λ=inf\)",
    ),
    "a λ is gone": (
        "UPDATE trial_params SET param_value = 4.0 WHERE trial_id = 1",
        r"none of its 5 trials is left to do, and some settings were never tried",
    ),
    "it repeats itself": (
        "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (2, 'again', '1')",
        r"trial 1 of the search is damaged \(it repeats trial 1\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("storage", ["sqlite"], indirect=True)
def test_a_damaged_search_is_refused_and_not_waited_for(storage: str, damage: str):
    tune(within, **LIMITS, storage=storage)
    command, refusal = DAMAGE[damage]
    changed(storage, command)

    def refuse(_: float) -> None:
        raise AssertionError("it waits")

    with pytest.raises(OptionError, match=refusal):
        tune(within, **LIMITS, storage=storage, sleep=refuse)


def test_half_a_line_at_the_end_of_a_journal_is_cut_off(tmp_path: Path):
    path = tmp_path / "search"

    def stopped(penalty: float, report: Report) -> None:
        if penalty == 2.0:
            raise KeyboardInterrupt
        within(penalty, report)

    with pytest.raises(KeyboardInterrupt):
        tune(stopped, **LIMITS, storage=path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":8,"worker')
    found = tune(within, **LIMITS, storage=path)
    assert path.read_bytes().startswith(whole + b'{"op_code":')
    assert [t.penalty for t in found.trials if t.status == "complete"] == ALL


def test_a_lock_that_a_killed_process_left_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where the system has no locks, a file says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage_module, "_STUCK", 3)
    monkeypatch.setattr(files, "fcntl", None)
    killed = storage_module._opened("deep/search.journal")
    assert isinstance(killed, optuna.storages.JournalStorage)
    killed._backend._lock.acquire()
    found = tune(within, **LIMITS, storage="deep/search.journal")
    assert [t.penalty for t in found.trials] == ALL
    assert [path.name for path in Path("deep").iterdir()] == ["search.journal"]


HOLDING = """
import os, signal, sys
from maestro_lod.cli.tuning.storage import _opened
_opened(sys.argv[1])._backend._lock.acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_while_it_writes_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_module, "_STUCK", 10**6)  # nothing is broken by waiting
    path = tmp_path / "search.journal"
    done = subprocess.run([sys.executable, "-c", HOLDING, path], check=False)
    assert done.returncode == -signal.SIGKILL
    found = tune(within, **LIMITS, storage=path)
    assert [t.penalty for t in found.trials] == ALL
    assert [path.name for path in tmp_path.iterdir()] == ["search.journal"]


def test_a_storage_that_is_lost_on_the_way_is_one_line(tmp_path: Path):
    database = tmp_path / "search.db"

    def objective(penalty: float, report: Report) -> None:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("DROP TABLE trial_user_attributes")
        within(penalty, report)

    with pytest.raises(TrainingError) as lost:
        tune(objective, **LIMITS, storage=f"sqlite:///{database}")
    assert re.fullmatch(
        r"the storage of the search cannot be used any more \(.*\)\. Make it available and start "
        r"the search again: it continues with all finished trials\.",
        str(lost.value),
    )


@both
def test_nothing_is_unpickled(storage: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    tune(within, **LIMITS, storage=storage)
    assert tune(within, **LIMITS, storage=storage).status == "params_only"
    limits: dict[str, Any] = {"trials": 12, "penalties": (0.1, 1.0), "rates": (0.1, 1.0)}

    def objective(penalty: float, lr: float, report: Report) -> None:
        report(Reached(1, lr, 100, int(100 / penalty)))

    explore(objective, **limits, storage=storage, name="trade-offs")


@both
def test_optuna_says_nothing_and_keeps_its_own_settings(
    storage: str, capfd: pytest.CaptureFixture[str]
):
    before = optuna.logging.get_verbosity()
    tune(within, **LIMITS, storage=storage)
    assert optuna.logging.get_verbosity() == before
    assert capfd.readouterr() == ("", "")


if __name__ == "__main__":
    main(sys.argv[1])
