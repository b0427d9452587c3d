"""The recipes that come with the library, as files; reading a name needs nothing else."""

from __future__ import annotations

from importlib import resources
from typing import Any

_ROOMS = ("cli", "baselines")
"""What has a directory `recipes`."""


def _recipe_files() -> dict[str, Any]:
    """Return the files of all recipes by the name of the recipe."""
    package = resources.files("maestro_lod")
    files = (file for room in _ROOMS for file in (package / room / "recipes").iterdir())
    return {f.name.removesuffix(".yaml"): f for f in files if f.name.endswith(".yaml")}


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the library."""
    return sorted(_recipe_files())


def recipe_text(name: str) -> str:
    """Return a recipe of the library as it is written."""
    return str(_recipe_files()[name].read_text(encoding="utf-8"))
