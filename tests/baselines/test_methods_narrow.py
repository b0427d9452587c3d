"""A narrower model: the widest that fits, found in few tries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from maestro_lod.baselines.narrow import NarrowSettings
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.registry import MODELS
from maestro_lod.cli.setup import Builds, Setup, data_of, model_of
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import count_params, summary
from maestro_lod.train.size_settings import widest


@pytest.mark.parametrize("size", [0.9, 0.5, 0.25, 0.1, 0.05])
@pytest.mark.parametrize("name", ["lenet", "resnet18_small", "vgg19_small", "transformer_small"])
def test_narrow_takes_the_widest_that_fits_in_few_tries(name: str, size: float) -> None:
    build, tries = MODELS[name], []
    width = {"lenet": 120, "transformer_small": 128}.get(name, 16)
    with torch.device("meta"):
        dense = count_params(build())

        def at(width: int) -> int | None:
            tries.append(width)
            try:
                return count_params(build(width=width))
            except OptionError:
                return None

        found = widest(at, width, dense, size)
        sizes = {w: at(w) for w in range(1, width)}
    assert found == max(w for w, n in sizes.items() if n is not None and n <= size * dense)
    possible = [w for w in tries[: 1 - width] if sizes.get(w) is not None]
    assert len(possible) <= 5


def test_narrow_of_a_recipe_keeps_the_seed_and_the_options() -> None:
    recipe = load_recipe("digits", ["method=narrow", "size=0.3", "model.options.width=60"])
    data = data_of(recipe)
    builds = Builds(recipe, data)
    assert builds.width == 60
    model = model_of(recipe, data)
    assert count_params(model) <= 0.3 * count_params(builds())
    same = builds(width=model.fc1.out_features)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True)
    )


def wide(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def fixed() -> nn.Module:
    return wide()


def attentive(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.MultiheadAttention(width, num_heads=4), nn.Linear(width, 10))


def test_widths_that_a_function_of_ones_own_refuses_are_passed_over() -> None:
    change = ["method=narrow", "model.name=tests.baselines.test_methods_narrow:attentive"]
    recipe = load_recipe("digits", change)
    model = recipe.settings.build(Builds(recipe, data_of(recipe)), torch.empty(1, 1, 28, 28))
    assert model[1].in_features == 28  # a quarter of the params are there at 31, which 4 is not in


@pytest.mark.parametrize(("function", "works"), [("wide", True), ("fixed", False)])
def test_a_function_of_ones_own_needs_a_width(
    function: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model = f"model=test_methods_narrow:{function}"
    recipe = load_recipe("digits", ["method=narrow", "size=0.51", model, "data.limit=64"])
    if works:
        assert Setup.of(recipe).model[1].out_features == 4
    else:
        with pytest.raises(OptionError, match="must take a whole number as `width`"):
            Setup.of(recipe)


def test_narrow_can_count_macs() -> None:
    settings = NarrowSettings(size=0.3, size_in="macs")

    class Build:
        width = 120

        def __call__(self, width: int | None = None) -> nn.Module:
            return LeNet(width=width or 120)

    model = settings.build(Build(), torch.empty(1, 1, 28, 28))
    assert summary(model, torch.empty(1, 1, 28, 28)).macs <= 0.3 * 281_640
