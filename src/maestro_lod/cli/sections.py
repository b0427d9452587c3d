"""Sections of a recipe: typed settings without unknown keys, and their errors in one line."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails

from maestro_lod.cli.yaml_settings import shown
from maestro_lod.errors import listed, suggest


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


# YAML reads 128e-5 as text, so numbers may come as text; whole numbers and switches may not
Number = Annotated[float, BeforeValidator(_refuse_bool)]
Share = Annotated[Number, Field(ge=0.0, lt=1.0)]
Positive = Annotated[Number, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[Number, Field(ge=0.0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """Settings for which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# -- settings that the library defines as dataclasses, which cannot depend on pydantic ------------


@functools.cache
def section_of(kind: type) -> type[Section]:
    """Return the section that checks the fields of a dataclass, key by key."""
    return create_model(kind.__name__, __base__=Section, **fields_of(kind))


def fields_of(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass in the form that pydantic's `create_model` takes."""
    hints = get_type_hints(kind)
    return {entry.name: _field(entry, hints[entry.name]) for entry in dataclasses.fields(kind)}


def _field(entry: dataclasses.Field[Any], hint: Any) -> tuple[Any, Any]:
    limits = entry.metadata
    if choices := limits.get("choices"):
        hint = Literal[tuple(choices)]
    elif check := limits.get("check"):
        hint = Annotated[hint, BeforeValidator(check)]
    else:
        hint = _strict(hint, limits.get("least"))
    default: Any = entry.default
    if entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    required = default is dataclasses.MISSING
    return hint, Field(... if required else default, description=limits.get("meaning"))


def _strict(hint: Any, least: float | None) -> Any:
    """Return a type that accepts only the matching YAML values."""
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_strict(part, least) for part in get_args(hint))]  # noqa: UP007
    if dataclasses.is_dataclass(hint):  # checked values become the dataclass itself
        kind: Any = hint
        return Annotated[
            section_of(kind),
            AfterValidator(lambda section: kind(**dict(section))),
            PlainSerializer(dataclasses.asdict),
        ]
    strict = {
        bool: Switch,
        int: Annotated[int, Field(ge=least, strict=True)],
        float: Annotated[Number, Field(ge=least, allow_inf_nan=False)],
    }
    return strict.get(hint, hint)


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without None and without their constraints."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in alternatives(part)]
    return [] if annotation is type(None) else [annotation]


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections among the types that an annotation allows."""
    kinds = alternatives(annotation)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


# -- pydantic's errors in one line, at the place that the user wrote ------------------------------


def in_one_line(error: ValidationError, section: type[BaseModel]) -> str:
    """Describe the first problem of settings for a section, and count the others."""
    # an unknown key comes first: it may explain why another is missing
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{_explain(problems[0], section)}{more}"


def _explain(problem: ErrorDetails, recipe: type[BaseModel]) -> str:
    key, section = _place(problem["loc"], recipe)
    kind, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "extra_forbidden":
        known = [*section.model_fields]
        hint = suggest(key.rpartition(".")[2], known)
        return f"there is no setting {key!r}.{hint} Known: {', '.join(known)}."
    if kind == "missing":
        return f"{key!r} is missing."
    if kind == "union_tag_invalid":
        key, value = f"{key}.name", value.get("name") if isinstance(value, Mapping) else value
    if kind in ("union_tag_invalid", "literal_error"):
        known = re.findall("'([^']*)'", context.get("expected_tags", context.get("expected", "")))
        hint = suggest(str(value), known)
        return f"{key}={shown(value)} is unknown.{hint} Known: {listed(known)}."
    message = _MESSAGES.get(kind, problem["msg"])
    message = (
        message.removeprefix("Value error, ")
        .removesuffix(".")
        .replace("Input should be", "must be")
    )
    if isinstance(value, Mapping):  # a contradiction inside a section, or in the whole recipe
        return f"{key}: {message}." if key else f"{message}."
    return f"{key}={shown(value)} {message}."


_MESSAGES = {
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


def _place(
    location: tuple[int | str, ...], section: type[BaseModel]
) -> tuple[str, type[BaseModel]]:
    """Return the dotted key of a problem, without pydantic's union tags, and the section."""
    keys: list[str] = []
    candidates: list[type[Section]] = []
    for part in location:
        if chosen := [kind for kind in candidates if part in _names_of(kind)]:
            section, candidates = chosen[0], []
            continue
        field = section.model_fields.get(str(part))
        candidates = [] if field is None else sections_in(field.annotation)
        section = candidates[0] if candidates else section
        keys.append(str(part))
    return ".".join(keys), section


def _names_of(section: type[BaseModel]) -> tuple[object, ...]:
    """Return the names that select a section among alternatives; none if nothing does."""
    name = section.model_fields.get("name")
    return () if name is None else get_args(name.annotation)
