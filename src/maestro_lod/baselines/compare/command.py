"""Command `lod compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from maestro_lod.baselines.compare import compare as do_compare
from maestro_lod.baselines.compare.contenders import known
from maestro_lod.cli.commands import options
from maestro_lod.cli.display import Display
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.signals import stoppable
from maestro_lod.cli.terminal import say
from maestro_lod.errors import OptionError

Methods = Annotated[str, typer.Option(help=f"Methods, of {', '.join(known())}.")]
Sizes = Annotated[str, typer.Option(help="Sizes to reach, as shares of the dense model.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of runs that a mean is taken over.")]
Budget = Annotated[
    float | None,
    typer.Option(
        help="Training MACs of each method, relative to one training of the dense model. "
        "[dim]\\[default: the recipe's epochs for each][/dim]"
    ),
]
LrTrials = Annotated[
    int, typer.Option(min=1, help="Number of learning rates that each method tries.")
]
LrEpochs = Annotated[
    int | None, typer.Option(min=1, help="Epochs of such a trial. [dim]\\[default: all][/dim]")
]
Out = Annotated[
    Path | None, typer.Option(help="Directory. [dim]\\[default: runs/compare-RECIPE][/dim]")
]


def compare(
    recipe: options.RecipeName,
    methods: Methods = "lod,elastic,narrow,svd",
    sizes: Sizes = "0.5,0.25,0.1",
    seeds: Seeds = 1,
    budget: Budget = None,
    lr_trials: LrTrials = 3,
    lr_epochs: LrEpochs = None,
    change: options.Changes = None,
    out: Out = None,
    data: options.DataFolder = None,
    quiet: options.Quiet = False,
) -> None:
    """Train compression methods on your task under equal conditions, and rank them.

    The same command continues a comparison that was stopped or killed, reuses finished trainings,
    and joins one that is running: start it on several machines with the same --out.

    Examples:
      lod compare digits --methods lod,narrow,svd --sizes 0.25,0.1 --seeds 3

      lod compare lenet-mnist --methods lod,dense --sizes 0.1 --budget 1.0 --lr-trials 1
    """
    changes = options.with_data(change, data)
    base = load_recipe(recipe, changes)
    where = out or Path("runs") / f"compare-{Path(base.recipe).name or 'run'}"
    display = Display(Console(), quiet=True)
    with stoppable(display, base, "the same command", lambda: True) as asked:
        comparison = do_compare(
            recipe, [name.strip() for name in methods.split(",") if name.strip()],
            sizes=_shares(sizes), out=where, seeds=seeds, budget=budget,
            lr_trials=lr_trials, lr_epochs=lr_epochs, changes=changes, watchers=[display],
            say=lambda line: None if quiet else say(line), stop=lambda: bool(asked),
        )  # fmt: skip
    say(f"\n{comparison}\n\npage: {where / 'compare.html'}, data: {where / 'compare.json'}")


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OptionError(
            f"--sizes is not a list of numbers: {text[:40]!r}. Give shares of the dense model, "
            "such as 0.5,0.25,0.1."
        ) from None
