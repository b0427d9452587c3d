"""Schedules of our own, and those of torch read off beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import maestro_lod as lod
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.setup import Setup
from maestro_lod.errors import OptionError
from maestro_lod.train.schedule import cosine, linear, milestones, vaswani

EPOCHS, STEPS = 6, 3
BATCHES = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long)) for _ in range(STEPS)]
PER_EPOCH: dict[str, Callable[[SGD], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=EPOCHS),
    "steps": lambda o: lr_scheduler.StepLR(o, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(o, T_max=4),
        ],
        [2],
    ),
}


def prepared() -> tuple[nn.Module, SGD]:
    model = nn.Linear(4, 2)
    return model, SGD(model.parameters(), lr=0.5)


def rates(schedule: Any, model: nn.Module, optimizer: SGD) -> list[float]:
    """Train, and return the learning rate of every step."""
    found: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: found.append(o.param_groups[0]["lr"]))
    lod.fit(model, BATCHES, optimizer=optimizer, epochs=EPOCHS, schedule=schedule)
    return found


@pytest.mark.parametrize("name", PER_EPOCH)
def test_a_scheduler_of_torch_has_its_effect_once_per_epoch(name: str) -> None:
    _, optimizer = prepared()
    twin: LRScheduler = PER_EPOCH[name](optimizer)
    wanted = []
    for _ in range(EPOCHS):
        wanted += [optimizer.param_groups[0]["lr"]] * STEPS
        optimizer.step()
        twin.step()
    model, optimizer = prepared()
    assert rates(PER_EPOCH[name](optimizer), model, optimizer) == pytest.approx(wanted)


def test_one_cycle_has_its_effect_once_per_step() -> None:
    def made(optimizer: SGD) -> LRScheduler:
        return lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=EPOCHS * STEPS, cycle_momentum=False
        )

    _, optimizer = prepared()
    twin, wanted = made(optimizer), []
    for _ in range(EPOCHS * STEPS - 1):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        twin.step()
    model, optimizer = prepared()
    assert rates(made(optimizer), model, optimizer)[:-1] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), "future measurements"),
        (lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, cycle_momentum=True), "cycle_momentum=False"),
        (lambda o: lr_scheduler.StepLR(prepared()[1], 2), "another optimizer"),
        (lambda o: "cosine", "is not usable"),
    ],
)
def test_what_cannot_be_known_beforehand_is_refused_in_words(
    make: Callable[[SGD], Any], words: str
) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(OptionError, match=words):
        rates(make(optimizer), model, optimizer)


def test_groups_that_are_scheduled_differently_are_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.5)
    schedule = lr_scheduler.LambdaLR(optimizer, [lambda e: 1.0, lambda e: 0.5**e])
    with pytest.raises(OptionError, match="treats parameter groups differently"):
        rates(schedule, model, optimizer)


@given(st.integers(2, 400), st.data(), st.floats(0.0, 1.0), st.sampled_from([cosine, linear]))
def test_warm_up_reaches_the_rate_and_the_end_is_what_was_asked_for(
    steps: int, data: st.DataObject, end: float, falling: Callable[..., Callable[[int], float]]
) -> None:
    warmup = data.draw(st.integers(0, steps - 2))
    schedule = falling(steps, warmup=warmup, end=end)
    shares = [schedule(step) for step in range(steps)]
    assert all(0.0 <= share <= 1.0 + 1e-12 for share in shares)
    assert shares[: warmup + 1] == sorted(shares[: warmup + 1])
    assert shares[warmup:] == sorted(shares[warmup:], reverse=True)
    assert math.isclose(max(shares), 1.0)
    assert math.isclose(shares[-1], end, abs_tol=1e-12)
    assert schedule(10 * steps) == shares[-1]


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_recipe_may_fall_from_a_warm_up(name: str) -> None:
    pytest.importorskip("sklearn")
    changes = [f"schedule={{name: {name}, warmup: 4, end: 0.1}}", "data.limit=100", "epochs=3"]
    setup = Setup.of(load_recipe("digits", changes))
    steps = 3 * len(setup.data.train)
    assert setup.schedule is not None
    assert setup.schedule(0) == 0.25
    assert setup.schedule(3) == setup.schedule(4) == 1.0
    assert setup.schedule(steps - 1) == pytest.approx(0.1)


def test_a_warm_up_that_is_the_whole_training_is_refused() -> None:
    with pytest.raises(OptionError, match="warmup=9 must be below the 9 steps of the training"):
        cosine(9, warmup=9)


def test_milestones_multiply_at_the_start_of_their_epochs() -> None:
    schedule = milestones([2, 3], 10)
    assert [schedule(step) for step in (0, 19)] == [1.0, 1.0]
    assert [schedule(step) for step in (20, 29)] == [0.1, 0.1]
    assert schedule(30) == schedule(1000) == 0.1**2
    assert milestones([], 10)(99) == 1.0
    assert milestones([1], 4, factor=0.5)(4) == 0.5


@given(st.integers(1, 5000), st.integers(0, 20_000), st.integers(1, 1024))
def test_vaswani_is_the_formula_of_the_paper(warmup: int, step: int, width: int) -> None:
    s = step + 1
    theirs = 2 * width**-0.5 * min(s**-0.5, s * warmup**-1.5)
    ours = 2 * (width * warmup) ** -0.5 * vaswani(warmup)(step)
    assert ours == pytest.approx(theirs, rel=1e-12)


@given(st.integers(1, 300))
def test_vaswani_grows_to_one_and_falls(warmup: int) -> None:
    shares = [vaswani(warmup)(step) for step in range(2 * warmup + 2)]
    assert shares[warmup - 1] == 1.0 == max(shares)
    assert shares[:warmup] == [(s + 1) / warmup for s in range(warmup)]
    assert all(a > b for a, b in zip(shares[warmup - 1 :], shares[warmup:], strict=False))


def test_schedules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="warmup=0"):
        vaswani(0)
    with pytest.raises(OptionError, match=r"warmup=-3"):
        vaswani(-3)
    with pytest.raises(OptionError, match="steps_per_epoch=0"):
        milestones([1], 0)
