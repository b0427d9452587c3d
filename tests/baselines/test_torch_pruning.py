"""Torch-Pruning as a method: within its size, plain, resumed to the same end."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from maestro_lod.baselines.compare.contenders import contender
from maestro_lod.baselines.models import resnet18_small
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import count_params
from tests.support.runs import assert_same_end, stopped

pytest.importorskip("torch_pruning")

METHOD = "maestro_lod.baselines.torch_pruning:TorchPruningSettings"


@pytest.mark.parametrize("size", [0.5, 0.25, 0.1])
@pytest.mark.parametrize(
    "build, shape", [(LeNet, (1, 1, 28, 28)), (resnet18_small, (1, 3, 32, 32))]
)
def test_what_is_left_is_within_the_size_and_runs(build, shape, size: float) -> None:
    from maestro_lod.baselines.torch_pruning import narrow, prune

    model, x = build(), torch.randn(shape)
    limit = int(size * count_params(model))
    pruned = prune(copy.deepcopy(model), x, limit)
    assert 0.9 * limit <= count_params(pruned) <= limit
    assert pruned.eval()(x).shape == (1, 10)
    saved = pruned.state_dict()
    again = narrow(build(), {name: [*t.shape] for name, t in saved.items()})
    again.load_state_dict(saved)
    assert torch.equal(again.eval()(x), pruned(x))
    assert str(again) == str(pruned)


@pytest.mark.slow
def test_a_run_that_was_stopped_before_or_after_the_pruning_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOD_TRUST", "1")
    few = ["data.limit=120", "batch=20", "epochs=4", "schedule=constant", "threads=1"]
    recipe = load_recipe("digits", [*few, f"method={METHOD}", "size=0.3"])
    whole = Run.create(recipe, tmp_path / "whole")
    result = whole.train()
    assert result["size"]["relative_params"] <= 0.3
    assert result["ledger"]["relative_macs"] < 1.0
    for steps in (5, 17):
        place = tmp_path / str(steps)
        stopped(recipe, place, steps)
        Run.open(place).train()
        assert_same_end(whole.directory, place)
    model, data = Run.open(whole.directory).trained()
    assert count_params(model) == result["size"]["params"]
    model.eval()(data.example)


def test_what_cannot_be_reached_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    few = ["data.limit=60", "epochs=2", "schedule=constant"]
    recipe = load_recipe("digits", [*few, f"method={METHOD}", "size=0.0001"])
    with pytest.raises(OptionError, match=r"torch-pruning cannot reduce .* to 4 params"):
        Run.create(recipe, tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


def test_a_model_that_the_package_cannot_follow_is_refused_in_one_line() -> None:
    from maestro_lod.baselines.torch_pruning import prune

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("not on this input")

    with pytest.raises(OptionError, match=r"cannot prune Branching \(RuntimeError: not on this"):
        prune(Branching(), torch.randn(1, 4), 3)


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    monkeypatch.delitem(sys.modules, "maestro_lod.baselines.torch_pruning", raising=False)
    with pytest.raises(OptionError, match=r"needs its package .*'maestro-lod\[compare\]'"):
        contender("torch-pruning")
