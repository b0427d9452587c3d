"""What pydantic finds wrong with settings, in our words and at the place that a user wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from maestro_lod.cli.sections import Section
from maestro_lod.cli.yaml_settings import shown
from maestro_lod.errors import listed, suggest


def in_one_line(error: ValidationError, section: type[BaseModel]) -> str:
    """Say what is wrong with settings for a section: the first thing, and how many more."""
    # a slip in a key comes first: it explains why another is missing
    found = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{_explained(found[0], section)}{more}"


def _explained(problem: ErrorDetails, recipe: type[BaseModel]) -> str:
    """Say one of pydantic's findings in our words."""
    place, section = _place(problem["loc"], recipe)
    kind, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "extra_forbidden":
        known = [*section.model_fields]
        hint = suggest(place.rpartition(".")[2], known)
        return f"there is no setting {place!r}.{hint} Known: {', '.join(known)}."
    if kind == "missing":
        return f"{place!r} is missing."
    if kind == "union_tag_invalid":
        place, value = f"{place}.name", value.get("name") if isinstance(value, Mapping) else value
    if kind in ("union_tag_invalid", "literal_error"):
        known = re.findall("'([^']*)'", context.get("expected_tags", context.get("expected", "")))
        hint = suggest(str(value), known)
        return f"{place}={shown(value)} is unknown.{hint} Known: {listed(known)}."
    message = _MEANING.get(kind, problem["msg"])
    message = (
        message.removeprefix("Value error, ")
        .removesuffix(".")
        .replace("Input should be", "must be")
    )
    if isinstance(value, Mapping):  # a contradiction inside a section, or in the whole
        return f"{place}: {message}." if place else f"{message}."
    return f"{place}={shown(value)} {message}."


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


def _place(
    location: tuple[int | str, ...], section: type[BaseModel]
) -> tuple[str, type[BaseModel]]:
    """Return the dotted key of a finding, without pydantic's names of alternatives, and whose."""
    keys: list[str] = []
    alternatives: list[type[BaseModel]] = []
    for part in location:
        if chosen := [kind for kind in alternatives if part in _names_of(kind)]:
            section, alternatives = chosen[0], []
            continue
        field = section.model_fields.get(str(part))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        alternatives = [k for k in kinds if isinstance(k, type) and issubclass(k, Section)]
        section = alternatives[0] if alternatives else section
        keys.append(str(part))
    return ".".join(keys), section


def _names_of(section: type[BaseModel]) -> tuple[object, ...]:
    """Return the names by which a section is chosen among alternatives, if it is."""
    name = section.model_fields.get("name")
    return () if name is None else get_args(name.annotation)
