"""Ways to a smaller model side by side, on one's own task: `compare`, which `lod compare` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from maestro_lod.baselines.compare.contenders import require_known
from maestro_lod.baselines.compare.gather import gathered
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
    """Train each method for each size on a recipe's task, and return what came of it.

    >>> found = compare("digits", ["lod", "narrow"], sizes=[0.5, 0.25], out=Path("runs/compare"))
    >>> print(found)

    `recipe` is a name or a file, `changes` are its key=value. All methods have the same data and
    epochs or, with `budget`, training MACs: 1.0 is what training the dense model costs. Each tries
    `lr_trials` learning rates around the recipe's, for `lr_epochs`, at the first of `sizes`, and is
    judged on validation data and a seed of its own. `out` gets compare.json, compare.html and a run
    directory per training: the same call goes on where another was killed, reuses what is finished,
    and shares the work with one that is running. `say` is told in a line what happens, and what a
    method cannot do; the others go on. `stop` is asked after each step.
    """
    methods = tuple(methods)
    require_known(methods)
    plan = ComparisonPlan(
        recipe, tuple(changes), tuple(dict.fromkeys(sizes)), seeds, budget, lr_trials, lr_epochs,
        Path(out),
    )  # fmt: skip
    data = data_of(plan.base)  # says so if it is missing, before anything is trained
    plan.require_data(data)
    dense = cost_of(dense_model_of(plan.base, data), data.example)
    runner = Runner(plan, methods, watchers, say, stop)
    runner.work()
    found = gathered(runner, dense)
    write_page(found, plan.out)
    return found
