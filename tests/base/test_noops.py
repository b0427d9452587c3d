"""Nothing silently does nothing: what would train, press, sample or prove nothing is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from maestro_lod import LoD, decompose, survey
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.deploy.export import export
from maestro_lod.errors import LayerError, OptionError, RankError, TrainingError
from maestro_lod.train.fit import FitOptions, fit
from maestro_lod.train.sampling import STRATEGIES


class Unreached(nn.Module):
    """Has layers that its forward never calls, as Longformer's global projections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.beside = nn.Linear(64, 64)
        self.calls_beside = False

    def forward(self, x: Tensor) -> Tensor:
        if self.calls_beside:
            self.beside(x.new_zeros(1, 64))
        return self.last(F.relu(self.first(x)))


def low_rank_model() -> nn.Module:
    torch.manual_seed(0)
    return decompose(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.05)


def backward(model: nn.Module, train: LoD) -> dict[str, int]:
    with train.step() as drawn:
        F.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])).backward()
    return drawn


def steps(model: nn.Module, train: LoD, count: int) -> list[str]:
    """Do so many steps without a penalty, and return which layers were drawn."""
    names: list[str] = []
    for _ in range(count):
        names += backward(model, train)
        train.optimizer.step()
        train.optimizer.zero_grad()
    return names


# -- an epoch that did less than it should --------------------------------------------------------


def test_a_penalty_that_is_never_applied_is_refused() -> None:
    train = LoD(model := low_rank_model(), sgd(model), penalty=0.1)
    steps(model, train, 3)
    with pytest.raises(TrainingError, match=r"penalty=0.1 was not applied.*penalty_loss\(\)"):
        train.end_epoch()


@pytest.mark.parametrize("way", ["loss", "gradients", "backward", "proximal", "none"])
def test_every_way_to_apply_a_penalty_counts(way: str) -> None:
    model = low_rank_model()
    train = LoD(
        model, sgd(model), penalty=0.0 if way == "none" else 0.1, proximal=way == "proximal",
        threshold=None,
    )  # fmt: skip
    for _ in range(2):
        if way == "loss":
            train.penalty_loss().backward()
        if way == "backward":
            train.backward(lambda: model(torch.randn(4, 8)), lambda output: output.square().mean())
        else:
            backward(model, train)
        if way == "gradients":
            train.add_penalty_gradients()
        train.optimizer.step()
        train.end_epoch()
    assert train.epoch == 2


def test_a_penalty_is_due_in_every_epoch_and_only_if_a_step_had_it() -> None:
    train = LoD(model := low_rank_model(), sgd(model), threshold=None)
    steps(model, train, 1)
    train.penalty = 0.1  # from the next epoch on
    train.end_epoch()
    train.penalty_loss().backward()
    steps(model, train, 1)
    train.end_epoch()
    steps(model, train, 1)
    with pytest.raises(TrainingError, match="not applied in epoch 2"):
        train.end_epoch()


def test_an_epoch_without_a_step_of_the_optimizer_is_refused() -> None:
    train = LoD(model := low_rank_model(), sgd(model))
    steps(model, train, 1)
    train.end_epoch()
    backward(model, train)
    with pytest.raises(TrainingError, match=r"optimizer.step\(\) was never called in epoch 1"):
        train.end_epoch()
    train.optimizer.step()
    train.end_epoch()


def test_a_step_of_another_optimizer_does_not_count() -> None:
    train = LoD(model := low_rank_model(), sgd(model))
    backward(model, train)
    sgd(model).step()
    with pytest.raises(TrainingError, match="on the method's optimizer"):
        train.end_epoch()


def test_what_was_done_before_a_resume_counts() -> None:
    train = LoD(model := low_rank_model(), sgd(model), penalty=1e-3)
    train.penalty_loss().backward()
    steps(model, train, 1)
    state = train.state_dict()
    for part in ((), ("optimized", "penalty_use", "unseen", "left_out")):  # older states have none
        again = LoD(model, train.optimizer, penalty=1e-3)
        again.load_state_dict({key: value for key, value in state.items() if key not in part})
        again.end_epoch()
        assert again.epoch == 1


def test_a_step_inside_a_step_is_refused() -> None:
    train = LoD(model := low_rank_model(), sgd(model))
    with pytest.raises(TrainingError, match=r"has not ended.*with train.step\(\)"), train.step():
        backward(model, train)
    assert all(layer.active_rank == layer.rank for layer in (model[0], model[2]))


# -- options that would do nothing ----------------------------------------------------------------


def test_a_model_that_is_frozen_is_refused() -> None:
    model = low_rank_model()
    optimizer = sgd(model)
    with pytest.raises(OptionError, match=r"nothing for LoD to train.*frozen"):
        LoD(model.requires_grad_(False), optimizer)


@pytest.mark.parametrize("value", ["false", "True", 1, None])
def test_text_is_neither_true_nor_false(value: Any) -> None:
    model = low_rank_model()
    for option in ("proximal", "full_pass", "distill"):
        with pytest.raises(OptionError, match=rf"{option}=.*True or False"):
            LoD(model, sgd(model), **{option: value})
    with pytest.raises(OptionError, match=r"amp=.*True or False"):
        FitOptions(amp=value)


def test_a_min_rank_above_all_ranks_is_refused_and_the_largest_is_not() -> None:
    model = low_rank_model()
    with pytest.raises(OptionError, match=r"min_rank=7 is above.*largest rank is 6"):
        LoD(model, sgd(model), min_rank=7)
    LoD(model, sgd(model), min_rank=6)


def test_rank_zero_for_all_layers_is_refused_and_by_name_it_is_not() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    for refusing in (decompose, survey):
        with pytest.raises(RankError, match="ranks=0 would leave nothing to train"):
            refusing(model, ranks=0)
    assert decompose(model, ranks={"0": 0})[0].rank == 0


# -- layers that the forward never reaches --------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_that_the_forward_never_reaches_are_not_sampled(strategy: str) -> None:
    train = LoD(model := decompose(Unreached()), sgd(model), sampling=strategy)
    assert "beside" in steps(model, train, 20)
    with pytest.warns(UserWarning, match="never reached these layers in this epoch: beside"):
        train.end_epoch()
    assert {*steps(model, train, 20)} == {"first", "last"}
    train.end_epoch()  # without another warning

    again = LoD(model, train.optimizer, sampling=strategy)
    again.load_state_dict(train.state_dict())
    assert {*steps(model, again, 20)} == {"first", "last"}
    again.end_epoch()

    model.calls_beside = True
    steps(model, again, 1)
    assert "beside" in steps(model, again, 100)


def test_an_epoch_of_one_step_may_draw_a_layer_that_is_not_reached() -> None:
    # which layer a step draws is left to chance, and here it has to be this one
    for seed in range(9):
        train = LoD(model := decompose(Unreached()), sgd(model), seed=seed)
        if steps(model, train, 1) == ["beside"]:
            break
    else:
        pytest.fail("no seed draws the layer that holds most of the ranks")
    with pytest.warns(UserWarning, match="never reached these layers in this epoch: beside"):
        train.end_epoch()
    for _ in range(5):
        steps(model, train, 1)
        train.end_epoch()


# -- models that have diverged --------------------------------------------------------------------


def with_bias(model: nn.Module, value: float) -> nn.Module:
    nn.init.constant_(model[-1].bias, value)
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("threshold", [None, 1e-7])
def test_an_epoch_is_not_ended_with_parameters_that_are_not_finite(
    value: float, threshold: float | None
) -> None:
    train = LoD(model := low_rank_model(), sgd(model), threshold=threshold)
    steps(model, train, 1)
    with_bias(model, value)
    with pytest.raises(TrainingError, match=r"2\.bias.*not finite"):
        train.end_epoch()


def test_fit_refuses_parameters_that_are_not_finite_by_any_method() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    data = [(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))]
    optimizer = optim.SGD(model.parameters(), lr=float("inf"))
    with pytest.raises(TrainingError, match="not finite"):
        fit(model, data, optimizer=optimizer, epochs=1)


def test_what_is_frozen_may_be_infinite() -> None:
    model = low_rank_model()
    model.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    train = LoD(model, sgd(model))
    steps_of = nn.Sequential(*list(model.children()))
    steps(steps_of, train, 1)
    train.end_epoch()
    assert train.epoch == 1


def test_a_result_never_holds_nan(tmp_path: Path) -> None:
    run = Run(tmp_path, load_recipe("digits"))
    value = {"test": {"accuracy": 0.5, "loss": float("nan")}, "seconds": [1.0, float("inf")]}
    with pytest.raises(TrainingError, match=r"result.json.*test\.loss, seconds is NaN"):
        run.write_json("result.json", value)
    assert not run.finished
    run.write_json("result.json", {"test": {"accuracy": 0.5}})
    assert json.loads((tmp_path / "result.json").read_text()) == {"test": {"accuracy": 0.5}}


def test_a_model_that_answers_with_nan_alone_is_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model, example = low_rank_model(), torch.randn(4, 8)
    with pytest.raises(LayerError, match="returns only NaN"):
        export(with_bias(model, float("nan")), path, example=example)
    assert not path.exists()
    export(with_bias(model, 0.0), path, example=example)
