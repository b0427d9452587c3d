"""Settings as YAML: read strictly, changed by key=value, and written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from maestro_lod.errors import OptionError
from maestro_lod.files.json_files import read_limited, require_depth

_LARGEST, _MOST = 2**20, 2**16  # bytes and values: YAML is read slowly, aliases repeat values


def settings_in(path: Path) -> dict[str, Any]:
    """Return the settings in a file as they are written, unchecked: nothing is imported."""
    return parsed(text_of(path), str(path))


def text_of(path: Path) -> str:
    """Return the text of a recipe's file, or say why it cannot be read."""
    try:
        return read_limited(path, _LARGEST).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"recipe {path} cannot be read ({reason}).") from None


class _Loader(yaml.SafeLoader):
    """Reads plain YAML; a key that is said twice is refused, and 1:30 is text, not 90."""

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
    """Return what YAML holds; refuse what aliases make too deep or too large."""
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
    """Return the settings in a text; `source` says in errors where it came from."""
    try:
        settings = _loaded(text)
    except Exception as error:  # tags with values that they cannot have raise anything
        reason = " ".join(str(error).split())
        raise OptionError(f"{source} is no valid YAML: {reason}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise OptionError(f"{source} holds no settings: it must be a mapping of keys to values.")
    return settings


def change(settings: dict[str, Any], changes: Iterable[str]) -> set[str]:
    """Apply `key.key=value` changes, in place; return the keys that they name."""
    changes = sorted(changes, key=_depth)
    for each in changes:
        _apply(each, settings)
    return {each.partition("=")[0].strip() for each in changes}


def _depth(change: str) -> int:
    """Order changes so that a new name does not undo those of its own settings, said before it."""
    return change.partition("=")[0].strip().removesuffix(".name").count(".")


def _apply(change: str, settings: dict[str, Any]) -> None:
    """Set one `key.key=value`; a new `name` drops the other settings of the old one."""
    key, equals, text = change.partition("=")
    *outer, last = key.strip().split(".")
    if not equals or not all((*outer, last)):
        raise OptionError(f"{change!r} is no setting: write key=value, such as budget.params=25%.")
    try:
        value = _loaded(text) if text.strip() else None
    except Exception:  # see above
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


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as YAML that reads back as the same."""
    text = str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    if yaml.safe_load(text) != settings:  # some rare separators read back as spaces, unless escaped
        text = str(yaml.safe_dump(settings, sort_keys=False))
    return text


def shown(value: Any) -> str:
    """Write a value as one would in YAML."""
    return json.dumps(value, default=str, ensure_ascii=False)
