"""Command `lod recipes`."""

from __future__ import annotations

import yaml

from maestro_lod.cli.recipe_files import recipe_names, recipe_text
from maestro_lod.cli.terminal import say


def recipes() -> None:
    """List the recipes of the library."""
    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        say(f"{name:{width}}  {yaml.safe_load(recipe_text(name))['description']}")
