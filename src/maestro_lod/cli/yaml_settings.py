"""Settings as YAML: strict reading, changes by key=value, and writing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from maestro_lod.errors import OptionError
from maestro_lod.files.json_files import read_limited, require_depth

_LARGEST, _MOST = (
    2**20,
    2**16,
)  # limits of bytes and values: YAML is read slowly, and aliases repeat values


def settings_in(path: Path) -> dict[str, Any]:
    """Return the settings in a file without checking them; imports nothing."""
    return parsed(text_of(path), str(path))


def text_of(path: Path) -> str:
    """Return the text of a recipe file; raise OptionError if it cannot be read."""
    try:
        return read_limited(path, _LARGEST).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"recipe {path} cannot be read ({reason}).") from None


class _Loader(yaml.SafeLoader):
    """Loader of plain YAML that refuses duplicate keys and reads 1:30 as text, not as 90."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        if ":" in node.value:
            return self.construct_scalar(node)
        whole = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def _loaded(text: str) -> Any:
    """Return the value of a YAML text; refuse one that aliases make too deep or too large."""
    value = yaml.load(text, _Loader)
    require_depth(value)
    parts = [value]
    for count, part in enumerate(parts):  # which grows
        if count == _MOST:
            raise ValueError("it has too many values")
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
    return value


def parsed(text: str, source: str) -> dict[str, Any]:
    """Return the settings in a YAML text; errors name its `source`."""
    try:
        settings = _loaded(text)
    except Exception as error:  # a tag with an impossible value may raise anything
        reason = " ".join(str(error).split())
        raise OptionError(f"{source} is not valid YAML: {reason}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise OptionError(f"{source} contains no settings. Write a mapping of keys to values.")
    return settings


def change(settings: dict[str, Any], changes: Iterable[str]) -> set[str]:
    """Apply `key.key=value` changes in place and return the keys that they name."""
    changes = sorted(changes, key=_depth)
    for each in changes:
        _apply(each, settings)
    return {each.partition("=")[0].strip() for each in changes}


def _depth(change: str) -> int:
    """Order changes so that a new name does not undo earlier changes of its own settings."""
    return change.partition("=")[0].strip().removesuffix(".name").count(".")


def _apply(change: str, settings: dict[str, Any]) -> None:
    """Apply one `key.key=value`; a new `name` drops the other settings of the old one."""
    key, equals, text = change.partition("=")
    *outer, last = key.strip().split(".")
    if not equals or not all((*outer, last)):
        raise OptionError(
            f"{change!r} is not a setting. Write key=value, such as budget.params=25%."
        )
    try:
        value = _loaded(text) if text.strip() else None
    except Exception:  # see above
        raise OptionError(f"the value in {change!r} is not valid YAML.") from None
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


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as YAML text that reads back as the same settings."""
    text = str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    if yaml.safe_load(text) != settings:  # some rare separators read back as spaces, unless escaped
        text = str(yaml.safe_dump(settings, sort_keys=False))
    return text


def shown(value: Any) -> str:
    """Return a value in the notation of YAML."""
    return json.dumps(value, default=str, ensure_ascii=False)
