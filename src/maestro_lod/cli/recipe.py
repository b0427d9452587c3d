"""A recipe: every setting of a run, typed; read from YAML, changed by key=value, or refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BeforeValidator, Field, ValidationError, create_model, model_validator
from torch.optim import Optimizer

from maestro_lod.cli.config_errors import in_one_line
from maestro_lod.cli.methods import METHODS, method_named
from maestro_lod.cli.recipe_files import recipe_names, recipe_text
from maestro_lod.cli.sections import (
    Count,
    NonNegative,
    Number,
    Positive,
    Section,
    Share,
    Switch,
    Whole,
    as_dataclass,
    fields_of,
    section_of,
)
from maestro_lod.cli.user_code import names_own_code, own_function
from maestro_lod.cli.yaml_settings import as_yaml, change, parsed, shown, text_of
from maestro_lod.errors import OptionError, listed, suggest
from maestro_lod.train.method import Settings
from maestro_lod.train.objective import Budget

T = TypeVar("T")


def _by_name(usual: str | None = None) -> BeforeValidator:
    """Let a name stand for a mapping with that name, and a mapping without one mean the usual."""

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if usual is not None and isinstance(value, Mapping):
            return {"name": usual, **value}
        return value

    return BeforeValidator(named)


Seed = Annotated[Whole, Field(lt=2**63)]  # what torch's generators take


class Named(Section):
    """Something chosen by name, with options."""

    name: str = Field(description="built in, or your own package.module:function")
    options: dict[str, Any] = Field(default={}, description="its arguments, by name")


class DataSettings(Named):
    """Which data, and how much of it."""

    directory: Path | None = Field(default=None, description="where it lies; else $LOD_DATA")
    validation: Share = Field(default=0.1, description="share of the training set kept apart")
    limit: Count | None = Field(default=None, description="use only so many samples")


class Loss(Section):
    """What is minimized beside the penalty."""

    name: str = Field(default="cross_entropy", description="or your own package.module:function")


class SGD(Section):
    name: Literal["sgd"] = Field(default="sgd", description="how weights follow gradients")
    lr: Positive = Field(default=0.01, description="learning rate")
    momentum: Share = Field(default=0.9, description="of sgd: share of the last step that goes on")
    nesterov: Switch = Field(default=False, description="of sgd: look ahead by the momentum")
    weight_decay: NonNegative = Field(default=0.0, description="pull towards zero")
    decay_norms: Switch = Field(default=True, description="decay biases and norms too")

    @model_validator(mode="after")
    def _consistent(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class Adam(Section):
    name: Literal["adam", "adamw"]
    lr: Positive = Field(default=1e-3, description="learning rate")
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.999), description="of adam: decay of both moments"
    )
    eps: Positive = Field(default=1e-8, description="of adam: added to the denominator")
    weight_decay: NonNegative = Field(default=0.0, description="pull towards zero")
    decay_norms: Switch = Field(default=True, description="decay biases and norms too")


class Constant(Section):
    name: Literal["constant"] = Field(default="constant", description="of the learning rate")


class Milestones(Section):
    name: Literal["milestones"]
    epochs: list[Count] = Field(description="of milestones: after which the rate falls")
    factor: Positive = Field(default=0.1, description="of milestones: to which share of itself")


class Vaswani(Section):
    name: Literal["vaswani"]
    warmup: Count = Field(description="of vaswani, cosine, linear: steps up to the rate")


class Falling(Section):
    name: Literal["cosine", "linear"]
    warmup: Whole = Field(default=0, description="of vaswani, cosine, linear: steps up to the rate")
    end: Annotated[Number, Field(ge=0.0, le=1.0)] = Field(
        default=0.0, description="of cosine, linear: share of the rate at the end"
    )


Optimizers = Annotated[SGD | Adam, Field(discriminator="name"), _by_name("sgd")]
Schedules = Annotated[
    Constant | Milestones | Falling | Vaswani, Field(discriminator="name"), _by_name("constant")
]


class Recipe(Section):
    """Every setting of a run; each method has a kind of recipe with its own settings too."""

    recipe: str = Field(default="", description="the recipe this began as")
    code: Path | None = Field(default=None, description="folder of your own modules; the recipe's")
    description: str = Field(default="", description="one line about it")
    model: Annotated[Named, _by_name()]
    data: Annotated[DataSettings, _by_name()]
    method: str = Field(default="lod", description="how the model is trained; see methods.md")
    epochs: Count = Field(description="passes over the training set")
    batch: Annotated[Count, Field(le=2**31 - 1)] = Field(
        default=64, description="samples per batch"
    )
    seed: Seed = Field(default=0, description="of all randomness")
    optimizer: Optimizers = SGD()
    schedule: Schedules = Constant()
    loss: Annotated[Loss, _by_name()] = Loss()
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="of the cross-entropy over a batch"
    )
    label_smoothing: Share = Field(default=0.0, description="share spread over all classes")
    clip_norm: Positive | None = Field(default=None, description="largest norm of the gradient")
    accumulate: Count = Field(default=1, description="batches per optimizer step")
    amp: Switch = Field(default=False, description="compute in bfloat16 where that is safe")
    channels_last: Switch = Field(default=False, description="memory layout of images")
    recalibration: Whole = Field(default=100, description="batches for BatchNorm before evaluation")
    device: str = Field(default="cpu", description="where to train, such as cuda or mps")
    threads: Annotated[Count, Field(le=1024)] | None = Field(
        default=None, description="CPU threads; torch's choice if none"
    )
    checkpoint_every: NonNegative = Field(
        default=300.0, description="seconds, beside one per epoch"
    )
    tensorboard: Switch = Field(default=False, description="write events for TensorBoard too")

    _method: ClassVar[type[Settings]]

    @property
    def settings(self) -> Settings:
        """What is chosen of the method."""
        return as_dataclass(self._method, self)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        self.settings.require_optimizer(OPTIMIZERS[self.optimizer.name])
        if self.epochs < (least := self.settings.least_epochs):
            raise ValueError(
                f"method={self.method} trains in stages: give it {least} epochs or more"
            )
        own_loss = self.loss.name != "cross_entropy"
        if own_loss and (self.label_smoothing or self.reduction != "mean"):
            raise ValueError("label_smoothing and reduction belong to loss=cross_entropy")
        return self


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@functools.cache
def _recipe_of(method: type[Settings]) -> type[Recipe]:
    """Return the kind of recipe that has the settings of a method too."""
    kind = create_model("Recipe", __base__=Recipe, **fields_of(method))
    kind._method = method
    return kind


def _method_name(settings: Mapping[str, Any]) -> Any:
    return settings.get("method", Recipe.model_fields["method"].default)


def method_of(settings: Mapping[str, Any]) -> type[Settings]:
    """Return the method that settings choose, by name or as a user's own package.module:class."""
    name = _method_name(settings)
    if not isinstance(name, str):
        raise OptionError(f"method={shown(name)} must be text.")
    if ":" not in name:
        return method_named(name)
    found: Any = own_function(name, "method", settings.get("code"))
    if not isinstance(found, type) or not issubclass(found, Settings):
        raise OptionError(f"method {name!r} is no class of maestro_lod.train.method.Settings.")
    return found


def _keys_of_others(method: type[Settings]) -> dict[str, type[Settings]]:
    """Return the settings that belong to other methods alone, and to which."""
    own = {entry.name for entry in dataclasses.fields(method)}  # type: ignore[arg-type]
    return {
        entry.name: other
        for other in METHODS.values()
        for entry in dataclasses.fields(other)  # type: ignore[arg-type]
        if entry.name not in own
    }


def _without_others(settings: Mapping[str, Any], method: type[Settings]) -> dict[str, Any]:
    """Leave out settings of other methods that are at their defaults, and refuse what is not."""
    own = {entry.name for entry in dataclasses.fields(method)}  # type: ignore[arg-type]
    if not settings.keys() - own - Recipe.model_fields.keys():
        return dict(settings)  # the other methods need not be imported
    others = _keys_of_others(method)
    given = {key: section_of(others[key]) for key in others if key in settings}
    if useless := [key for key, of in given.items() if not _is_usual(key, settings[key], of)]:
        raise OptionError(f"method={_method_name(settings)} has no use for {', '.join(useless)}.")
    return {key: value for key, value in settings.items() if key not in others}


def _is_usual(key: str, value: Any, section: type[Section]) -> bool:
    """Say whether a value is the default of a key."""
    try:
        chosen = getattr(section.model_validate({key: value}), key)
    except ValidationError:
        return False
    return bool(chosen == getattr(section(), key))


def load_recipe(name_or_path: str, changes: Iterable[str] = ()) -> Recipe:
    """Return a recipe by name or from a YAML file, with `key.key=value` changes applied."""
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
    if name_or_path not in names and names_own_code(settings):
        beside = Path(name_or_path).absolute().parent
        settings["code"] = str(beside / str(settings.get("code") or ""))
    named = change(settings, changes)
    _exchange_limit(settings, named)
    asked = {key.partition(".")[0] for key in named}
    for key in _outdated(settings, asked, name_or_path) - asked:
        settings.pop(key, None)
    return checked(settings, name_or_path)


def _exchange_limit(settings: Mapping[str, Any], named: set[str]) -> None:
    """Let a limit that is named take the place of a recipe's of another kind: one is all it has."""
    budget = settings.get("budget")
    kinds = [kind for kind in Budget.kinds if f"budget.{kind}" in named]
    if isinstance(budget, dict) and len(kinds) == 1 and budget[kinds[0]] is not None:
        for other in {*Budget.kinds} - {*kinds}:
            budget.pop(other, None)


def _outdated(settings: Mapping[str, Any], asked: set[str], source: str) -> set[str]:
    """Return what a recipe says, but has no place beside what is asked for."""
    method = _explaining(source, method_of, settings)
    outdated = set(_keys_of_others(method)) if "method" in asked else set()
    # λ = 0 is a wish too: ordered ranks, and all of them stay
    if any(key == "penalty" or settings.get(key) for key in asked & {*method.alternatives}):
        outdated |= {*method.alternatives}
    return outdated


def _explaining(source: str, function: Callable[..., T], *values: Any) -> T:
    """Call a function; what it refuses is said to be in a source."""
    try:
        return function(*values)
    except OptionError as error:
        raise OptionError(f"{source}: {error}") from None


def checked(settings: Mapping[str, Any], source: str) -> Recipe:
    """Return settings as a recipe, or refuse them in one line that says what is wrong where."""
    method = _explaining(source, method_of, settings)
    kind = _recipe_of(method)
    try:
        return kind.model_validate(_explaining(source, _without_others, settings, method))
    except ValidationError as error:
        raise OptionError(f"{source}: {in_one_line(error, kind)}") from None


def dumped(recipe: Recipe) -> str:
    """Return a recipe as YAML that `load_recipe` reads back."""
    return as_yaml(recipe.model_dump(mode="json"))
