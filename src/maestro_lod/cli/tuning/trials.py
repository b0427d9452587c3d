"""Trials of a search that several processes share, as rows of an Optuna study."""

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
"""`over`: no longer needed. `stopped`: killed or interrupted, and repeated by another trial."""


@dataclass(frozen=True)
class Reached:
    """State of a training at the end of an epoch.

    Args:
        epoch: Number of finished epochs.
        accuracy: Accuracy on validation data.
        params: Parameters of the deployed model, each layer in its smallest form.
        macs: MACs of the deployed model; only `explore` needs them.
        cost: MACs spent on the training so far, relative to one dense training.
    """

    epoch: int
    accuracy: float
    params: int
    macs: int | None = None
    cost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epoch", "params", "macs"):
            if name != "macs" or self.macs is not None:
                require_whole(name, getattr(self, name))
        for name in ("accuracy", "cost"):
            if not isinstance(value := getattr(self, name), Real):
                raise OptionError(f"{name}={value!r} must be a number.")


@dataclass(frozen=True)
class Trial:
    """One trial of a search, as its storage describes it."""

    number: int
    status: Status
    penalty: float | None
    lr: float | None
    reached: Reached | None
    spent: float
    """Like `Reached.cost`, without the cost of the earlier trial that this one resumed."""
    where: str
    reason: str
    again: int | None
    """The stopped trial that this one repeats."""

    @classmethod
    def of(cls, row: FrozenTrial) -> Trial:
        """Read a trial off its row, and raise OptionError if no search can have written it."""
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
        """True if the settings of the trial have been tried."""
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
    """Return the error for a trial that no search can have written."""
    return OptionError(
        f"trial {number} of the search is damaged ({why}). Begin another search: give another "
        "storage or name."
    )


def trials_of(study: optuna.Study) -> list[Trial]:
    """Return all trials of a search by number; raise OptionError if they are inconsistent."""
    trials = [Trial.of(row) for row in study.get_trials(deepcopy=False)]
    repeated = {trial.again for trial in trials}
    for trial in trials:
        if trial.status == "stopped" and trial.number not in repeated:
            raise damaged(trial.number, "it has ended, but how was not recorded")
    return trials


def earlier(trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """Return the stopped trials that a trial repeats, last one first."""
    repeated = []
    while trial.again is not None:
        trial = trials[trial.again]
        repeated.append(trial)
    return repeated


class Enough(Exception):
    """Raised by a report to end its trial; an objective must not catch it."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class Report:
    """Reports the epochs of a trial to the search; raises `Enough` to end the trial."""

    def __init__(
        self,
        row: optuna.Trial,
        repeats: Sequence[Trial],
        judge: Callable[[int, Reached], Status | None],
    ) -> None:
        self.number: int = row.number
        self.repeats = tuple(trial.number for trial in repeats)
        """The stopped trials that this one repeats, last one first."""
        self._known = max((t.reached.cost for t in repeats if t.reached is not None), default=0.0)
        self.last: Reached | None = None
        self._row, self._judge = row, judge

    def __call__(self, reached: Reached, *, resumed: bool = False) -> None:
        """Report the end of an epoch, or the state of the earlier trial that this one resumes."""
        self.last = reached
        if resumed:
            # a trial may be killed after it saved an epoch and before it reported it
            self._write("resumed", min(reached.cost, self._known))
        self._write("reached", asdict(reached))
        if (status := self._judge(self.number, reached)) is not None:
            raise Enough(status)

    def note(self, where: str) -> None:
        """Record the place of the trial's model."""
        self._write("where", where)

    def _write(self, key: str, value: Any) -> None:
        try:
            self._row.set_user_attr(key, value)
        except (
            UpdateFinishedTrialError
        ):  # another process took this one for dead and repeats the trial
            raise Enough("stopped") from None
