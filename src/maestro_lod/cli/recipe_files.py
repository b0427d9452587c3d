"""Recipe files of the library; listing them imports neither torch nor pydantic."""

from __future__ import annotations

from importlib import resources
from typing import Any

_ROOMS = ("cli", "baselines")
"""Packages that have a directory `recipes`."""


def _recipe_files() -> dict[str, Any]:
    """Return the file of each recipe by name."""
    package = resources.files("maestro_lod")
    files = (file for room in _ROOMS for file in (package / room / "recipes").iterdir())
    return {f.name.removesuffix(".yaml"): f for f in files if f.name.endswith(".yaml")}


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the library."""
    return sorted(_recipe_files())


def recipe_text(name: str) -> str:
    """Return the YAML text of a recipe of the library."""
    return str(_recipe_files()[name].read_text(encoding="utf-8"))
