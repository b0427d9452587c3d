"""Commands for a first look: `lod demo` and `lod recipes`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
import yaml

from maestro_lod.cli.main import app
from maestro_lod.cli.recipe_files import recipe_names, recipe_text
from maestro_lod.cli.terminal import say


def demo(
    out: Annotated[Path, typer.Option(help="Directory for all files of the demonstration.")] = Path(
        "demo"
    ),
) -> None:
    """Run a demonstration in half a minute: train, find every size, deploy one, compare."""
    at = shlex.quote(str(out))
    commands = (
        f"lod train digits-mlp --set threads=1 --out {at}/digits",
        f"lod train digits-mlp --set method=dense --set threads=1 --out {at}/dense --quiet",
        f"lod deploy {at}/digits --max-params 30% --batch 16 --to pt2 --to safetensors "
        f"--out {at}/phone",
        f"lod bench {at}/digits --batch 16 --reference {at}/dense",
    )
    for command in commands:  # in one process: importing torch takes longer than training
        say(f"\n$ {command}")
        code = app(args=shlex.split(command)[1:], prog_name="lod", standalone_mode=False)
        if code:
            raise typer.Exit(code)
    say(f"\nreport with a slider over all sizes: {out / 'digits' / 'report.html'}")


def recipes() -> None:
    """List the recipes of the library."""
    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        say(f"{name:{width}}  {yaml.safe_load(recipe_text(name))['description']}")
