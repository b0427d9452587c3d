"""The paper's search for λ, and the search for trade-offs, on made-up trainings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_lod.cli.tuning.search import Tuned, explore, tune
from maestro_lod.cli.tuning.trials import Reached, Report
from maestro_lod.errors import OptionError, TrainingError

Curve = Callable[[float], list[tuple[float, int]]]


@dataclass
class Trainings:
    """Trainings that are known beforehand: for each λ, accuracy and params after each epoch."""

    curve: Curve
    began: list[float] = field(default_factory=list)

    def __call__(self, penalty: float, report: Report) -> None:
        self.began.append(penalty)
        epochs = self.curve(penalty)
        for epoch, (accuracy, params) in enumerate(epochs, 1):
            report(Reached(epoch, accuracy, params, params * 7, epoch / len(epochs)))


TEN = range(1, 11)
USUAL = {"max_params": 1000, "min_accuracy": 0.9, "largest": 8.0, "smallest": 0.125}


def search(curve: Curve, **options: float) -> tuple[Tuned, list[float]]:
    trainings = Trainings(curve)
    return tune(trainings, **{**USUAL, **options}), trainings.began  # type: ignore[arg-type]


# -- Algorithm 2 ---------------------------------------------------------------------------------


def test_lambda_is_halved_from_the_largest_to_the_smallest():
    found, began = search(lambda penalty: [(0.5, 900)])
    assert began == [8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125]
    assert [trial.penalty for trial in found.trials] == began
    _, began = search(lambda penalty: [(0.5, 900)], largest=0.3, smallest=0.3)
    assert began == [0.3]
    _, began = search(lambda penalty: [(0.5, 900)], largest=0.3, smallest=0.1)
    assert began == [0.3, 0.15]


def test_the_first_epoch_that_meets_both_constraints_ends_the_search():
    found, began = search(
        lambda penalty: [(0.95, 1200), (0.95, 1000), (0.97, 800)] if penalty < 3 else [(0.5, 600)]
    )
    assert began == [8.0, 4.0, 2.0]
    assert (found.status, found.penalty) == ("satisfied", 2.0)
    assert found.chosen is not None and found.chosen.reached is not None
    assert found.chosen.reached.epoch == 2
    assert [trial.status for trial in found.trials] == ["complete", "complete", "satisfied"]
    assert found.verdict == (
        "satisfied: trial 2 (λ=2) has accuracy ≥ 90.00% within 1,000 params: accuracy 95.00%, "
        "1,000 params."
    )


def test_the_last_epoch_counts_too():
    found, _ = search(lambda penalty: [(0.5, 1000), (0.5, 1000), (0.9, 1000)])
    assert found.status == "satisfied"
    assert found.chosen is not None and found.chosen.reached is not None
    assert found.chosen.reached.epoch == 3


def test_a_trial_ends_once_its_model_is_too_sparse():
    def curve(penalty: float) -> list[tuple[float, int]]:
        return [(0.5, 2000), (0.5, 499), (0.95, 499)] if penalty == 8.0 else [(0.9, 500)]

    found, _ = search(curve)
    assert [trial.status for trial in found.trials] == ["too sparse", "satisfied"]
    assert found.trials[0].reached == Reached(2, 0.5, 499, 499 * 7, 2 / 3)
    found, _ = search(curve, few=0.4)
    assert [trial.status for trial in found.trials] == ["satisfied"]
    found, _ = search(lambda penalty: [(0.5, 500), (0.9, 500)])  # half as many are enough
    assert [trial.status for trial in found.trials] == ["satisfied"]
    found, _ = search(lambda penalty: [(0.95, 1)])  # small is no fault if it is accurate
    assert [trial.status for trial in found.trials] == ["satisfied"]


def test_a_model_that_ends_too_large_ends_the_search_with_the_last_within_params():
    found, began = search(lambda penalty: [(0.5, 5000), (0.5, int(1500 / penalty))], few=0.0)
    assert began == [8.0, 4.0, 2.0, 1.0]
    assert (found.status, found.penalty) == ("params_only", 2.0)
    assert found.verdict == (
        "params only: no trial has accuracy ≥ 90.00% within 1,000 params; trial 2 (λ=2) is the "
        "last within params: accuracy 50.00%, 750 params."
    )


def test_a_sparse_trial_can_be_the_last_within_params():
    found, _ = search(lambda penalty: [(0.5, 400 if penalty > 5 else 1001)])
    assert (found.status, found.penalty) == ("params_only", 8.0)


def test_the_smallest_lambda_ends_the_search():
    found, _ = search(lambda penalty: [(0.5, 800)])
    assert (found.status, found.penalty) == ("params_only", 0.125)


def test_a_first_model_that_is_too_large_is_infeasible_and_says_what_to_do():
    found, began = search(lambda penalty: [(0.95, 1001)])
    assert began == [8.0]
    assert (found.status, found.chosen, found.penalty) == ("infeasible", None, None)
    assert found.verdict == (
        "infeasible: no trial has accuracy ≥ 90.00% within 1,000 params; the fewest params were "
        "1,001. Start from a λ larger than 8, or allow more params."
    )


@given(
    size=st.floats(50, 20_000),
    power=st.floats(0.2, 2.0),
    best=st.floats(0.5, 1.0),
    harm=st.floats(0.0, 0.2),
    max_params=st.integers(1, 3000),
    min_accuracy=st.floats(0.4, 1.0),
    few=st.floats(0.0, 0.9),
)
def test_it_is_the_algorithm_of_the_paper(
    size: float,
    power: float,
    best: float,
    harm: float,
    max_params: int,
    min_accuracy: float,
    few: float,
):
    def curve(penalty: float) -> list[tuple[float, int]]:
        return [
            (
                max(0.0, best - harm * penalty - 0.3 / epoch),
                int(size / penalty**power + 2000 / epoch),
            )
            for epoch in TEN
        ]

    def literally() -> tuple[str, float | None]:
        penalty, old = 8.0, None
        while penalty >= 0.125:
            params = 0
            for accuracy, params in curve(penalty):
                if accuracy >= min_accuracy and params <= max_params:
                    return "satisfied", penalty
                if params < few * max_params:
                    break
            if params > max_params:
                break
            old, penalty = penalty, penalty / 2
        return ("params_only", old) if old else ("infeasible", None)

    found, _ = search(curve, max_params=max_params, min_accuracy=min_accuracy, few=few)
    assert (found.status, found.penalty) == literally()


# -- what is told --------------------------------------------------------------------------------


def test_cost_is_the_sum_over_all_trials():
    sparse, good = [(0.5, 400)] * 4, [(0.5, 900), (0.5, 900), (0.9, 900), (0.9, 900)]
    found, _ = search(lambda penalty: sparse if penalty == 8.0 else good)
    assert [trial.spent for trial in found.trials] == [0.25, 0.75]
    assert found.cost == 1.0


def test_the_table_has_all_trials_and_the_verdict():
    found, _ = search(lambda penalty: [(0.5, 1500), (0.91, int(4000 / penalty))], few=0.6)
    assert str(found).splitlines() == [
        "trial  λ  epoch  accuracy  params   MACs   cost  ended",
        "─" * 58,
        "    0  8      2    91.00%     500  3,500  1.00×  satisfied",
        "",
        "satisfied: trial 0 (λ=8) has accuracy ≥ 90.00% within 1,000 params: accuracy 91.00%, 500 "
        "params. All trials together cost 1.00× one training of the dense model.",
    ]


def test_watch_is_told_of_starts_and_ends():
    lines: list[str] = []
    tune(
        Trainings(lambda penalty: [(0.9, 900)] if penalty < 1 else [(0.5, 499)]),
        max_params=1000,
        min_accuracy=0.9,
        largest=1.0,
        smallest=0.1,
        watch=lambda trial: lines.append(str(trial)),
    )
    assert lines == [
        "trial 0 with λ=1: running",
        "trial 0 with λ=1: too sparse at epoch 1, accuracy 50.00%, 499 params",
        "trial 1 with λ=0.5: running",
        "trial 1 with λ=0.5: satisfied at epoch 1, accuracy 90.00%, 900 params",
    ]


# -- trials that fail ----------------------------------------------------------------------------


def collapsing(penalty: float, report: Report) -> None:
    if penalty > 3:
        raise TrainingError("nothing is left")
    report(Reached(1, 0.9, 900))


def test_a_training_that_fails_ends_its_trial_only():
    found = tune(collapsing, max_params=1000, min_accuracy=0.9, largest=8.0, smallest=1.0)
    assert [trial.status for trial in found.trials] == ["failed", "failed", "satisfied"]
    assert found.trials[0].reason == "nothing is left"
    assert str(found.trials[0]) == "trial 0 with λ=8: failed (nothing is left)"


def test_if_all_fail_the_reason_is_told():
    found = tune(collapsing, max_params=1000, min_accuracy=0.9, largest=8.0, smallest=4.0)
    assert found.status == "infeasible"
    assert found.verdict == "infeasible: every trial failed, the last with: nothing is left"


def test_a_failed_trial_is_never_chosen():
    def objective(penalty: float, report: Report) -> None:
        report(Reached(1, 0.5, 900))
        if penalty < 8:
            raise TrainingError("it diverged")

    found = tune(objective, max_params=1000, min_accuracy=0.9, largest=8.0, smallest=1.0)
    assert (found.status, found.penalty) == ("params_only", 8.0)


def test_an_objective_must_report():
    with pytest.raises(OptionError, match="without a report"):
        tune(
            lambda penalty, report: None,
            max_params=1000, min_accuracy=0.9, largest=1.0, smallest=1.0,
        )  # fmt: skip


# -- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_params": 0}, "max_params=0 must be at least 1."),
        ({"max_params": -5}, "max_params=-5 must be a whole number, zero or larger."),
        ({"max_params": 0.5}, "max_params=0.5 must be a whole number, zero or larger."),
        ({"min_accuracy": 0.0}, "min_accuracy=0.0 must be above 0 and at most 1."),
        ({"min_accuracy": 98}, "min_accuracy=98 must be above 0 and at most 1. Did you mean 0.98?"),
        ({"min_accuracy": math.nan}, "min_accuracy=nan must be above 0 and at most 1."),
        ({"few": 1.0}, "few=1.0 must be a share of max_params, in [0, 1)."),
        ({"largest": 0.0}, "largest=0.0 must be larger than 0."),
        ({"smallest": -1.0}, "smallest=-1.0 must be a finite number that is zero or larger."),
        ({"smallest": 9.0}, "smallest=9 is above largest=8: nothing to search."),
        ({"largest": math.inf}, "largest=inf must be a finite number that is zero or larger."),
    ],
)
def test_constraints_that_make_no_sense_are_refused_in_one_line(
    options: dict[str, float], message: str
):
    trainings = Trainings(lambda penalty: [(0.5, 900)])
    with pytest.raises(OptionError) as refused:
        tune(trainings, **{**USUAL, **options})  # type: ignore[arg-type]
    assert str(refused.value) == message
    assert trainings.began == []


# -- trade-offs ----------------------------------------------------------------------------------


def tradeoff(penalty: float, lr: float, report: Report) -> None:
    """A larger λ gives fewer MACs and less accuracy; the best learning rate is 0.1."""
    macs = int(1000 / penalty)
    report(Reached(1, 0.9 - penalty / 100 - 0.1 * abs(math.log10(lr / 0.1)), macs, macs, 0.5))


def test_the_front_holds_the_trials_that_none_beats():
    front = explore(tradeoff, trials=15, penalties=(0.1, 10.0), rates=(0.01, 1.0))
    assert len(front.trials) == 15
    assert front.cost == 7.5
    points = {t.number: (t.reached.accuracy, t.reached.macs) for t in front.trials if t.reached}

    def beaten(number: int) -> bool:
        accuracy, macs = points[number]
        return any(
            a >= accuracy and m <= macs and (a, m) != (accuracy, macs) for a, m in points.values()
        )

    best = [trial.number for trial in front.best]
    assert sorted(best) == [number for number in points if not beaten(number)]
    assert 0 < len(best) < 15
    assert [points[number][1] for number in best] == sorted(points[number][1] for number in best)
    assert all(0.1 <= trial.penalty <= 10.0 for trial in front.trials if trial.penalty)
    assert all(0.01 <= trial.lr <= 1.0 for trial in front.trials if trial.lr)
    assert f"trials {', '.join(map(str, best))}. All trials together cost 7.50×" in str(front)


def test_a_search_for_tradeoffs_repeats_exactly_and_can_be_extended(tmp_path):
    options = {"penalties": (0.1, 10.0), "rates": (0.01, 1.0)}
    whole = explore(tradeoff, trials=14, **options)
    first = explore(tradeoff, trials=5, storage=tmp_path / "search", **options)
    assert first.trials == whole.trials[:5]
    assert explore(tradeoff, trials=14, storage=tmp_path / "search", **options) == whole
    other = explore(tradeoff, trials=5, seed=1, **options)
    assert {trial.lr for trial in other.trials}.isdisjoint(trial.lr for trial in first.trials)


def test_lambda_and_learning_rate_are_drawn_independently():
    front = explore(tradeoff, trials=10, penalties=(0.1, 10.0), rates=(0.1, 10.0))
    assert all(trial.penalty != trial.lr for trial in front.trials)


def test_trials_that_fail_count_but_are_never_best():
    def diverging(penalty: float, lr: float, report: Report) -> None:
        if lr > 0.1:
            raise TrainingError("the loss is nan")
        tradeoff(penalty, lr, report)

    front = explore(diverging, trials=8, penalties=(0.1, 10.0), rates=(0.01, 1.0))
    assert len(front.trials) == 8
    assert {trial.status for trial in front.trials} == {"complete", "failed"}
    assert all(trial.status == "complete" for trial in front.best)


def test_a_front_of_failures_says_so():
    def failing(penalty: float, lr: float, report: Report) -> None:
        raise TrainingError("no")

    front = explore(failing, trials=2, penalties=(0.1, 10.0), rates=(0.01, 1.0))
    assert front.best == ()
    assert "no trial was completed." in str(front)


def test_tradeoffs_need_macs_and_sensible_limits():
    def sizeless(penalty: float, lr: float, report: Report) -> None:
        report(Reached(1, 0.9, 1000))

    with pytest.raises(OptionError, match="reports no MACs"):
        explore(sizeless, trials=1, penalties=(0.1, 1.0), rates=(0.1, 1.0))
    with pytest.raises(OptionError, match="trials=0 must be"):
        explore(tradeoff, trials=0, penalties=(0.1, 1.0), rates=(0.1, 1.0))
    with pytest.raises(OptionError, match="the smallest λ=1 is above"):
        explore(tradeoff, trials=1, penalties=(1.0, 0.1), rates=(0.1, 1.0))
    with pytest.raises(OptionError, match="the smallest learning rate=0"):
        explore(tradeoff, trials=1, penalties=(0.1, 1.0), rates=(0.0, 1.0))
