"""Worker of a search: run trials until the outcome is certain.

A trial whose process was killed is queued again by another worker. Optuna's own heartbeats do that
in databases only, not in the journal of a shared folder, and lose the trial if the process that
queues it is killed between two writes.
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

_LOOK = 1.0  # seconds between two looks at the trials of other processes
_BEAT = 30.0  # seconds between two heartbeats of a running trial
_PATIENCE = 300.0  # seconds without a heartbeat, after which a trial counts as dead


class Strategy(Protocol):
    """Rules of a search: settings of a trial, end of a trial, end of the search."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that all processes of a search must share."""

    def suggest(self, row: optuna.Trial) -> tuple[float, ...]:
        """Return the settings of a trial, in the order of the objective's arguments."""

    def ends(self, reached: Reached) -> Status | None:
        """Return the status with which a trial ends here; None if it continues."""

    def values(self, reached: Reached) -> list[float]:
        """Return the accuracy to maximize and, in a search for trade-offs, the MACs."""

    def needless(self, trial: Trial, trials: Sequence[Trial]) -> bool:
        """Return True if a trial can no longer change the outcome."""

    def more(self, trials: Sequence[Trial]) -> bool:
        """Return True if there are trials left to start."""

    def done(self, trials: Sequence[Trial]) -> bool:
        """Return True if the outcome is certain."""


@dataclass
class Worker:
    """One process of a search."""

    strategy: Strategy
    objective: Callable[..., object]
    study: optuna.Study
    watch: Callable[[Trial], None] = lambda trial: None
    sleep: Callable[[float], None] = time.sleep
    _last_beats: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """Last heartbeat of each running trial, and the time at which this process first saw it."""

    def run(self) -> list[Trial]:
        """Run trials until the search is done, and return all of them."""
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
                f"the storage of the search cannot be used any more ({first_line(error)}). Make it "
                "available and start the search again: it continues with all finished trials."
            ) from error

    def _do_one(self) -> None:
        row = self.study.ask()
        try:
            with _heartbeats(row):
                self._do(row)
        except BaseException:
            with suppress(OptunaError, OSError):  # the first error is the one to raise
                self._queue_again(row.number)
            raise

    def _do(self, row: optuna.Trial) -> None:
        given = self.strategy.suggest(row)
        trials = trials_of(self.study)
        trial, before = trials[row.number], trials[: row.number]
        # two processes that found a dead trial at the same time have both queued it
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
        """Run the objective and return its status and reason; raise what ends the search too."""
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
                return "stopped", ""  # another process took over the trial and its files
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
        if status == "stopped":  # by another process, which has recorded it
            return
        state, values = TrialState.COMPLETE, None
        if status in ("failed", "over"):
            state = TrialState.FAIL if status == "failed" else TrialState.PRUNED
        else:
            assert reached is not None
            values = self.strategy.values(reached)
        with suppress(UpdateFinishedTrialError):  # another process has just taken over
            row.set_user_attr("reason", reason)
            row.set_user_attr("ended", status)
            self.study.tell(row, values, state, skip_if_finished=True)

    # -- trials whose process has gone -----------------------------------------------------------

    def _queue_dead_again(self) -> None:
        for row in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._dead(row):
                self._queue_again(row.number)

    def _queue_again(self, number: int) -> None:
        """Stop a trial and queue its settings; safe with several processes and against kills."""
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
        """Return True if the process of a trial has ended, or has sent no heartbeat for long.

        Heartbeats are timed by the clock of this process: clocks of other machines may be wrong.
        """
        notes, now = row.user_attrs, time.monotonic()
        processes, process = notes.get("owner", (None, None))
        if processes is not None and processes == _process_table() and process != _alive(process):
            return True
        sign = process, notes.get("beat"), notes.get("reached")
        before, since = self._last_beats.get(row.number, (None, now))
        if sign != before:
            self._last_beats[row.number] = sign, now
            return False
        return now - since >= _PATIENCE


def _process_table() -> str | None:
    """Return an id of the process table of this process; None if the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _alive(process: object) -> str | None:
    """Return the number and start time of a process; None if it has ended or is a zombie."""
    number = str(process).split()[0]
    try:
        state, *others = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else f"{number} {others[18]}"


@contextmanager
def _heartbeats(row: optuna.Trial) -> Iterator[None]:
    """Record the process of a trial, and heartbeats while it runs."""
    finished = threading.Event()

    def beat() -> None:
        for number in count(1):
            if finished.wait(_BEAT):
                return
            with suppress(OptunaError, OSError):  # if it lasts, the next report fails too
                row.set_user_attr("beat", number)

    row.set_user_attr("owner", [_process_table(), _alive(os.getpid())])
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
