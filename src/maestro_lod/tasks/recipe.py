"""A recipe: every setting of a run, typed; read from YAML, changed by key=value, or refused."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from maestro_lod.errors import OptionError, listed, nearest


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _require_rank(value: Any) -> Any:
    """Refuse what is neither a rank nor a share of the full one; whole numbers stay whole."""
    share = isinstance(value, float) and 0.0 < value < 1.0
    if not share and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError("must be a rank, or a share of the full rank between 0 and 1")
    return value


def _require_ranks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _require_rank(rank) for name, rank in value.items()}
    if value == 0:
        raise ValueError("must be 1 or more: at rank 0 there is nothing to train")
    return value if value is None else _require_rank(value)


def _by_name(usual: str | None = None) -> BeforeValidator:
    """Let a name stand for a mapping with that name, and a mapping without one mean the usual."""

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if usual is not None and isinstance(value, Mapping):
            return {"name": usual, **value}
        return value

    return BeforeValidator(named)


# YAML reads 128e-5 as text, so numbers may come as text; whole numbers and switches may not
Number = Annotated[float, BeforeValidator(_no_switch)]
Share = Annotated[Number, Field(ge=0.0, lt=1.0)]
Positive = Annotated[Number, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[Number, Field(ge=0.0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[Whole, Field(lt=2**63)]  # what torch's generators take
Switch = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """Settings that refuse keys they do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class Decomposition(Section):
    """Which layers become low-rank, as in `maestro_lod.decompose`."""

    only: list[str] | None = Field(
        default=None, description="patterns of layers; others stay dense"
    )
    skip: list[str] = Field(default=[], description="patterns of layers that stay dense")
    ranks: Annotated[
        int | float | dict[str, int | float] | None, BeforeValidator(_require_ranks)
    ] = Field(default=None, description="at first: a rank, a share, or these by layer")
    tied: Literal["keep", "share"] = Field(
        default="keep", description="of an embedding with its head"
    )


class Budget(Section):
    """What the deployed model may cost; λ is then steered."""

    params: Positive | None = Field(default=None, description="share of dense, or a count above 1")
    macs: Positive | None = Field(default=None, description="the same of MACs")
    steps: Count | None = Field(default=None, description="until it is reached; half of the run")

    @model_validator(mode="after")
    def _consistent(self) -> Budget:
        if (self.params is None) == (self.macs is None):
            raise ValueError("needs either params or macs")
        return self


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
    warmup: Count = Field(description="of vaswani: steps until the rate is reached")


Optimizers = Annotated[SGD | Adam, Field(discriminator="name"), _by_name("sgd")]
Schedules = Annotated[
    Constant | Milestones | Vaswani, Field(discriminator="name"), _by_name("constant")
]


class Recipe(Section):
    """Every setting of a run."""

    recipe: str = Field(default="", description="the recipe this began as")
    description: str = Field(default="", description="one line about it")
    model: Annotated[Named, _by_name()]
    data: Annotated[DataSettings, _by_name()]
    method: Literal["lod", "dense"] = Field(
        default="lod", description="ordered ranks, or the model as it is"
    )
    decompose: Decomposition = Decomposition()
    epochs: Count = Field(description="passes over the training set")
    batch: Count = Field(default=64, description="samples per batch")
    seed: Seed = Field(default=0, description="of all randomness")
    optimizer: Optimizers = SGD()
    schedule: Schedules = Constant()
    penalty: NonNegative = Field(default=0.0, description="λ of the group lasso")
    pressure: NonNegative = Field(default=0.0, description="λ without units, instead of penalty")
    budget: Budget | None = None
    threshold: NonNegative = Field(default=1e-7, description="importance of ranks to remove")
    sampling: Literal["pairs", "iid", "several", "layer_uniform", "independent"] = Field(
        default="pairs", description="of the rank of a step"
    )
    proximal: Switch = Field(default=False, description="exact zeros under any optimizer")
    shrink: Switch = Field(default=True, description="remove useless ranks after each epoch")
    min_rank: Whole = Field(default=0, description="rank that every layer keeps")
    full_pass: Switch = Field(default=False, description="one more pass at full rank per step")
    distill: Switch = Field(default=False, description="train the sampled pass on the full one's")
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

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.distill and not self.full_pass:
            raise ValueError("distill needs its teacher: set full_pass=true too")
        if self.budget is not None and (self.penalty or not self.shrink):
            raise ValueError("budget steers the penalty and shrinks: leave penalty and shrink out")
        if self.pressure and (self.penalty or self.budget is not None):
            raise ValueError("pressure sets the penalty: leave penalty and budget out")
        if self.pressure and self.optimizer.name != "sgd" and not self.proximal:
            raise ValueError(f"pressure needs proximal=true with {self.optimizer.name}")
        fields = type(self).model_fields
        useless = [key for key in _LOW_RANK_ONLY if getattr(self, key) != fields[key].default]
        if self.method == "dense" and useless:
            raise ValueError(f"method=dense has no use for {', '.join(useless)}")
        own_loss = self.loss.name != "cross_entropy"
        if own_loss and (self.label_smoothing or self.reduction != "mean"):
            raise ValueError("label_smoothing and reduction belong to loss=cross_entropy")
        return self


_LOW_RANK_ONLY = (
    "decompose", "penalty", "pressure", "budget", "threshold", "sampling", "proximal", "shrink",
    "min_rank", "full_pass", "distill",
)  # fmt: skip


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the library."""
    folder = resources.files("maestro_lod.tasks") / "recipes"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name[-5:] == ".yaml")


def load_recipe(name_or_path: str, changes: Iterable[str] = ()) -> Recipe:
    """Return a recipe by name or from a YAML file, with `key.key=value` changes applied."""
    names = recipe_names()
    if name_or_path in names:
        file = resources.files("maestro_lod.tasks") / "recipes" / f"{name_or_path}.yaml"
        text, name = file.read_text(encoding="utf-8"), name_or_path
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        name = path.stem
        try:
            text = path.read_text(encoding="utf-8")
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
    changes = sorted(changes, key=_depth)
    for change in changes:
        _apply(change, settings)
    asked = {change.partition("=")[0].partition(".")[0].strip() for change in changes}
    fallen: set[str] = set()  # what the recipe says, but has no place beside what is asked for
    if "method" in asked and settings.get("method") == "dense":
        fallen = set(_LOW_RANK_ONLY)
    else:
        ways = {"penalty", "pressure", "budget"}  # of choosing λ
        if any(settings.get(key) for key in ways & asked):
            fallen = ways
    for key in fallen - asked:
        settings.pop(key, None)
    return checked(settings, name_or_path)


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the latter of a date that is none
        reason = " ".join(str(error).split())
        raise OptionError(f"{source} is no valid YAML: {reason}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise OptionError(f"{source} holds no settings: it must be a mapping of keys to values.")
    return settings


def _depth(change: str) -> int:
    """Order changes so that a new name does not undo those of its own settings, said before it."""
    return change.partition("=")[0].strip().removesuffix(".name").count(".")


def _apply(change: str, settings: dict[str, Any]) -> None:
    """Set one `key.key=value`; a new `name` drops the other settings of the old one."""
    key, equals, text = change.partition("=")
    *outer, last = key.strip().split(".")
    if not equals or not all((*outer, last)):
        raise OptionError(f"{change!r} is no setting: write key=value, such as penalty=1e-4.")
    try:
        value = yaml.safe_load(text) if text.strip() else None
    except (yaml.YAMLError, ValueError):
        raise OptionError(f"the value in {change!r} is no valid YAML.") from None
    section = settings
    for part in outer:
        inner = section.get(part) or {}
        if not isinstance(inner, Mapping | str):
            raise OptionError(f"{change!r}: {part!r} is one value and has no settings of its own.")
        section[part] = {"name": inner} if isinstance(inner, str) else dict(inner)
        section = section[part]
    if last == "name" and outer and section.get("name") != value:
        section.clear()
    section[last] = value


def checked(settings: Mapping[str, Any], source: str) -> Recipe:
    """Return settings as a recipe, or refuse them in one line that says what is wrong where."""
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        # a slip in a key comes first: it explains why another is missing
        found = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = [_explained(problem) for problem in found]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise OptionError(f"{source}: {problems[0]}{more}") from None


def _explained(problem: ErrorDetails) -> str:
    """Say one of pydantic's findings in our words."""
    place, section = _place(problem["loc"])
    kind, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "extra_forbidden":
        known = [*section.model_fields]
        hint = nearest(place.rpartition(".")[2], known)
        return f"there is no setting {place!r}.{hint} Known: {', '.join(known)}."
    if kind == "missing":
        return f"{place!r} is missing."
    if kind == "union_tag_invalid":
        place, value = f"{place}.name", value.get("name") if isinstance(value, Mapping) else value
    if kind in ("union_tag_invalid", "literal_error"):
        known = re.findall("'([^']*)'", context.get("expected_tags", context.get("expected", "")))
        hint = nearest(str(value), known)
        return f"{place}={_shown(value)} is unknown.{hint} Known: {listed(known)}."
    message = _MEANING.get(kind, problem["msg"])
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    if isinstance(value, Mapping):  # a contradiction inside a section, or in the whole
        return f"{place}: {message}." if place else f"{message}."
    return f"{place}={_shown(value)} {message}."


_MEANING = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_attributes_type": "must be a name or a mapping of settings",
    "model_type": "must be a mapping of settings",
    "path_type": "must be a path",
    "string_type": "must be text",
}


def _place(location: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """Return the dotted key of a finding, without pydantic's names of alternatives, and whose."""
    section: type[BaseModel] = Recipe
    keys: list[str] = []
    for part in location:
        if isinstance(part, str) and part in _ALTERNATIVES:
            section = _ALTERNATIVES[part]
        else:
            keys.append(str(part))
            section = _SECTIONS.get(".".join(keys), section)
    return ".".join(keys), section


_SECTIONS: dict[str, type[BaseModel]] = {
    "model": Named, "data": DataSettings, "decompose": Decomposition, "budget": Budget,
    "loss": Loss,
}  # fmt: skip
_ALTERNATIVES: dict[str, type[BaseModel]] = {
    "sgd": SGD, "adam": Adam, "adamw": Adam,
    "constant": Constant, "milestones": Milestones, "vaswani": Vaswani,
}  # fmt: skip


def dumped(recipe: Recipe) -> str:
    """Return a recipe as YAML that `load_recipe` reads back."""
    settings = recipe.model_dump(mode="json")
    text = str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    if yaml.safe_load(text) != settings:  # some rare separators read back as spaces, unless escaped
        text = str(yaml.safe_dump(settings, sort_keys=False))
    return text


@dataclass(frozen=True)
class Setting:
    """One setting, in words."""

    key: str
    values: str
    default: str
    meaning: str


def all_settings() -> list[Setting]:
    """Return every setting that a recipe can have, in order, for help and documentation."""
    merged: dict[str, Setting] = {}
    for new in _settings_of(Recipe):
        if old := merged.get(new.key):  # the same of an alternative, such as another optimizer
            new = Setting(
                old.key,
                ", ".join(dict.fromkeys((old.values, new.values))),
                " or ".join(
                    dict.fromkeys(d for d in (old.default, new.default) if d != "required")
                ),
                old.meaning,
            )
        merged[new.key] = new
    return list(merged.values())


def _settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    for key, field in section.model_fields.items():
        inner = [kind for kind in _kinds(field.annotation) if _is_section(kind)]
        for kind in inner:
            yield from _settings_of(kind, f"{prefix}{key}.")
        if not inner:
            empty = field.default in (None, "", [], {})
            default = "required" if field.is_required() else _shown(field.default).strip('"')
            values, meaning = _values(field.annotation), field.description or ""
            yield Setting(prefix + key, values, "" if empty else default, meaning)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, None left out."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for kind in get_args(annotation) if kind is not type(None))
    return (annotation,)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _values(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(_value(kind) for kind in _kinds(annotation)))


def _value(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        return _value(get_args(kind)[0])
    if origin is Literal:
        return ", ".join(get_args(kind))
    return _VALUES[origin or kind]


_VALUES = {
    bool: "true, false", int: "whole number", float: "number", str: "text", Path: "path",
    list: "list", tuple: "list", dict: "mapping",
}  # fmt: skip


def _shown(value: Any) -> str:
    """Write a value as one would in YAML."""
    return json.dumps(value, default=str, ensure_ascii=False)
