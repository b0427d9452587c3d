"""Searches of `lod tune` over trainings of one recipe; each trial is a run directory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maestro_lod.cli.data import Data
from maestro_lod.cli.recipe import Recipe, dumped
from maestro_lod.cli.run import Interrupted, Run, Watcher
from maestro_lod.cli.setup import Setup, data_of, model_of
from maestro_lod.cli.tuning.search import Front, Tuned, explore, tune
from maestro_lod.cli.tuning.storage import Storage
from maestro_lod.cli.tuning.trials import Enough, Reached, Report, Trial
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.files.atomic import replacing
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.diagnostics import reachable_importance
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.lod import LoD
from maestro_lod.train.lod_settings import LoDSettings
from maestro_lod.train.progress import EpochRecord, Progress

_ABOVE = 8  # default of the largest λ, as a multiple of the recipe's
_HALVINGS = 10  # default number of halvings from the largest λ to the smallest
_RATES = (0.1, 3.0)  # range of learning rates, as multiples of the recipe's
_VALIDATION = 0.1  # share of the training set, if the recipe holds none out


@dataclass
class Tuning:
    """Search over trainings of one recipe that differ in λ; each trial is a run directory.

    Processes with the same `storage` and `name` share one search. If they share `directory` too,
    they resume the trials of killed processes from their checkpoints; otherwise such a trial
    starts again from the beginning.

    Args:
        recipe: The recipe; it must train low-rank and shrink.
        directory: Directory of the trials.
        storage: A path, or the URL of a database; by default a journal in `directory`.
        name: Name of the search in the storage; by default that of the recipe.
        watchers: Observers of each training.
        watch: Called with each trial that starts or ends.
        stop: Returns True to stop the search.

    Raises:
        OptionError: If no λ makes the model of the recipe smaller.

    Example:
        >>> tuning = Tuning(load_recipe("lenet-mnist"), Path("runs/search"))
        >>> tuning.tune(max_params=12_000, min_accuracy=0.98)
    """

    recipe: Recipe
    directory: Path
    storage: Storage | None = None
    name: str | None = None
    watchers: Sequence[Watcher] = ()
    watch: Callable[[Trial], None] = lambda trial: None
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        settings = self.recipe.settings
        if not isinstance(settings, LoDSettings) or not settings.shrink:
            low_rank = isinstance(settings, LoDSettings)
            what = "shrink=false" if low_rank else f"method={self.recipe.method}"
            raise OptionError(f"with {what} no λ makes a model smaller: there is nothing to tune.")
        if self.recipe.data.validation == 0.0:
            warnings.warn(
                f"data.validation=0 leaves no data to judge trials by: they hold out "
                f"{_VALIDATION:.0%} of the training set.",
                stacklevel=3,
            )
            data = self.recipe.data.model_copy(update={"validation": _VALIDATION})
            self.recipe = self.recipe.model_copy(update={"data": data})

    @property
    def _settings(self) -> LoDSettings:
        settings = self.recipe.settings
        assert isinstance(settings, LoDSettings)
        return settings

    def tune(
        self,
        *,
        max_params: int,
        min_accuracy: float,
        largest: float | None = None,
        smallest: float | None = None,
        few: float = 0.5,
    ) -> Tuned:
        """Halve λ until a model has the accuracy and at most the params; see `search.tune`."""
        high, low = self._penalties(largest, smallest)
        self._require_possible(max_params, self._data())
        return tune(
            lambda penalty, report: self._train(self._changed(penalty), report),
            max_params=max_params,
            min_accuracy=min_accuracy,
            largest=high,
            smallest=low,
            few=few,
            **self._shared(),
        )

    def explore(
        self, trials: int, *, largest: float | None = None, smallest: float | None = None
    ) -> Front:
        """Search λ and learning rate for trade-offs of accuracy and MACs; see `search.explore`."""
        high, low = self._penalties(largest, smallest)
        self._data()
        rate = self.recipe.optimizer.lr
        return explore(
            lambda penalty, lr, report: self._train(self._changed(penalty, lr), report),
            trials=trials,
            penalties=(low, high),
            rates=(_RATES[0] * rate, _RATES[1] * rate),
            seed=self.recipe.seed,
            **self._shared(),
        )

    # -- before anything is trained --------------------------------------------------------------

    def _penalties(self, largest: float | None, smallest: float | None) -> tuple[float, float]:
        if largest is None and self._settings.penalty == 0.0:
            raise OptionError("the recipe has no λ (penalty) to start from. Give --largest.")
        high = self._largest() if largest is None else largest
        return high, high / 2**_HALVINGS if smallest is None else smallest

    def _largest(self) -> float:
        """Return the largest λ: a multiple of the recipe's at which useless ranks can be removed.

        Where they cannot reach the threshold, a model stays large at every λ, and the search would
        mistake that for a λ that is too small.
        """
        setup, high = Setup.of(self.recipe), _ABOVE * self._settings.penalty
        layers = low_rank_layers(setup.model).values()
        while not self._settings.proximal and any(
            (reachable_importance(layer, setup.optimizer, high) or 0.0) > self._settings.threshold
            for layer in layers
        ):
            if high <= self._settings.penalty:
                break  # the optimizer's floor does not depend on λ, or the recipe is at it
            high /= 2
        return high

    def _data(self) -> Data:
        data = data_of(self.recipe)
        if data.validation is None:
            raise OptionError(
                f"data {self.recipe.data.name!r} has no validation split: trials cannot be judged."
            )
        return data

    def _require_possible(self, max_params: int, data: Data) -> None:
        """Raise OptionError for a limit that every model keeps, or none."""
        model = model_of(self.recipe, data)
        ledger = Ledger.open_for(model)
        smallest = dict.fromkeys(low_rank_layers(model), self._settings.min_rank)
        fewest = ledger.costs(model).at(smallest).params
        if max_params >= ledger.dense_params:
            raise OptionError(
                f"max_params={max_params} is not below the dense model's {ledger.dense_params}: "
                "nothing would have to shrink."
            )
        if max_params < fewest:
            raise OptionError(
                f"max_params={max_params} cannot be reached: with one rank in every layer, or "
                f"min_rank={self._settings.min_rank} of them, the model has {fewest}."
            )

    def _shared(self) -> dict[str, Any]:
        """Return the options that both searches have."""
        # without the settings that may differ between machines
        about = self.recipe.model_dump(
            mode="json",
            exclude={
                "recipe": True,
                "description": True,
                "data": {"directory"},
                "penalty": True,
                "device": True,
                "threads": True,
                "checkpoint_every": True,
                "tensorboard": True,
            },
        )
        return {
            "storage": self.storage or self.directory / "search.journal",
            "name": self.name or self.recipe.recipe or "lod",
            "about": about,
            "watch": self.watch,
            "sleep": self._sleep,
        }

    def _sleep(self, seconds: float) -> None:
        if self.stop():
            raise Interrupted
        time.sleep(seconds)

    # -- one trial -------------------------------------------------------------------------------

    def _changed(self, penalty: float, lr: float | None = None) -> Recipe:
        changes: dict[str, Any] = {"penalty": penalty, "budget": None, "elastic": 0.0}
        if lr is not None:
            changes["optimizer"] = self.recipe.optimizer.model_copy(update={"lr": lr})
        return self.recipe.model_copy(update=changes)

    def _train(self, recipe: Recipe, report: Report) -> None:
        run = self._run(recipe, report)
        report.note(str(run.directory))
        try:
            run.train([*self.watchers, _Reporter(report)], self.stop)
        except (Enough, TrainingError) as end:
            early = isinstance(end, Enough) and end.status in ("satisfied", "too sparse")
            result = _finished(run, report) if early else {}
            for watcher in self.watchers:
                watcher.end(result)
            raise

    def _run(self, recipe: Recipe, report: Report) -> Run:
        """Return the run of a trial; one that repeats another takes over its directory."""
        directory = self._place(report.number)
        for number in report.repeats:
            if self._place(number).exists():
                # moved, not shared: if the other process is alive after all, it cannot write here
                self._place(number).rename(directory)
                return Run(directory, recipe)
        return Run.create(recipe, directory)

    def _place(self, number: int) -> Path:
        return self.directory / f"trial-{number}"


class _Reporter:
    """Watcher that reports each epoch to the search."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def prepare(self, run: Run) -> None:
        pass

    def begin(self, run: Run, setup: Setup, progress: Progress) -> None:
        assert isinstance(setup.method, LoD)
        self._ledger, self._epochs = setup.method.ledger, run.recipe.epochs
        if progress.history:
            self.report(self._reached(progress.history[-1]), resumed=True)

    def step(self, progress: Progress) -> None:
        pass

    def epoch(self, record: EpochRecord) -> None:
        self.report(self._reached(record))

    def end(self, result: dict[str, Any]) -> None:
        pass

    def _reached(self, record: EpochRecord) -> Reached:
        accuracy = record.validation.get("accuracy")
        if accuracy is None:
            raise OptionError(
                "the targets of the recipe are not classes: there is no accuracy to tune."
            )
        mean = self._ledger.relative_macs
        assert mean is not None  # the ledger of a run has an example
        cost = mean * len(self._ledger.epochs) / self._epochs
        assert record.params is not None and record.macs is not None
        return Reached(record.epoch, accuracy, record.params, record.macs, cost)


def _finished(run: Run, report: Report) -> dict[str, Any]:
    """Make the epoch that a run has reached its last one, finish it and return the result."""
    assert report.last is not None
    recipe = run.recipe.model_copy(update={"epochs": report.last.epoch})
    with replacing(run.directory / "config.yaml") as place:
        place.write_text(dumped(recipe), encoding="utf-8")
    return Run(run.directory, recipe).train()
