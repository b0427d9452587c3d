"""A recipe: every setting of a run, typed; read from YAML, changed by key=value, or refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from maestro_lod.errors import OptionError, listed, nearest


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


# YAML reads 128e-5 as text, so numbers may come as text; whole numbers and switches may not
Number = Annotated[float, BeforeValidator(_no_switch)]
Share = Annotated[Number, Field(ge=0.0, lt=1.0)]
Positive = Annotated[Number, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[Number, Field(ge=0.0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
_BY_NAME = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)


class Section(BaseModel):
    """Settings that refuse keys they do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Named(Section):
    """Something chosen by name, with options."""

    name: str = Field(description="a built-in name, or your own package.module:function")
    options: dict[str, Any] = Field(default={}, description="keyword arguments for it")


class DataSettings(Named):
    """Which data, and how much of it."""

    directory: Path | None = Field(default=None, description="where data lies; else $LOD_DATA")
    validation: Share = Field(default=0.1, description="share of the training set kept apart")
    limit: Count | None = Field(default=None, description="use only so many samples")


class Decomposition(Section):
    """Which layers become low-rank, as in `maestro_lod.decompose`."""

    only: list[str] | None = None
    skip: list[str] = []
    ranks: int | float | dict[str, int | float] | None = None
    tied: Literal["keep", "share"] = "keep"


class SGD(Section):
    name: Literal["sgd"] = "sgd"
    lr: Positive = 0.01
    momentum: Share = 0.9
    nesterov: Switch = False
    weight_decay: NonNegative = 0.0
    decay_norms: Switch = Field(default=True, description="decay biases and norms too")


class Adam(Section):
    name: Literal["adam", "adamw"]
    lr: Positive = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    decay_norms: Switch = Field(default=True, description="decay biases and norms too")


class Constant(Section):
    name: Literal["constant"] = "constant"


class Milestones(Section):
    name: Literal["milestones"]
    epochs: list[Count]
    factor: Positive = 0.1


class Vaswani(Section):
    name: Literal["vaswani"]
    warmup: Count = Field(description="steps until the learning rate is reached")


class Recipe(Section):
    """Every setting of a run."""

    recipe: str = Field(default="", description="the recipe this began as")
    description: str = ""
    model: Annotated[Named, _BY_NAME]
    data: Annotated[DataSettings, _BY_NAME]
    method: Literal["lod", "dense"] = "lod"
    decompose: Decomposition = Decomposition()
    epochs: Count
    batch: Count = 64
    seed: Whole = 0
    optimizer: Annotated[SGD | Adam, Field(discriminator="name"), _BY_NAME] = SGD()
    schedule: Annotated[Constant | Milestones | Vaswani, Field(discriminator="name"), _BY_NAME] = (
        Constant()
    )
    penalty: NonNegative = Field(default=0.0, description="λ of the group lasso")
    threshold: NonNegative = Field(default=1e-7, description="importance of ranks to remove")
    sampling: Literal["pairs", "iid", "layer_uniform", "independent"] = "pairs"
    proximal: Switch = Field(default=False, description="exact zeros under any optimizer")
    shrink: Switch = Field(default=True, description="remove useless ranks after each epoch")
    min_rank: Whole = 0
    full_pass: Switch = Field(default=False, description="one more pass at full rank per step")
    distill: Switch = Field(default=False, description="train the sampled pass on the full one's")
    loss: Annotated[Named, _BY_NAME] = Named(name="cross_entropy")
    reduction: Literal["mean", "sum"] = "mean"
    label_smoothing: Share = 0.0
    clip_norm: Positive | None = None
    accumulate: Count = 1
    amp: Switch = Field(default=False, description="compute in bfloat16 where that is safe")
    channels_last: Switch = Field(default=False, description="memory layout of images")
    recalibration: Whole = Field(
        default=100, description="batches for BatchNorm's statistics before evaluation"
    )
    device: str = "cpu"
    threads: Count | None = Field(default=None, description="CPU threads; torch's choice if none")
    checkpoint_every: NonNegative = Field(default=300.0, description="seconds, beside epochs")
    tensorboard: Switch = False

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.distill and not self.full_pass:
            raise ValueError("distill needs its teacher: set full_pass=true too")
        fields = type(self).model_fields
        useless = [key for key in _LOW_RANK_ONLY if getattr(self, key) != fields[key].default]
        if self.method == "dense" and useless:
            raise ValueError(f"method=dense has no use for {', '.join(useless)}")
        own_loss = self.loss.name != "cross_entropy"
        if own_loss and (self.label_smoothing or self.reduction != "mean"):
            raise ValueError("label_smoothing and reduction belong to loss=cross_entropy")
        return self


_LOW_RANK_ONLY = (
    "decompose", "penalty", "threshold", "sampling", "proximal", "shrink", "min_rank", "full_pass",
    "distill",
)  # fmt: skip


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the library."""
    folder = resources.files("maestro_lod.tasks") / "recipes"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name[-5:] == ".yaml")


def load_recipe(name_or_path: str, changes: Iterable[str] = ()) -> Recipe:
    """Return a recipe by name or from a YAML file, with `key.key=value` changes applied."""
    names = recipe_names()
    if name_or_path in names:
        text = (
            resources.files("maestro_lod.tasks") / "recipes" / f"{name_or_path}.yaml"
        ).read_text()
        name = name_or_path
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        name = path.stem
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OptionError(f"recipe {path} cannot be read ({reason}).") from None
    else:
        raise OptionError(
            f"there is no recipe {name_or_path!r}.{nearest(name_or_path, names)} Recipes: "
            f"{listed(names, 12)}; or give a .yaml file."
        )
    settings = _parsed(text, name_or_path)
    settings.setdefault("recipe", name)
    changes = list(changes)
    for change in changes:
        _apply(change, settings)
    if settings.get("method") == "dense":  # what the recipe says for low-rank training falls away
        asked = {change.partition("=")[0].partition(".")[0].strip() for change in changes}
        for key in set(_LOW_RANK_ONLY) - asked if "method" in asked else ():
            settings.pop(key, None)
    return checked(settings, name_or_path)


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"{source} is no valid YAML: {reason}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise OptionError(f"{source} holds no settings: it must be a mapping of keys to values.")
    return settings


def _apply(change: str, settings: dict[str, Any]) -> None:
    """Set one `key.key=value`; a new `name` drops the other settings of the old one."""
    key, equals, text = change.partition("=")
    *outer, last = key.strip().split(".")
    if not equals or not all((*outer, last)):
        raise OptionError(f"{change!r} is no setting: write key=value, such as penalty=1e-4.")
    try:
        value = yaml.safe_load(text) if text.strip() else None
    except yaml.YAMLError:
        raise OptionError(f"the value in {change!r} is no valid YAML.") from None
    section = settings
    for part in outer:
        inner = section.get(part, {})
        section[part] = dict(inner) if isinstance(inner, Mapping) else {"name": inner}
        section = section[part]
    if last == "name" and outer and section.get("name") != value:
        section.clear()
    section[last] = value


def checked(settings: Mapping[str, Any], source: str) -> Recipe:
    """Return settings as a recipe, or refuse them in one line that says what is wrong where."""
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        problems = [_explained(problem) for problem in error.errors(include_url=False)]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise OptionError(f"{source}: {problems[0]}{more}") from None


def _explained(problem: ErrorDetails) -> str:
    """Say one of pydantic's findings in our words."""
    place, section = _place(problem["loc"])
    kind, value = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = [*section.model_fields]
        close = difflib.get_close_matches(place.rpartition(".")[2], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"there is no setting {place!r}; {hint}known: {', '.join(known)}."
    if kind == "missing":
        return f"{place!r} is missing."
    if kind == "union_tag_invalid":
        expected = problem.get("ctx", {}).get("expected_tags", "")
        name = value.get("name") if isinstance(value, Mapping) else value
        return f"{place}.name={name!r} is unknown; known: {expected}."
    if kind == "value_error":
        return f"{problem['msg'].removeprefix('Value error, ')}."
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{place}={value!r}: {message}."


def _place(location: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """Return the dotted key of a finding, without pydantic's names of alternatives, and whose."""
    section: type[BaseModel] = Recipe
    keys: list[str] = []
    for part in location:
        if isinstance(part, str) and part in _ALTERNATIVES:
            section = _ALTERNATIVES[part]
        elif isinstance(part, str) and keys and part in _TYPE_NAMES:
            continue
        else:
            keys.append(str(part))
            section = _SECTIONS.get(".".join(keys), section)
    return ".".join(keys), section


_SECTIONS: dict[str, type[BaseModel]] = {
    "model": Named,
    "data": DataSettings,
    "decompose": Decomposition,
    "optimizer": SGD,
    "loss": Named,
}
_ALTERNATIVES: dict[str, type[BaseModel]] = {
    "sgd": SGD, "adam": Adam, "adamw": Adam,
    "constant": Constant, "milestones": Milestones, "vaswani": Vaswani,
}  # fmt: skip
_TYPE_NAMES = {"int", "float", "dict[str,union[int,float]]"}


def dumped(recipe: Recipe) -> str:
    """Return a recipe as YAML that `load_recipe` reads back."""
    settings = recipe.model_dump(mode="json")
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
