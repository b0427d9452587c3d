"""Pressure is λ without units: the same for every scale of model, learning rate and length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam

from maestro_lod import Budget, LoD, Pressure, decompose, fit
from maestro_lod.errors import OptionError
from maestro_lod.train.fit import FitOptions
from maestro_lod.train.penalty import importance
from maestro_lod.train.pressure import penalty_for


def small_model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return decompose(nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)))


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(count)]


def lam(model: nn.Module, lr: float, steps: float, momentum: float = 0.0, **options) -> float:
    optimizer = SGD(model.parameters(), lr=lr, momentum=momentum)
    return penalty_for(10.0, model, optimizer, steps, **{"proximal": False, **options})


def test_the_definition_holds():
    model = small_model()
    layers = [m for m in model.modules() if hasattr(m, "u")]
    norms = [n for m in layers for n in (*m.u.norm(dim=0).tolist(), *m.v.norm(dim=1).tolist())]
    mean_rank, mean_norm = (6 + 4) / 2, sum(norms) / len(norms)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    penalty = penalty_for(10.0, model, optimizer, 500, proximal=False)
    assert penalty * 500 * (0.1 / (1 - 0.9)) * mean_rank / mean_norm == pytest.approx(10.0)


@given(lr=st.floats(1e-4, 1.0), steps=st.floats(1.0, 1e5), by=st.floats(0.1, 10.0))
def test_twice_the_rates_or_steps_mean_half_the_penalty(lr, steps, by):
    model = small_model()
    base = lam(model, lr, steps)
    assert lam(model, lr * by, steps) == pytest.approx(base / by)
    assert lam(model, lr, steps * by) == pytest.approx(base / by)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_larger_weights_mean_a_larger_penalty(scale):
    model, scaled = small_model(), small_model()
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(scale)
    assert lam(scaled, 0.1, 10) == pytest.approx(scale * lam(model, 0.1, 10), rel=1e-5)


def test_momentum_counts_where_the_penalty_goes_through_it():
    model = small_model()
    assert lam(model, 0.1, 10, 0.9) == pytest.approx(lam(model, 0.1, 10) / 10)
    assert lam(model, 0.1, 10, 0.9, proximal=True) == pytest.approx(lam(model, 0.1, 10))


def test_frozen_layers_do_not_count():
    model, frozen = small_model(), small_model()
    frozen[0].requires_grad_(False)
    alone = nn.Sequential(model[2])
    optimizer = SGD([p for p in frozen.parameters() if p.requires_grad], lr=0.1)
    here = penalty_for(1.0, frozen, optimizer, 10, proximal=False)
    there = penalty_for(1.0, alone, SGD(alone.parameters(), lr=0.1), 10, proximal=False)
    assert here == pytest.approx(there)


def test_fit_fills_in_how_long_training_lasts():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    expected = penalty_for(0.05, model, optimizer, 12, proximal=False)
    train = LoD(model, optimizer, penalty=Pressure(0.05), threshold=1e-3)
    fit(model, batches(), optimizer=optimizer, method=train, epochs=3)
    assert train.penalty == pytest.approx(expected)


def test_fit_counts_the_schedule_and_accumulation():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    expected = penalty_for(0.05, model, optimizer, 2 * (1 + 0.5), proximal=False)
    train = LoD(model, optimizer, penalty=Pressure(0.05), threshold=1e-3)
    fit(
        model, batches(), optimizer=optimizer, method=train, epochs=2,
        options=FitOptions(accumulate=2), schedule=lambda step: 1.0 if step < 2 else 0.5,
    )  # fmt: skip
    assert train.penalty == pytest.approx(expected)


def test_resuming_keeps_the_penalty_that_was_chosen():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    train = LoD(model, optimizer, penalty=Pressure(0.05, steps=100), threshold=1e-3)
    with torch.no_grad():
        model[0].u.mul_(2.0)
    again = LoD(model, optimizer, penalty=Pressure(0.05), threshold=1e-3)
    again.load_state_dict(train.state_dict())
    fit(model, batches(), optimizer=optimizer, method=again, epochs=1)
    assert again.penalty == train.penalty


def test_pressure_shrinks_what_does_not_matter():
    model = small_model(64)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train = LoD(model, optimizer, penalty=Pressure(200.0), proximal=True, min_rank=1)
    before = sum(len(v) for v in importance(model).values())
    fit(model, batches(), optimizer=optimizer, method=train, epochs=60)
    assert sum(len(v) for v in importance(model).values()) < before


def step(train: LoD) -> None:
    with train.step():
        train.model(torch.randn(2, 6)).sum().backward()


def test_a_loop_of_its_own_has_to_say_how_long_it_lasts():
    model = small_model()
    train = LoD(model, SGD(model.parameters(), lr=0.1), penalty=Pressure(5.0))
    with pytest.raises(OptionError, match=r"how long training lasts: Pressure\(5, steps="):
        step(train)
    step(LoD(model, SGD(model.parameters(), lr=0.1), penalty=Pressure(5.0, steps=10)))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (lambda: Pressure(-1.0), "pressure=-1"),
        (lambda: Pressure(0.0), "presses nothing"),
        (lambda: Pressure(float("nan")), "pressure=nan"),
        (lambda: Pressure(5.0, steps=0), "above 0"),
        (lambda: -1.0, r"penalty=-1.0 must be .* zero or larger. Or name the size: Budget"),
        (lambda: "64", "penalty='64'"),
        (lambda: {"params": 0.2}, "penalty={'params': 0.2}"),
        (lambda: True, "penalty=True"),
        (lambda: Budget(), "either params or macs"),
    ],
)
def test_what_makes_no_sense_is_refused(choice, message):
    model = small_model()
    with pytest.raises(OptionError, match=message):
        LoD(model, SGD(model.parameters(), lr=0.1), penalty=choice())


def test_adam_needs_the_proximal_step():
    model = small_model()
    with pytest.raises(OptionError, match="proximal=True with Adam"):
        LoD(model, Adam(model.parameters()), penalty=Pressure(5.0, steps=10))


def test_data_without_a_length_needs_the_steps():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)

    class Endless:
        def __iter__(self):
            return iter(batches())

    with pytest.raises(OptionError, match="no length"):
        fit(
            model, Endless(), optimizer=optimizer, epochs=1,
            method=LoD(model, optimizer, penalty=Pressure(0.05), threshold=1e-3),
        )  # fmt: skip
