"""Recipes: typed settings of a run, read from YAML and changed by `key=value`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BeforeValidator, Field, ValidationError, create_model, model_validator
from torch.optim import Optimizer

from maestro_lod.cli.recipe_files import recipe_names, recipe_text
from maestro_lod.cli.registry import METHODS, method_named
from maestro_lod.cli.sections import (
    Count,
    NonNegative,
    Number,
    Positive,
    Section,
    Share,
    Switch,
    Whole,
    fields_of,
    in_one_line,
    section_of,
)
from maestro_lod.cli.user_code import import_function, names_user_code
from maestro_lod.cli.yaml_settings import as_yaml, change, parsed, shown, text_of
from maestro_lod.errors import OptionError, listed, suggest
from maestro_lod.train.budget import Budget
from maestro_lod.train.method import Settings

T = TypeVar("T")


def _by_name(usual: str | None = None) -> BeforeValidator:
    """Accept a name in place of a mapping, and add the usual name to a mapping without one."""

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if usual is not None and isinstance(value, Mapping):
            return {"name": usual, **value}
        return value

    return BeforeValidator(named)


Seed = Annotated[Whole, Field(lt=2**63)]  # range of the seeds of torch's generators


class Named(Section):
    """A choice by name, with options."""

    name: str = Field(description="a built-in name, or your own package.module:function")
    options: dict[str, Any] = Field(default={}, description="arguments of that function, by name")


class DataSettings(Named):
    """Settings of the dataset."""

    directory: Path | None = Field(
        default=None, description="directory that contains the dataset; else $LOD_DATA"
    )
    validation: Share = Field(
        default=0.1, description="share of the training set held out for validation"
    )
    limit: Count | None = Field(default=None, description="largest number of samples to use")


class Loss(Section):
    """The loss that is minimized, apart from the penalty."""

    name: str = Field(
        default="cross_entropy", description="cross_entropy, or your own package.module:function"
    )


class SGD(Section):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = Field(default="sgd", description="optimizer")
    lr: Positive = Field(default=0.01, description="learning rate")
    momentum: Share = Field(default=0.9, description="of sgd: momentum factor")
    nesterov: Switch = Field(default=False, description="of sgd: use Nesterov momentum")
    weight_decay: NonNegative = Field(default=0.0, description="decay of the weights towards zero")
    decay_norms: Switch = Field(
        default=True, description="apply weight decay to biases and norms too"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class Adam(Section):
    """Adam or AdamW."""

    name: Literal["adam", "adamw"]
    lr: Positive = Field(default=1e-3, description="learning rate")
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.999), description="of adam: decay rates of both moments"
    )
    eps: Positive = Field(default=1e-8, description="of adam: constant added to the denominator")
    weight_decay: NonNegative = Field(default=0.0, description="decay of the weights towards zero")
    decay_norms: Switch = Field(
        default=True, description="apply weight decay to biases and norms too"
    )


class Constant(Section):
    """Constant learning rate."""

    name: Literal["constant"] = Field(
        default="constant", description="schedule of the learning rate"
    )


class Milestones(Section):
    """Learning rate that is multiplied after some epochs."""

    name: Literal["milestones"]
    epochs: list[Count] = Field(
        description="of milestones: epochs after which the rate is multiplied"
    )
    factor: Positive = Field(default=0.1, description="of milestones: factor at each milestone")


class Vaswani(Section):
    """Linear warm-up, then the inverse square root of the step (Vaswani et al., 2017)."""

    name: Literal["vaswani"]
    warmup: Count = Field(description="of vaswani, cosine, linear: number of warm-up steps")


class Falling(Section):
    """Linear warm-up, then a fall along a cosine or a line to a share of the rate."""

    name: Literal["cosine", "linear"]
    warmup: Whole = Field(
        default=0, description="of vaswani, cosine, linear: number of warm-up steps"
    )
    end: Annotated[Number, Field(ge=0.0, le=1.0)] = Field(
        default=0.0, description="of cosine, linear: final learning rate, as a share of lr"
    )


Optimizers = Annotated[SGD | Adam, Field(discriminator="name"), _by_name("sgd")]
Schedules = Annotated[
    Constant | Milestones | Falling | Vaswani, Field(discriminator="name"), _by_name("constant")
]


class Recipe(Section):
    """Settings that every run has; a subclass for each method adds those of the method."""

    recipe: str = Field(default="", description="name of the recipe that this one began as")
    code: Path | None = Field(
        default=None, description="folder of your own modules; by default that of the recipe"
    )
    description: str = Field(default="", description="one line about the recipe")
    model: Annotated[Named, _by_name()]
    data: Annotated[DataSettings, _by_name()]
    method: str = Field(default="lod", description="training method; see methods.md")
    epochs: Count = Field(description="passes over the training set")
    batch: Annotated[Count, Field(le=2**31 - 1)] = Field(
        default=64, description="samples per batch"
    )
    seed: Seed = Field(default=0, description="seed of all random numbers")
    optimizer: Optimizers = SGD()
    schedule: Schedules = Constant()
    loss: Annotated[Loss, _by_name()] = Loss()
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="reduction of the cross-entropy over a batch"
    )
    label_smoothing: Share = Field(
        default=0.0, description="share of the target spread over all classes"
    )
    clip_norm: Positive | None = Field(
        default=None, description="norm to which gradients are clipped"
    )
    accumulate: Count = Field(default=1, description="batches per optimizer step")
    amp: Switch = Field(default=False, description="use bfloat16 autocast")
    channels_last: Switch = Field(default=False, description="store images channels-last")
    recalibration: Whole = Field(
        default=100, description="batches that recompute BatchNorm statistics before evaluation"
    )
    device: str = Field(default="cpu", description="device to train on, such as cuda or mps")
    threads: Annotated[Count, Field(le=1024)] | None = Field(
        default=None, description="number of CPU threads; torch's default if null"
    )
    checkpoint_every: NonNegative = Field(
        default=300.0, description="seconds between checkpoints, in addition to one per epoch"
    )
    tensorboard: Switch = Field(default=False, description="also write TensorBoard events")

    _method: ClassVar[type[Settings]]

    @property
    def settings(self) -> Settings:
        """The settings of the method."""
        return self._method(**{key: getattr(self, key) for key in _keys_of(self._method)})

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        settings = self.settings  # raises for contradictory settings
        settings.require_optimizer(OPTIMIZERS[self.optimizer.name])
        if self.epochs < (least := settings.least_epochs):
            raise ValueError(
                f"method={self.method} trains in stages, so it needs at least {least} epochs"
            )
        own_loss = self.loss.name != "cross_entropy"
        if own_loss and (self.label_smoothing or self.reduction != "mean"):
            raise ValueError("label_smoothing and reduction apply to loss=cross_entropy only")
        return self


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@functools.cache
def _recipe_of(method: type[Settings]) -> type[Recipe]:
    """Return the recipe class that also has the settings of a method."""
    kind = create_model("Recipe", __base__=Recipe, **fields_of(method))
    kind._method = method
    return kind


def _method_name(settings: Mapping[str, Any]) -> Any:
    return settings.get("method", Recipe.model_fields["method"].default)


def method_of(settings: Mapping[str, Any]) -> type[Settings]:
    """Return the method that settings name: a registered one, or a user's package.module:class."""
    name = _method_name(settings)
    if not isinstance(name, str):
        raise OptionError(f"method={shown(name)} must be text.")
    if ":" not in name:
        return method_named(name)
    chosen: Any = import_function(name, "method", settings.get("code"))
    if not isinstance(chosen, type) or not issubclass(chosen, Settings):
        raise OptionError(
            f"method {name!r} is not a subclass of maestro_lod.train.method.Settings."
        )
    return chosen


def _keys_of(method: type[Settings]) -> set[str]:
    return {entry.name for entry in dataclasses.fields(method)}  # type: ignore[arg-type]


def _owners(keys: Iterable[str], method: type[Settings]) -> dict[str, type[Settings]]:
    """Return which of the keys are settings of other methods alone, and of which one.

    Methods are imported one after the other, and only until every key has an owner.
    """
    foreign = {*keys} - _keys_of(method) - Recipe.model_fields.keys()
    owners: dict[str, type[Settings]] = {}
    for name in METHODS:
        if foreign <= owners.keys():
            break
        owners |= dict.fromkeys(foreign & _keys_of(METHODS[name]), METHODS[name])
    return owners


def _without_foreign(settings: Mapping[str, Any], method: type[Settings]) -> dict[str, Any]:
    """Drop settings of other methods at their defaults; raise OptionError for other values."""
    settings = without_budget_steps(_without_pressure(settings))
    owners = _owners(settings, method)
    useless = [
        key
        for key in settings
        if key in owners and not _is_default(key, settings[key], section_of(owners[key]))
    ]
    if useless:
        raise OptionError(
            f"method={_method_name(settings)} does not use {', '.join(useless)}. Remove it, or "
            "choose another method."
        )
    return {key: value for key, value in settings.items() if key not in owners}


def _without_pressure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the setting `pressure` of older recipes; raise OptionError if it is used."""
    if settings.get("pressure"):
        raise OptionError(
            f"pressure={settings['pressure']} is not supported any more. Set penalty (a λ), or "
            "budget.params (a size)."
        )
    return {key: value for key, value in settings.items() if key != "pressure"}


def without_budget_steps(settings: Mapping[str, Any], *, used: bool = False) -> dict[str, Any]:
    """Drop `budget.steps` of older recipes; raise OptionError for a value unless it was `used`."""
    budget = settings.get("budget")
    if not isinstance(budget, Mapping) or "steps" not in budget:
        return dict(settings)
    if budget["steps"] is not None and not used:
        raise OptionError(
            f"budget.steps={budget['steps']} is not supported any more: a budget is applied after "
            "the epochs of the recipe. Remove it."
        )
    return {**settings, "budget": {key: budget[key] for key in budget if key != "steps"}}


def _is_default(key: str, value: Any, section: type[Section]) -> bool:
    try:
        chosen = getattr(section.model_validate({key: value}), key)
    except ValidationError:
        return False
    return bool(chosen == getattr(section(), key))


def load_recipe(name_or_path: str, changes: Iterable[str] = ()) -> Recipe:
    """Load a recipe and apply changes to it.

    Args:
        name_or_path: The name of a recipe of the library, or the path of a YAML file.
        changes: `key.key=value`, as for `lod train --set`.

    Returns:
        The checked recipe.

    Raises:
        OptionError: If there is no such recipe, or a setting is unknown, wrong or contradictory.

    Example:
        >>> load_recipe("digits", ["epochs=3", "optimizer.lr=0.1"]).epochs
        3
    """
    names = recipe_names()
    if name_or_path in names:
        text, name = recipe_text(name_or_path), name_or_path
    elif name_or_path.endswith((".yaml", ".yml")):
        text, name = text_of(Path(name_or_path)), Path(name_or_path).stem
    else:
        raise OptionError(
            f"there is no recipe {name_or_path!r}.{suggest(name_or_path, names)} Recipes: "
            f"{listed(names, 12)}; or give a .yaml file."
        )
    settings = parsed(text, name_or_path)
    settings.setdefault("recipe", name)
    if name_or_path not in names and names_user_code(settings):
        folder = Path(name_or_path).absolute().parent
        settings["code"] = str(folder / str(settings.get("code") or ""))
    named = change(settings, changes)
    _exchange_limit(settings, named)
    asked = {key.partition(".")[0] for key in named}
    for key in _outdated(settings, asked, name_or_path) - asked:
        settings.pop(key, None)
    return checked(settings, name_or_path)


def _exchange_limit(settings: Mapping[str, Any], named: set[str]) -> None:
    """Let a budget of one kind replace the recipe's budget of the other kind."""
    budget = settings.get("budget")
    kinds = [kind for kind in Budget.kinds if f"budget.{kind}" in named]
    if isinstance(budget, dict) and len(kinds) == 1 and budget[kinds[0]] is not None:
        for other in {*Budget.kinds} - {*kinds}:
            budget.pop(other, None)


def _outdated(settings: Mapping[str, Any], asked: set[str], source: str) -> set[str]:
    """Return the settings of a recipe that contradict the keys of its changes."""
    method = _explaining(source, method_of, settings)
    outdated = set(_owners(settings, method)) if "method" in asked else set()
    # penalty=0 counts as well: ranks are ordered, and all of them stay
    if any(key == "penalty" or settings.get(key) for key in asked & {*method.alternatives}):
        outdated |= {*method.alternatives}
    return outdated


def _explaining(source: str, function: Callable[..., T], *values: Any) -> T:
    """Call a function and name the source of the settings in its errors."""
    try:
        return function(*values)
    except OptionError as error:
        raise OptionError(f"{source}: {error}") from None


def checked(settings: Mapping[str, Any], source: str) -> Recipe:
    """Check settings and return them as a recipe.

    Args:
        settings: The settings, as YAML gives them.
        source: Where they come from, for error messages.

    Returns:
        The recipe.

    Raises:
        OptionError: If a setting is unknown, missing, wrong or contradictory; in one line.
    """
    method = _explaining(source, method_of, settings)
    kind = _recipe_of(method)
    try:
        return kind.model_validate(_explaining(source, _without_foreign, settings, method))
    except ValidationError as error:
        raise OptionError(f"{source}: {in_one_line(error, kind)}") from None


def dumped(recipe: Recipe) -> str:
    """Return a recipe as YAML text that `load_recipe` can read."""
    return as_yaml(recipe.model_dump(mode="json"))
