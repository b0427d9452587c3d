"""What came out of a search: all of its trials, and which of them to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from maestro_lod.cli.tuning.trials import Trial
from maestro_lod.text import table


@dataclass(frozen=True)
class _Outcome:
    """All trials of a search, and what came out."""

    trials: tuple[Trial, ...]

    @property
    def cost(self) -> float:
        """MACs spent on all trials, in units of one whole training of the dense model."""
        return sum(trial.spent for trial in self.trials)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        raise NotImplementedError

    def __str__(self) -> str:
        spent = f"All trials together cost {self.cost:.2f}× one training of the dense model."
        return f"{_table(self.trials)}\n\n{self.verdict} {spent}"


@dataclass(frozen=True)
class Tuned(_Outcome):
    """How a search for a model within constraints ended, and all of its trials."""

    status: Literal["satisfied", "params_only", "infeasible"]
    chosen: Trial | None
    """Satisfied: the trial that met both constraints; params_only: the last within `max_params`."""
    max_params: int
    min_accuracy: float

    @property
    def penalty(self) -> float | None:
        """λ of the chosen trial."""
        return None if self.chosen is None else self.chosen.penalty

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        goal = f"accuracy ≥ {self.min_accuracy:.2%} within {self.max_params:,} params"
        if self.chosen is not None and (at := self.chosen.reached) is not None:
            shown = f"trial {self.chosen.number} (λ={self.chosen.penalty:.4g})"
            found = f"accuracy {at.accuracy:.2%}, {at.params:,} params"
            if self.status == "satisfied":
                return f"satisfied: {shown} has {goal}: {found}."
            return f"params only: no trial has {goal}; {shown} is the last within params: {found}."
        tried = [trial for trial in self.trials if trial.ended]
        sizes = [t.reached.params for t in tried if t.reached and t.status != "failed"]
        if not sizes:
            return f"infeasible: every trial failed, the last with: {tried[-1].reason}"
        largest = max(t.penalty for t in tried if t.penalty is not None)
        return (
            f"infeasible: no trial has {goal}; the fewest params were {min(sizes):,}. Start from a "
            f"λ larger than {largest:.4g}, or allow more params."
        )


@dataclass(frozen=True)
class Front(_Outcome):
    """The trials that no other beats in both accuracy and MACs, and all trials."""

    best: tuple[Trial, ...]
    """From the fewest MACs to the most."""

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        if not self.best:
            return "no trial was completed."
        numbers = ", ".join(str(trial.number) for trial in self.best)
        return f"from the smallest to the most accurate, none is beaten in both: trials {numbers}."


def _table(trials: Sequence[Trial]) -> str:
    """Lay out trials, one to a row; columns without any entry are left out."""
    header = ["trial", "λ", "lr", "epoch", "accuracy", "params", "MACs", "cost", "ended", "where"]
    rows = [[str(t.number), *_cells(t), t.status, t.where] for t in trials]
    used = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    return table(
        [header[i] for i in used],
        [[row[i] for i in used] for row in rows],
        right=[place for place, i in enumerate(used) if header[i] not in ("ended", "where")],
    )


def _cells(trial: Trial) -> list[str]:
    cells = ["" if value is None else f"{value:.4g}" for value in (trial.penalty, trial.lr)]
    if (at := trial.reached) is None:
        return [*cells, "", "", "", "", ""]
    macs = "" if at.macs is None else f"{at.macs:,}"
    cost = f"{trial.spent:.2f}×"
    return [*cells, str(at.epoch), f"{at.accuracy:.2%}", f"{at.params:,}", macs, cost]
