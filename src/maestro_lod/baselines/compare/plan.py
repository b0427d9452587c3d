"""Trainings of a comparison: the same data, and the same epochs or cost, for all methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from maestro_lod.baselines.compare.contenders import Contender
from maestro_lod.cli.data import Data
from maestro_lod.cli.recipe import Milestones, Recipe, load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.errors import OptionError, require_at_least_one

_APART = 1000
"""Added to the seed of the recipe for the trials of learning rates."""
_VALIDATION = 0.1
"""Share of the training set that trials hold out if the recipe holds out none."""


@dataclass(frozen=True)
class Training:
    """One run of a comparison."""

    run: Run
    contender: Contender
    size: float | None
    """Size that it is trained for; None if it serves all sizes, or the method determines it."""
    cuts: tuple[float, ...] = ()
    """Sizes that the model is cut to afterwards."""

    @property
    def name(self) -> str:
        return self.run.directory.name


@dataclass(frozen=True)
class Pace:
    """Learning rate and epochs of the reported trainings of a contender."""

    rate: float
    epochs: int


@dataclass(frozen=True)
class ComparisonPlan:
    """Options of a comparison, and the trainings that follow from them."""

    recipe: str
    changes: tuple[str, ...]
    sizes: tuple[float, ...]
    seeds: int
    budget: float | None
    """MACs that a training may cost, relative to one training of the dense model; None for the
    epochs of the recipe."""
    lr_trials: int
    lr_epochs: int | None
    """Epochs of a trial; None for those of the recipe."""
    out: Path

    def __post_init__(self) -> None:
        require_at_least_one("seeds", self.seeds, "the number of runs that a mean is taken over")
        require_at_least_one("lr_trials", self.lr_trials, "1 takes the recipe's learning rate")
        if self.lr_epochs is not None:
            require_at_least_one("lr_epochs", self.lr_epochs, "the epochs of a trial")
        if not self.sizes or not all(0.0 < size < 1.0 for size in self.sizes):
            given = ", ".join(f"{size:g}" for size in self.sizes) or "none"
            raise OptionError(
                f"sizes are not between 0 and 1: {given}. Give shares of the dense model, such "
                "as 0.25."
            )
        if self.budget is not None and not 0.0 < self.budget < float("inf"):
            raise OptionError(
                f"budget={self.budget:g} must be above 0. 1 is the cost of one dense training."
            )

    @cached_property
    def base(self) -> Recipe:
        """The recipe with the changes that all contenders share."""
        return load_recipe(self.recipe, self.changes)

    @property
    def needs_trials(self) -> bool:
        """True if trials have to find the learning rate or the cost of an epoch first."""
        return self.lr_trials > 1 or self.budget is not None

    @property
    def holds_out(self) -> bool:
        """True if trials hold out validation data that the recipe trains on."""
        return self.base.data.validation == 0.0 and ":" not in self.base.data.name

    def require_data(self, data: Data) -> None:
        """Raise OptionError for data on which learning rates cannot be chosen."""
        if self.lr_trials > 1 and data.validation is None and not self.holds_out:
            raise OptionError(
                f"data {self.base.data.name!r} has no validation split to choose learning rates "
                "on. Give --lr-trials 1, or data with such a split."
            )

    @property
    def rates(self) -> list[float]:
        """Learning rates to try: that of the recipe times 1, 3, 1/3, 9, 1/9 and so on."""
        steps = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(self.lr_trials)]
        return [float(f"{self.base.optimizer.lr * 3.0**step:.4g}") for step in steps]

    def trials(self, contender: Contender) -> list[Training]:
        """Return the trainings at the first size that choose a learning rate."""
        epochs, seed = self.lr_epochs or self.base.epochs, self.base.seed + _APART
        first = self.sizes[:1]
        apart = [f"data.validation={_VALIDATION}"] if self.holds_out else []
        return [
            training
            for rate in self.rates
            for training in self._trainings(contender, Pace(rate, epochs), seed, first, apart)
        ]

    def reported(self, contender: Contender, pace: Pace) -> list[Training]:
        """Return the trainings of the reported models, seed by seed."""
        return [
            training
            for seed in range(self.base.seed, self.base.seed + self.seeds)
            for training in self._trainings(contender, pace, seed, self.sizes)
        ]

    def epochs_for(self, cost: float) -> int:
        """Return the epochs of a contender, given the cost of one relative to a dense epoch."""
        if self.budget is None:
            return self.base.epochs
        return max(1, round(self.budget * self.base.epochs / cost))

    def _trainings(
        self,
        contender: Contender,
        pace: Pace,
        seed: int,
        sizes: Sequence[float],
        changes: Iterable[str] = (),
    ) -> list[Training]:
        """Return one training per size, or one for all sizes."""
        cuts = tuple(sizes) if contender.cut else ()
        trained_for = [*sizes] if contender.trained_per_size else [None]
        return [
            Training(self._run(contender, size, pace, seed, changes), contender, size, cuts)
            for size in trained_for
        ]

    def _run(
        self,
        contender: Contender,
        size: float | None,
        pace: Pace,
        seed: int,
        changes: Iterable[str],
    ) -> Run:
        mine = [change for change in self.changes if contender.has_use_for(change)]
        own = contender.chosen(min(self.sizes))
        mine += [f"method={contender.method}", *own, *contender.at_size(size)]
        # as many epochs for all, those that a method adds included
        epochs = load_recipe(self.recipe, mine).settings.epochs_within(pace.epochs)
        common = [
            f"optimizer.lr={pace.rate}",
            f"epochs={epochs}",
            f"seed={seed}",
            *_stretched(self.base, epochs),
            *changes,
        ]
        recipe = load_recipe(self.recipe, [*mine, *common])
        name = [contender.place, *own, *([] if size is None else [f"size={size:g}"])]
        name += [f"lr={pace.rate:g}", f"epochs={pace.epochs}", f"seed={seed}", *changes]
        return Run(self.out / "runs" / ",".join(name), recipe)


def _stretched(recipe: Recipe, epochs: int) -> list[str]:
    """Return the change that scales milestones of a schedule to another number of epochs."""
    if not isinstance(recipe.schedule, Milestones) or epochs == recipe.epochs:
        return []
    factor = epochs / recipe.epochs
    moved = [max(1, round(milestone * factor)) for milestone in recipe.schedule.epochs]
    return [f"schedule.epochs={sorted(set(moved))}"]
