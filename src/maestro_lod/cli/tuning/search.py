"""Search λ: by the paper's algorithm for a model within limits, or for the best trade-offs."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.samplers import TPESampler

from maestro_lod.cli.tuning.storage import Storage, open_study
from maestro_lod.cli.tuning.trials import (
    Reached,
    Report,
    Status,
    Trial,
    earlier,
    trials_of,
)
from maestro_lod.cli.tuning.worker import Worker
from maestro_lod.errors import OptionError, require_nonnegative, require_whole
from maestro_lod.text import table


@dataclass(frozen=True)
class _Outcome:
    """All trials of a search."""

    trials: tuple[Trial, ...]

    @property
    def cost(self) -> float:
        """MACs spent on all trials, relative to one training of the dense model."""
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
    """Result of a search for a model within limits."""

    status: Literal["satisfied", "params_only", "infeasible"]
    chosen: Trial | None
    """`satisfied`: the trial that met both limits; `params_only`: the last within `max_params`."""
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
        return f"best trade-offs, from the smallest to the most accurate: trials {numbers}."


def _table(trials: Sequence[Trial]) -> str:
    """Return trials as a table without empty columns."""
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


def tune(
    objective: Callable[[float, Report], object],
    *,
    max_params: int,
    min_accuracy: float,
    largest: float,
    smallest: float,
    few: float = 0.5,
    storage: Storage | None = None,
    name: str = "lod",
    about: Mapping[str, Any] | None = None,
    watch: Callable[[Trial], None] = lambda trial: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Tuned:
    """Halve λ from `largest` to `smallest` until a model meets both limits (Algorithm 2).

    A trial ends at the first epoch that meets both limits, or whose model has fewer than `few` ×
    `max_params` params. The search ends with a trial that meets both, or with one that ends above
    `max_params`: a smaller λ would only give larger models.

    Args:
        objective: Called as `objective(penalty, report)`; trains one model and calls
            `report(Reached(…))` after each epoch, which raises where the trial ends. A
            `TrainingError` ends its trial; any other exception ends the search, and the trial is
            queued again.
        max_params: Largest number of parameters.
        min_accuracy: Least accuracy on validation data.
        largest: The first λ.
        smallest: The bound of the last λ.
        few: Share of `max_params` below which a trial ends as too sparse.
        storage: A path, or the URL of a database; in memory if None. Processes with the same
            storage and name share the search, and a search that was stopped continues.
        name: Name of the search in the storage.
        about: Description of what is trained; a search with another one is refused.
        watch: Called with each trial that starts or ends here.
        sleep: Called while other processes run the last trials.

    Returns:
        All trials, and the chosen one.

    Raises:
        OptionError: If the limits make no sense, or the storage has a search with other settings.
        TrainingError: If the storage can no longer be used.

    Example:
    >>> def objective(penalty, report):
    ...     model = …  # the same initial weights in every trial
    ...     for epoch in range(epochs):
    ...         …
    ...         report(Reached(epoch + 1, accuracy, params, macs, cost))
    >>> found = tune(objective, max_params=12_000, min_accuracy=0.98, largest=1e-2, smallest=1e-5)

    """
    strategy = _Halving(max_params, min_accuracy, largest, smallest, few)
    agreed = {**strategy.settings, **(about or {})}
    study = open_study(storage, name, ["maximize"], agreed)
    return strategy.result(Worker(strategy, objective, study, watch, sleep).run())


def explore(
    objective: Callable[[float, float, Report], object],
    *,
    trials: int,
    penalties: tuple[float, float],
    rates: tuple[float, float],
    seed: int = 0,
    storage: Storage | None = None,
    name: str = "lod",
    about: Mapping[str, Any] | None = None,
    watch: Callable[[Trial], None] = lambda trial: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Front:
    """Search λ and the learning rate for high accuracy at few MACs, with Optuna's TPE sampler.

    The same call with more `trials` extends the search.

    Args:
        objective: Called as `objective(penalty, lr, report)`, as for `tune`.
        trials: Number of trials.
        penalties: The smallest and the largest λ.
        rates: The smallest and the largest learning rate.
        seed: Seed of the sampler.
        storage: As for `tune`.
        name: As for `tune`.
        about: As for `tune`.
        watch: As for `tune`.
        sleep: As for `tune`.

    Returns:
        All trials, and those that no other beats in both accuracy and MACs.

    Raises:
        OptionError: As for `tune`; also if the objective reports no MACs.
        TrainingError: As for `tune`.
    """
    strategy = _Tradeoffs(trials, penalties, rates, seed)
    study = open_study(
        storage, name, ["maximize", "minimize"], {**strategy.settings, **(about or {})}
    )
    done = Worker(strategy, objective, study, watch, sleep).run()
    best = {row.number for row in study.best_trials}
    front = sorted((trial for trial in done if trial.number in best), key=_macs)
    return Front(tuple(done), tuple(front))


class _Halving:
    """Algorithm 2 of the paper: the k-th new trial gets largest / 2^k."""

    def __init__(
        self, max_params: int, min_accuracy: float, largest: float, smallest: float, few: float
    ) -> None:
        if require_whole("max_params", max_params) == 0:
            raise OptionError("max_params=0 must be at least 1.")
        if not 0.0 < min_accuracy <= 1.0:
            hint = f" Did you mean {min_accuracy / 100}?" if 1.0 < min_accuracy <= 100.0 else ""
            raise OptionError(f"min_accuracy={min_accuracy} must be above 0 and at most 1.{hint}")
        if not 0.0 <= few < 1.0:
            raise OptionError(f"few={few} must be a share of max_params, in [0, 1).")
        _require_range("smallest", smallest, "largest", largest)
        self.max_params, self.min_accuracy, self.few = max_params, min_accuracy, few
        halvings = math.floor(math.log2(largest / smallest) + 1e-9)
        self.penalties = [math.ldexp(largest, -k) for k in range(halvings + 1)]
        self.settings = {
            "search": "halving",
            "max_params": max_params,
            "min_accuracy": min_accuracy,
            "largest": largest,
            "smallest": smallest,
            "few": few,
        }

    def suggest(self, row: optuna.Trial) -> tuple[float, ...]:
        trials = trials_of(row.study)
        first = [trials[row.number], *earlier(trials[row.number], trials)][-1]
        # a process that asks at the same time as another may get a λ below the smallest
        penalty = math.ldexp(self.penalties[0], -_asked(trials[: first.number]))
        return (row.suggest_float("penalty", penalty, penalty, log=True),)

    def ends(self, reached: Reached) -> Status | None:
        if reached.accuracy >= self.min_accuracy and reached.params <= self.max_params:
            return "satisfied"
        return "too sparse" if reached.params < self.few * self.max_params else None

    def values(self, reached: Reached) -> list[float]:
        return [reached.accuracy]

    def needless(self, trial: Trial, trials: Sequence[Trial]) -> bool:
        return _satisfied(trials) or trial.penalty not in self._needed(trials)

    def more(self, trials: Sequence[Trial]) -> bool:
        return _asked(trials) < len(self._needed(trials))

    def done(self, trials: Sequence[Trial]) -> bool:
        tried = {trial.penalty for trial in trials if trial.ended}
        return _satisfied(trials) or tried.issuperset(self._needed(trials))

    def _needed(self, trials: Sequence[Trial]) -> list[float]:
        """Return the λ that can matter: larger than any whose model has ended too large."""
        complete = [trial for trial in trials if trial.status == "complete"]
        too_large = [t.penalty or 0.0 for t in complete if _params(t) > self.max_params]
        return [penalty for penalty in self.penalties if penalty > max(too_large, default=0.0)]

    def result(self, trials: Sequence[Trial]) -> Tuned:
        satisfied = [trial for trial in trials if trial.status == "satisfied"]
        ended = [trial for trial in trials if trial.status in ("too sparse", "complete")]
        within = [trial for trial in ended if _params(trial) <= self.max_params]
        status: Literal["satisfied", "params_only", "infeasible"] = "infeasible"
        chosen = None
        if satisfied:  # several, if found at the same time: the one that halving meets first
            status, chosen = "satisfied", max(satisfied, key=lambda trial: trial.penalty or 0.0)
        elif within:
            status, chosen = "params_only", min(within, key=lambda trial: trial.penalty or 0.0)
        return Tuned(tuple(trials), status, chosen, self.max_params, self.min_accuracy)


class _Tradeoffs:
    """A fixed number of trials, drawn by Optuna's TPE sampler."""

    def __init__(
        self, trials: int, penalties: tuple[float, float], rates: tuple[float, float], seed: int
    ) -> None:
        if require_whole("trials", trials) == 0:
            raise OptionError("trials=0 must be at least 1.")
        for what, (low, high) in (("λ", penalties), ("learning rate", rates)):
            _require_range(f"the smallest {what}", low, f"the largest {what}", high)
        self.trials, self.penalties, self.rates, self.seed = trials, penalties, rates, seed
        self.settings = {
            "search": "trade-offs",
            "penalties": penalties,
            "rates": rates,
            "seed": seed,
        }

    def suggest(self, row: optuna.Trial) -> tuple[float, ...]:
        # seeded by the trial: a search repeats exactly, and no two processes draw the same
        row.study.sampler = TPESampler(seed=zlib.crc32(f"{self.seed} {row.number}".encode()))
        return (
            row.suggest_float("penalty", *self.penalties, log=True),
            row.suggest_float("lr", *self.rates, log=True),
        )

    def ends(self, reached: Reached) -> Status | None:
        if reached.macs is None:
            raise OptionError("the objective reports no MACs: give Reached(…, macs=…).")
        return None

    def values(self, reached: Reached) -> list[float]:
        return [reached.accuracy, float(reached.macs or 0)]

    def needless(self, trial: Trial, trials: Sequence[Trial]) -> bool:
        return _counted(t for t in trials if t.number < trial.number) >= self.trials

    def more(self, trials: Sequence[Trial]) -> bool:
        return _counted(trials) < self.trials

    def done(self, trials: Sequence[Trial]) -> bool:
        unfinished = any(trial.status in ("waiting", "running") for trial in trials)
        return not self.more(trials) and not unfinished


def _satisfied(trials: Iterable[Trial]) -> bool:
    return any(trial.status == "satisfied" for trial in trials)


def _asked(trials: Iterable[Trial]) -> int:
    """Count the trials that repeat no other, each of which has a λ of its own."""
    return sum(trial.again is None for trial in trials)


def _counted(trials: Iterable[Trial]) -> int:
    return sum(trial.status not in ("over", "stopped") for trial in trials)


def _params(trial: Trial) -> int:
    assert trial.reached is not None  # no trial ends without
    return trial.reached.params


def _macs(trial: Trial) -> int:
    assert trial.reached is not None and trial.reached.macs is not None
    return trial.reached.macs


def _require_range(low_name: str, low: float, high_name: str, high: float) -> None:
    for option, value in ((low_name, low), (high_name, high)):
        if require_nonnegative(option, value) == 0.0:
            raise OptionError(f"{option}={value} must be larger than 0.")
    if low > high:
        raise OptionError(f"{low_name}={low:g} is above {high_name}={high:g}: nothing to search.")
