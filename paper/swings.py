"""Table 10's last row, epoch by epoch: how far a result depends on when training stops."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.model.plot import svg
from maestro_lod.train.evaluate import evaluate
from maestro_lod.train.progress import Progress
from maestro_lod.train.record import EpochRecord
from paper.published import LENET
from paper.scale import Scale

TITLE = "Table 10, its last row: test accuracy after every epoch"
PENALTY = "256e-5"
LAST = 5  # epochs, in which ranks hardly change any more


def measure(scale: Scale) -> dict[str, Any]:
    return {str(seed): _course(seed, smoke=scale.smoke) for seed in scale.seeds}


def _course(seed: int, *, smoke: bool) -> list[dict[str, float]]:
    """Train as the item `table10` does; return test accuracy and params after each epoch."""
    fewer = ["epochs=2", "data.limit=512"] if smoke else []
    changes = [f"penalty={PENALTY}", f"seed={seed}", "threads=1", *fewer]
    tests = _Tests()
    with TemporaryDirectory() as place:
        Run.create(load_recipe("lenet-mnist", changes), Path(place)).train([tests])
    return tests.course


class _Tests:
    """A watcher that tests the model after every epoch."""

    def __init__(self) -> None:
        self.course: list[dict[str, float]] = []

    def prepare(self, run: Run) -> None:
        pass

    def begin(self, run: Run, setup: Setup, progress: Progress) -> None:
        self._setup = setup

    def step(self, progress: Progress) -> None:
        pass

    def epoch(self, record: EpochRecord) -> None:
        assert self._setup.data.test is not None
        reached = evaluate(self._setup.model, self._setup.data.test)
        assert record.params is not None
        self.course.append({"accuracy": reached["accuracy"], "params": record.params})

    def end(self, result: dict[str, Any]) -> None:
        pass


def figures(result: dict[str, Any]) -> dict[str, str]:
    lines = {
        f"seed {seed}": [(i, 100 * epoch["accuracy"]) for i, epoch in enumerate(course, 1)]
        for seed, course in result.items()
    }
    title = f"LeNet on MNIST, λ = {PENALTY}: test accuracy"
    return {"swings": svg(lines, title=title, across="epoch", up="test accuracy, %")}


def markdown(result: dict[str, Any]) -> str:
    return (
        f"The trainings of Table 10 with λ = {PENALTY} once more, tested after every epoch. The "
        "learning rate is the same to the end, as in the paper, so weights never settle; of few "
        f"ranks each matters.\n\n{judgement(result)}"
    )


def judgement(result: dict[str, Any]) -> str:
    late = [100 * epoch["accuracy"] for course in result.values() for epoch in course[-LAST:]]
    within = mean(
        stdev(100 * epoch["accuracy"] for epoch in course[-LAST:]) for course in result.values()
    )
    paper = LENET[PENALTY][0]
    return (
        f"Over the last {LAST} epochs of {len(result)} seeds the test accuracy is {mean(late):.2f} "
        f"% on average, between {min(late):.2f} and {max(late):.2f} % (the paper: {paper:.2f}); "
        f"from epoch to epoch of one training it varies by ± {within:.2f}."
    )
