"""Table of all settings, for help and documentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from maestro_lod.cli.recipe import Recipe
from maestro_lod.cli.registry import METHODS
from maestro_lod.cli.sections import alternatives, section_of, sections_in
from maestro_lod.cli.yaml_settings import shown


@dataclass(frozen=True)
class Setting:
    """One setting: its dotted key, possible values, default and meaning."""

    key: str
    values: str
    default: str
    meaning: str


def all_settings() -> list[Setting]:
    """Return every setting that a recipe can have, in order; imports every method."""
    merged: dict[str, Setting] = {}
    for new in _recipe_settings():
        if old := merged.get(new.key):  # an alternative, such as another optimizer, has it too
            defaults = dict.fromkeys((*old.default.split(" or "), new.default))
            new = Setting(
                old.key,
                ", ".join(dict.fromkeys((old.values, new.values))),
                " or ".join(default for default in defaults if default not in ("", "required")),
                old.meaning,
            )
        merged[new.key] = new
    return list(merged.values())


def _recipe_settings() -> Iterator[Setting]:
    for setting in _settings_of(Recipe):
        if setting.key == "method":
            yield replace(setting, values=", ".join(METHODS))
            yield from _method_settings()
        else:
            yield setting


def _method_settings() -> Iterator[Setting]:
    """Yield the settings of all methods; those that `lod` lacks name their methods."""
    of = {name: [*_settings_of(section_of(method))] for name, method in METHODS.items()}
    for settings in of.values():
        for setting in settings:
            owners = [name for name, own in of.items() if setting.key in (s.key for s in own)]
            whose = "" if "lod" in owners else f" ({', '.join(owners)})"
            yield replace(setting, meaning=setting.meaning + whose)


def _settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    for key, field in section.model_fields.items():
        inner = sections_in(field.annotation)
        for kind in inner:
            yield from _settings_of(kind, f"{prefix}{key}.")
        if not inner:
            empty = field.default in (None, "", [], {})
            default = "required" if field.is_required() else shown(field.default).strip('"')
            values, meaning = _values(field.annotation), field.description or ""
            yield Setting(prefix + key, values, "" if empty else default, meaning)


def _values(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(map(_value, alternatives(annotation))))


def _value(kind: Any) -> str:
    origin = get_origin(kind)
    return ", ".join(get_args(kind)) if origin is Literal else _VALUES[origin or kind]


_VALUES = {
    bool: "true, false", int: "whole number", float: "number", str: "text", Path: "path",
    list: "list", tuple: "list", dict: "mapping",
}  # fmt: skip
