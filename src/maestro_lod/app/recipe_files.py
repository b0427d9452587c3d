"""The recipes that come with the library, as files; reading a name needs nothing else."""

from __future__ import annotations

from importlib import resources
from typing import Any


def _folder() -> Any:
    return resources.files("maestro_lod.app") / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the library."""
    names = (file.name for file in _folder().iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Return a recipe of the library as it is written."""
    return str((_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
