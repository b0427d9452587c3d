"""One process's part of a search: it does trials until the outcome is certain.

A process that was killed leaves its trial behind without a sign of life; another one queues that
trial again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.exceptions import OptunaError, StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from maestro_lod.cli.tuning.storage import first_line
from maestro_lod.cli.tuning.trials import (
    Enough,
    Reached,
    Report,
    Status,
    Trial,
    earlier,
    trials_of,
)
from maestro_lod.errors import OptionError, TrainingError

_LOOK = 1.0  # seconds between two looks at the trials of others, where nothing else is to do
_BEAT = 30.0  # seconds between two signs of life of a running trial
_PATIENCE = 300.0  # seconds without one, after which a trial counts as dead


class Strategy(Protocol):
    """Which settings a trial gets, when it ends, and when the search does."""

    @property
    def settings(self) -> dict[str, Any]:
        """What all who share a search must agree on."""

    def suggest(self, row: optuna.Trial) -> tuple[float, ...]:
        """Draw the settings of a trial, in the order in which the objective takes them."""

    def ends(self, reached: Reached) -> Status | None:
        """Say how a trial ends at this place, if it does."""

    def values(self, reached: Reached) -> list[float]:
        """Return the accuracy to maximize and, where MACs are to be saved too, those."""

    def needless(self, trial: Trial, trials: Sequence[Trial]) -> bool:
        """Say whether a trial cannot change the outcome any more."""

    def more(self, trials: Sequence[Trial]) -> bool:
        """Say whether there are trials that nobody has asked for."""

    def done(self, trials: Sequence[Trial]) -> bool:
        """Say whether the outcome is certain."""


@dataclass
class Worker:
    """This process's part of a search."""

    strategy: Strategy
    objective: Callable[..., object]
    study: optuna.Study
    watch: Callable[[Trial], None] = lambda trial: None
    sleep: Callable[[float], None] = time.sleep
    _signs: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """The last sign of life of each running trial, and when we first saw it."""

    def run(self) -> list[Trial]:
        """Do trials until the search is done, and return all of them."""
        try:
            while True:
                self._queue_dead_again()
                trials = trials_of(self.study)
                if self.strategy.done(trials):
                    return trials
                statuses = {trial.status for trial in trials}
                if self.strategy.more(trials) or "waiting" in statuses:
                    self._do_one()
                elif "running" in statuses:
                    self.sleep(_LOOK)
                else:
                    raise OptionError(
                        f"the search is damaged: none of its {len(trials)} trials is left to do, "
                        "and some settings were never tried. Begin another search: give another "
                        "storage or name."
                    )
        except StorageInternalError as error:
            raise TrainingError(
                f"the search's storage can no longer be used ({first_line(error)}). What was "
                "learnt is in it: start again once it can be reached, and the search goes on."
            ) from error

    def _do_one(self) -> None:
        row = self.study.ask()
        try:
            with _signs_of_life(row):
                self._do(row)
        except BaseException:
            with suppress(OptunaError, OSError):  # what was raised first is what matters
                self._queue_again(row.number)
            raise

    def _do(self, row: optuna.Trial) -> None:
        given = self.strategy.suggest(row)
        trials = trials_of(self.study)
        trial, before = trials[row.number], trials[: row.number]
        # two who found a dead trial in the same moment have both queued it
        twice = trial.again is not None and any(t.again == trial.again for t in before)
        if twice or self.strategy.needless(trial, trials):
            self._end(row, "over")
            return
        self.watch(trial)
        report = Report(row, earlier(trial, trials), self._judge)
        status, reason = self._outcome(report, given)
        self._end(row, status, reason, report.last)
        self.watch(trials_of(self.study)[row.number])

    def _outcome(self, report: Report, given: tuple[float, ...]) -> tuple[Status, str]:
        """Run the objective and say how it ended; what has to end the search too is raised."""
        try:
            self.objective(*given, report)
            if report.last is None:
                raise OptionError("the objective has ended without a report of what it reached.")
        except Enough as enough:
            return enough.status, ""
        except TrainingError as error:
            return "failed", str(error)
        except StorageInternalError:
            raise
        except Exception:
            if trials_of(self.study)[report.number].status == "stopped":
                return "stopped", ""  # another took over, and moved the files away from under us
            raise
        return "complete", ""

    def _judge(self, number: int, reached: Reached) -> Status | None:
        status = self.strategy.ends(reached)
        if status == "satisfied":
            return status
        trials = trials_of(self.study)
        return "over" if self.strategy.needless(trials[number], trials) else status

    def _end(
        self, row: optuna.Trial, status: Status, reason: str = "", reached: Reached | None = None
    ) -> None:
        if status == "stopped":  # by another, who has written it down
            return
        state, values = TrialState.COMPLETE, None
        if status in ("failed", "over"):
            state = TrialState.FAIL if status == "failed" else TrialState.PRUNED
        else:
            assert reached is not None
            values = self.strategy.values(reached)
        with suppress(UpdateFinishedTrialError):  # another took over just now
            row.set_user_attr("reason", reason)
            row.set_user_attr("ended", status)
            self.study.tell(row, values, state, skip_if_finished=True)

    # -- trials whose process has gone -----------------------------------------------------------

    def _queue_dead_again(self) -> None:
        for row in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._dead(row):
                self._queue_again(row.number)

    def _queue_again(self, number: int) -> None:
        """Stop a trial and queue its settings; safe if several do it, or one is killed halfway."""
        trials = trials_of(self.study)
        trial = trials[number]
        if trial.status != "running":
            return
        if all(other.again != number for other in trials):
            settings = {"penalty": trial.penalty, "lr": trial.lr}
            known = {key: value for key, value in settings.items() if value is not None}
            self.study.enqueue_trial(known, user_attrs={"again": number})
        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _dead(self, row: FrozenTrial) -> bool:
        """Say whether a trial's process is known to have ended, or has long shown no sign of life.

        Signs are compared with each other and timed by our own clock: clocks of others may be off.
        """
        notes, now = row.user_attrs, time.monotonic()
        processes, process = notes.get("owner", (None, None))
        if processes is not None and processes == _process_table() and process != _alive(process):
            return True
        sign = process, notes.get("beat"), notes.get("reached")
        before, since = self._signs.get(row.number, (None, now))
        if sign != before:
            self._signs[row.number] = sign, now
            return False
        return now - since >= _PATIENCE


def _process_table() -> str | None:
    """Name the table that our process id belongs to; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _alive(process: object) -> str | None:
    """Return a process's number and when it began, so that no other one is taken for it.

    None if it has ended, even if its parent has not asked how: then the system still lists it.
    """
    number = str(process).split()[0]
    try:
        state, *others = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else f"{number} {others[18]}"


@contextmanager
def _signs_of_life(row: optuna.Trial) -> Iterator[None]:
    """Write down whose trial it is, and from time to time that we live."""
    finished = threading.Event()

    def beat() -> None:
        for number in count(1):
            if finished.wait(_BEAT):
                return
            with suppress(OptunaError, OSError):  # if it lasts, the next report meets it too
                row.set_user_attr("beat", number)

    row.set_user_attr("owner", [_process_table(), _alive(os.getpid())])
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
