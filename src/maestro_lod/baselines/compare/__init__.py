"""Comparison of compression methods on a user's task: `compare`, which `lod compare` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from maestro_lod.baselines.compare.contenders import require_known
from maestro_lod.baselines.compare.gather import gather_comparison
from maestro_lod.baselines.compare.page import write_page
from maestro_lod.baselines.compare.plan import ComparisonPlan
from maestro_lod.baselines.compare.runner import Runner
from maestro_lod.baselines.compare.table import Comparison, Row, Winner
from maestro_lod.cli.run import Watcher
from maestro_lod.cli.setup import data_of, dense_model_of
from maestro_lod.model.cost import cost_of

__all__ = ["Comparison", "Row", "Winner", "compare"]


def compare(
    recipe: str,
    methods: Iterable[str],
    *,
    sizes: Sequence[float],
    out: Path,
    seeds: int = 1,
    budget: float | None = None,
    lr_trials: int = 3,
    lr_epochs: int | None = None,
    changes: Iterable[str] = (),
    watchers: Sequence[Watcher] = (),
    say: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Train each method at each size on the task of a recipe, and compare the models.

    All methods train on the same data. Learning rates are chosen on validation data, with a seed
    that the reported trainings do not use. A method that cannot do the task is reported as missing.
    The same call resumes a comparison that was killed, reuses finished trainings and shares the
    work with other processes that run it.

    Args:
        recipe: The name of a recipe, or the path of a YAML file.
        methods: Names of methods; see `contenders.known`.
        sizes: Shares of the dense model.
        out: Directory for compare.json, compare.html and the run directory of each training.
        seeds: Number of runs that a mean is taken over.
        budget: MACs that each method may spend on training, relative to one training of the dense
            model; by default each trains for the epochs of the recipe.
        lr_trials: Number of learning rates around that of the recipe that each method tries, at
            the first size.
        lr_epochs: Epochs of such a trial; by default those of the recipe.
        changes: `key.key=value`, as for `lod train --set`.
        watchers: Observers of each training.
        say: Called with a line about each training that starts or fails.
        stop: Called after each step; if it returns True, the comparison stops.

    Returns:
        Costs and scores of all models, and the best model of each size.

    Raises:
        OptionError: If an option is wrong, or no method can do the task.
        DataError: If the dataset is missing.
        Interrupted: If `stop` has returned True.

    Example:
        >>> print(compare("digits", ["lod", "narrow"], sizes=[0.5, 0.25], out=Path("runs/compare")))
    """
    methods = tuple(methods)
    require_known(methods)
    plan = ComparisonPlan(
        recipe, tuple(changes), tuple(dict.fromkeys(sizes)), seeds, budget, lr_trials, lr_epochs,
        Path(out),
    )  # fmt: skip
    data = data_of(plan.base)  # raises before anything is trained
    plan.require_data(data)
    dense = cost_of(dense_model_of(plan.base, data), data.example)
    runner = Runner(plan, methods, watchers, say, stop)
    runner.work()
    comparison = gather_comparison(runner, dense)
    write_page(comparison, plan.out)
    return comparison
