"""Mapping from names in recipes to objects that are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from maestro_lod.errors import OptionError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Mapping of names to objects; those given as `module:attribute` are imported on access."""

    def __init__(self, kind: str, homes: Mapping[str, str]) -> None:
        self._kind, self._entries = kind, cast("dict[str, Any]", dict(homes))

    def register(self, name: str, entry: T) -> None:
        """Add an object; raise OptionError if another object has the name."""
        if self._entries.get(name, entry) is not entry:
            raise OptionError(f"there already is a {self._kind} {name!r}. Give another name.")
        self._entries[name] = entry

    def unregister(self, name: str) -> None:
        """Remove a name."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(importlib.import_module(f"maestro_lod.{module}"), attribute)
        return cast("T", entry)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
