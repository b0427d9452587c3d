"""Trials that several processes share, as rows of an Optuna study.

Whoever opens the same storage works on the same search: each process asks for the next trial,
trains, and writes down what came out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from maestro_lod.errors import OptionError, require_whole

Status: TypeAlias = Literal[
    "waiting", "running", "satisfied", "too sparse", "complete", "failed", "over", "stopped"
]
"""`over`: no longer needed. `stopped`: killed or interrupted, and queued again as another trial."""


@dataclass(frozen=True)
class Reached:
    """What a model in training has reached at the end of an epoch."""

    epoch: int
    accuracy: float
    """On validation data."""
    params: int
    """Of the deployed model, each layer dense or factored, whichever is cheaper."""
    macs: int | None = None
    cost: float = 0.0
    """MACs spent on it so far, in units of one whole training of the dense model."""

    def __post_init__(self) -> None:
        for name in ("epoch", "params", "macs"):
            if name != "macs" or self.macs is not None:
                require_whole(name, getattr(self, name))
        for name in ("accuracy", "cost"):
            if not isinstance(value := getattr(self, name), Real):
                raise OptionError(f"{name}={value!r} must be a number.")


@dataclass(frozen=True)
class Trial:
    """One trial of a search, as its storage knows it."""

    number: int
    status: Status
    penalty: float | None
    lr: float | None
    reached: Reached | None
    spent: float
    """Like `Reached.cost`, without what an earlier trial had spent that this one continued."""
    where: str
    reason: str
    again: int | None
    """The stopped trial that this one repeats."""

    @classmethod
    def of(cls, row: FrozenTrial) -> Trial:
        """Read a trial off its row, and refuse one that no search has written so."""
        try:
            trial = cls._of(row)
            trial._require_possible()
        except (TypeError, ValueError, AttributeError) as error:
            raise damaged(row.number, str(error)) from error
        return trial

    def _require_possible(self) -> None:
        if self.status not in get_args(Status) or (self.ended and self.penalty is None):
            raise ValueError(f"{self.status} with λ={self.penalty}")
        for name, value in (("λ", self.penalty), ("lr", self.lr)):
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value}")
        if self.again is not None and not 0 <= self.again < self.number:
            raise ValueError(f"it repeats trial {self.again}")

    @classmethod
    def _of(cls, row: FrozenTrial) -> Trial:
        notes = row.user_attrs
        reached = Reached(**notes["reached"]) if "reached" in notes else None
        status: Status = "stopped"
        if not row.state.is_finished():
            status = "waiting" if row.state == TrialState.WAITING else "running"
        elif "ended" in notes:
            status = notes["ended"]
        return cls(
            number=row.number,
            status=status,
            penalty=row.params.get("penalty"),
            lr=row.params.get("lr"),
            reached=reached,
            spent=0.0 if reached is None else reached.cost - notes.get("resumed", 0.0),
            where=notes.get("where", ""),
            reason=notes.get("reason", ""),
            again=notes.get("again"),
        )

    @property
    def ended(self) -> bool:
        """Whether its settings have been tried, for better or worse."""
        return self.status in ("satisfied", "too sparse", "complete", "failed")

    def __str__(self) -> str:
        settings = "" if self.penalty is None else f" with λ={self.penalty:.4g}"
        settings += "" if self.lr is None else f", lr={self.lr:.3g}"
        line = f"trial {self.number}{settings}: {self.status}"
        if self.reached is not None:
            at = self.reached
            line += f" at epoch {at.epoch}, accuracy {at.accuracy:.2%}, {at.params:,} params"
        return f"{line} ({self.reason})" if self.reason else line


def damaged(number: int, why: str) -> OptionError:
    return OptionError(
        f"trial {number} of the search is damaged ({why}). Begin another search: give another "
        "storage or name."
    )


def trials_of(study: optuna.Study) -> list[Trial]:
    """Return all trials of a search, by number; each that was stopped is repeated by another."""
    trials = [Trial.of(row) for row in study.get_trials(deepcopy=False)]
    repeated = {trial.again for trial in trials}
    for trial in trials:
        if trial.status == "stopped" and trial.number not in repeated:
            raise damaged(trial.number, "it has ended, but how was not recorded")
    return trials


def earlier(trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """Return the stopped trials that a trial repeats, the last one first."""
    repeated = []
    while trial.again is not None:
        trial = trials[trial.again]
        repeated.append(trial)
    return repeated


class Enough(Exception):
    """What a report raises where its trial should end; an objective must let it pass."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class Report:
    """Tells a search what a trial has reached; raises `Enough` where the trial should end."""

    def __init__(
        self,
        row: optuna.Trial,
        repeats: Sequence[Trial],
        judge: Callable[[int, Reached], Status | None],
    ) -> None:
        self.number: int = row.number
        self.repeats = tuple(trial.number for trial in repeats)
        """The stopped trials that this one repeats, the last one first."""
        self._known = max((t.reached.cost for t in repeats if t.reached is not None), default=0.0)
        self.last: Reached | None = None
        self._row, self._judge = row, judge

    def __call__(self, reached: Reached, *, resumed: bool = False) -> None:
        """Report the end of an epoch, or where an earlier trial had come that this one resumes."""
        self.last = reached
        if resumed:
            # a trial may be killed after it saved an epoch and before it reported it
            self._write("resumed", min(reached.cost, self._known))
        self._write("reached", asdict(reached))
        if (status := self._judge(self.number, reached)) is not None:
            raise Enough(status)

    def note(self, where: str) -> None:
        """Write down where the model of this trial can be found, for people."""
        self._write("where", where)

    def _write(self, key: str, value: Any) -> None:
        try:
            self._row.set_user_attr(key, value)
        except UpdateFinishedTrialError:  # we were thought dead, and another one took over
            raise Enough("stopped") from None
