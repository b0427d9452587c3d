"""Runner of the trainings of a comparison, one at a time; several processes may share them.

Each training is an ordinary run directory. A process that starts the same comparison, after a kill
or at the same time, reuses finished trainings, resumes unfinished ones and skips those that another
process holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from maestro_lod.baselines.compare.contenders import Contender, contender
from maestro_lod.baselines.compare.measure import Measured, measure, measured
from maestro_lod.baselines.compare.metrics import better, metric_in
from maestro_lod.baselines.compare.plan import ComparisonPlan, Pace, Training
from maestro_lod.cli.run import Interrupted, Run, Watcher
from maestro_lod.cli.run_files import fixed_settings
from maestro_lod.errors import BusyError, MaestroError, OptionError, TrainingError
from maestro_lod.files.atomic import alone_in, remove_leftovers
from maestro_lod.files.json_files import read_json_file

_FAILED = "failed.json"
_WAIT = 1.0  # seconds between two looks at the trainings of other processes


def _ignore(line: str) -> None:
    pass


@dataclass
class Runner:
    """Trains and measures all contenders, and records which of them failed."""

    plan: ComparisonPlan
    names: Sequence[str]
    watchers: Sequence[Watcher] = ()
    say: Callable[[str], None] = _ignore
    stop: Callable[[], bool] = lambda: False
    contenders: list[Contender] = field(init=False)
    trials: Callable[[Contender], list[Training]] = field(init=False)
    reported: Callable[[Contender, Pace], list[Training]] = field(init=False)
    missing: dict[str, str] = field(default_factory=dict)
    """Reason by name of a contender that cannot take part, or of a training that failed."""
    _same: set[Path] = field(default_factory=set)
    """Directories of runs that were checked to have the settings of this comparison."""

    def __post_init__(self) -> None:
        # used again after every training; settings do not change meanwhile
        self.trials, self.reported = cache(self.plan.trials), cache(self.plan.reported)
        self.contenders = []
        for name in dict.fromkeys(self.names):
            try:
                found = contender(name)
                self.trials(found)  # raises for settings that its method does not accept
                self.contenders.append(found)
            except OptionError as error:
                self._miss(name, error)
        if not self.contenders:
            raise OptionError(f"no method can be compared: {'; '.join(self.missing.values())}")

    def work(self) -> None:
        """Train and measure until every training is finished or has failed."""
        while todo := [training for training in self._all() if not self.settled(training)]:
            if not any(self._done(training) for training in todo):
                self._wait()

    def _all(self) -> Iterator[Training]:
        """Yield all trainings that are known to be needed, trials first."""
        paces = {each.name: self.pace(each) for each in self.contenders}
        for each in self.contenders:
            if self.plan.needs_trials:
                yield from self.trials(each)
        for each in self.contenders:
            if (pace := paces[each.name]) is not None:
                yield from self.reported(each, pace)

    def settled(self, training: Training) -> bool:
        """Return True if a training was measured or has failed."""
        self._require_same(training.run)
        return self.why_not(training) is not None or measured(training) is not None

    def why_not(self, training: Training) -> str | None:
        """Return why a training has failed; None if it has not."""
        if training.name in self.missing:
            return self.missing[training.name]
        path = training.run.directory / _FAILED
        if not path.exists():
            return None
        return str(read_json_file(path, {"reason": str})["reason"])

    # -- learning rates --------------------------------------------------------------------------

    def pace(self, contender: Contender) -> Pace | None:
        """Return rate and epochs of a contender; None until its trials end, or if all fail."""
        plan = self.plan
        if not plan.needs_trials:
            return Pace(plan.base.optimizer.lr, plan.base.epochs)
        trials = self.trials(contender)
        if not all(map(self.settled, trials)):
            return None
        known = [(merit, t) for t in trials if (merit := self._merit(t)) is not None]
        if not known:
            reasons = {self.why_not(trial) or _only(trial) for trial in trials}
            self._miss(contender.name, "; ".join(sorted(map(str, reasons))))
            return None
        best_first = [t for _, t in sorted(known, key=lambda entry: entry[0], reverse=True)]
        lasting = (t for t in best_first if not self._diverged(contender, t))
        return self._pace_of(next(lasting, best_first[0]))

    def _pace_of(self, trial: Training) -> Pace:
        cost = training_cost(trial.run)
        return Pace(trial.run.recipe.optimizer.lr, self.plan.epochs_for(cost))

    def _diverged(self, contender: Contender, trial: Training) -> bool:
        """Return True if a learning rate that was best in a short trial fails in a full training.

        It fails if the loss becomes infinite or NaN, or ends above that of the trial of the same
        size. Only training losses are read, so the choice does not use test data.
        """
        for training in self.reported(contender, self._pace_of(trial)):
            if (training.run.directory / _FAILED).exists():
                return True
            if training.size == trial.size and training.run.finished:
                before, after = (t.run.epochs()[-1].train["loss"] for t in (trial, training))
                if after > before:
                    return True
        return False

    def merits(self, contender: Contender) -> dict[float, float | None]:
        """Return the validation score of each learning rate, None where it failed."""
        found = {}
        for trial in self.trials(contender):
            merit = self._merit(trial)
            found[trial.run.recipe.optimizer.lr] = None if merit is None else abs(merit)
        return found

    def _merit(self, trial: Training) -> float | None:
        """Return the validation score of a trial, larger being better; None if it failed."""
        if self.why_not(trial) is not None:
            return None
        found = _only(trial)
        if not isinstance(found, Measured):
            return None
        metric = metric_in(found.validation)
        if metric is None:  # a single rate, tried only to measure the cost of an epoch
            return 0.0
        return better(metric, found.validation[metric])

    # -- one training ----------------------------------------------------------------------------

    def _done(self, training: Training) -> bool:
        """Train and measure; return False if another process holds the training."""
        run = training.run
        try:
            if not run.finished:
                self.say(f"training {training.name}")
                self._train(run)
            measure(training)
        except BusyError:
            return False
        except TrainingError as error:  # it would fail the same way again
            run.write_json(_FAILED, {"reason": str(error)})
            self.say(f"{training.name}: {error}")
        except Interrupted:
            raise
        except MaestroError as error:
            self._miss(training.name, error)
        return True

    def _train(self, run: Run) -> None:
        try:
            run.train(self.watchers, self.stop)
        except OptionError:
            if not run.finished:  # another process may have finished it meanwhile
                raise

    def _require_same(self, run: Run) -> None:
        """Raise OptionError if the directory has a run with other settings."""
        if run.directory in self._same or not (run.directory / "config.yaml").exists():
            return
        there = Run.open(run.directory)
        if fixed_settings(there.recipe) != fixed_settings(run.recipe):
            raise OptionError(
                f"{run.directory} is a run with settings other than those of this comparison. Give "
                "another --out."
            )
        if any(run.directory.glob(".*")):  # left by a kill, unless another process is writing
            with suppress(BusyError), alone_in(run.directory):
                remove_leftovers(run.directory)
        self._same.add(run.directory)

    def _miss(self, name: str, reason: object) -> None:
        if name not in self.missing:
            self.missing[name] = str(reason)
            self.say(f"{name}: {reason}")

    def _wait(self) -> None:
        if self.stop():
            raise Interrupted
        time.sleep(_WAIT)


def _only(trial: Training) -> object:
    """Return the single model of a trial, or why it is missing."""
    found = measured(trial)
    assert found is not None and len(found) == 1
    return next(iter(found.values()))


def training_cost(run: Run) -> float:
    """Return the MACs of an epoch of a finished run, relative to an epoch of dense training."""
    ledger = run.result()["ledger"]
    return 1.0 if ledger is None else float(ledger["relative_macs"])
