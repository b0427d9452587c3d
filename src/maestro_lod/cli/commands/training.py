"""`lod train`, `lod resume` and `lod tune`."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from maestro_lod.cli.commands import options
from maestro_lod.cli.display import Display
from maestro_lod.cli.recipe import Recipe, load_recipe
from maestro_lod.cli.run import Run, Watcher
from maestro_lod.cli.settings_list import all_settings
from maestro_lod.cli.signals import stoppable
from maestro_lod.cli.terminal import say
from maestro_lod.cli.torchrun import (
    is_main_process,
    launch,
    process_group,
    processes,
    require_named,
    restarted,
)
from maestro_lod.errors import OptionError
from maestro_lod.text import install_command


def train(
    recipe: options.RecipeName,
    change: options.Changes = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. [dim]\\[default: runs/RECIPE][/dim]")
    ] = None,
    data: options.DataFolder = None,
    nproc: options.Processes = 1,
    max_restarts: options.Restarts = 0,
    quiet: options.Quiet = False,
) -> None:
    """Train a recipe; write model, metrics and report to a directory.

    Ctrl-C stops it safely; [bold]lod resume[/bold] continues exactly where the run ended.

    Examples:
      lod train digits

      lod train lenet-mnist --set budget.params=25% --set seed=1 --out runs/a

      lod train lenet-mnist --set method=dense

      lod train lenet-mnist --nproc 2 --max-restarts 3

      lod train my.yaml     (model: my_package.models:build, data: my_package.data:load,
                             epochs: 20, budget: {params: 0.25})
    """
    changes = options.with_data(change, data)
    chosen = load_recipe(recipe, changes)
    require_named(out)
    where = out or _free_directory(Path(chosen.recipe).name or "run")
    run = Run(where, chosen)
    if is_main_process() and not (restarted() and run.checkpoint.exists()):
        run.require_new()
    if (nproc, max_restarts) != (1, 0):
        sets = [word for each in changes for word in ("--set", each)]
        _launch(["train", recipe, *sets, "--out", str(where)], nproc, max_restarts, quiet)
    else:
        _train(run, quiet)


def settings_help() -> str:
    """List every setting on a line of its own, for the help."""
    lines = [r"[bold]Settings[/bold], for --set and recipe files [dim]\[default, others][/dim]:"]
    for setting in all_settings():
        switch = setting.values == "true, false"
        known = setting.default if switch or "," not in setting.values else setting.values
        shown = rf" [dim]\[{known}][/dim]" if known else ""
        lines.append(f"{setting.key:23}{setting.meaning}{shown}")
    return "\n".join(lines)


def resume(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a run that was stopped.")
    ],
    trust: options.Trust = False,
    nproc: options.Processes = 1,
    max_restarts: options.Restarts = 0,
    quiet: options.Quiet = False,
) -> None:
    """Resume a run that was stopped, killed or interrupted, exactly where it ended.

    The number of processes may differ from before.
    """
    run = Run.open(directory, trust=trust)
    if run.finished:
        run.tidy()
        raise OptionError(
            f"the run in {directory} has finished. To write its report again: "
            f"lod report {directory}"
        )
    if (nproc, max_restarts) != (1, 0):
        trusted = ["--trust"] if trust else []
        _launch(["resume", str(directory), *trusted], nproc, max_restarts, quiet)
    else:
        _train(run, quiet)


def tune(
    recipe: options.RecipeName,
    max_params: options.MaxParams = None,
    min_accuracy: options.MinAccuracy = None,
    pareto: options.Trials = None,
    largest: options.Largest = None,
    smallest: options.Smallest = None,
    few: options.Few = 0.5,
    change: options.Changes = None,
    out: options.TrialsFolder = None,
    storage: options.Storage = None,
    name: options.SearchName = None,
    data: options.DataFolder = None,
    quiet: options.Quiet = False,
) -> None:
    """Search a penalty λ that gives a model within limits on size and accuracy.

    λ is halved until a model is accurate enough. The same command continues a search that was
    stopped and joins one that is running: start it on several machines with the same --out or
    --storage. The exit code is 1 if no model is within both limits.

    Examples:
      lod tune lenet-mnist --max-params 12000 --min-accuracy 0.98

      lod tune lenet-mnist --pareto 30
    """
    _check_goal(pareto, max_params, min_accuracy)
    chosen = load_recipe(recipe, options.with_data(change, data))
    where = out or Path("runs") / f"tune-{Path(chosen.recipe).name or 'run'}"
    span = {"largest": largest, "smallest": smallest}
    with _search(chosen, where, storage, name, quiet) as search:
        if pareto is not None:
            found = search.explore(pareto, **span)
        else:
            limits = {"max_params": max_params, "min_accuracy": min_accuracy}
            found = search.tune(**limits, **span, few=few)
    say(f"\n{found}")
    if pareto is None:
        _end_as(found)


def _check_goal(pareto: int | None, max_params: int | None, min_accuracy: float | None) -> None:
    if pareto is not None and (max_params is not None or min_accuracy is not None):
        raise OptionError("--pareto searches without limits. Omit --max-params and --min-accuracy.")
    if pareto is None and (max_params is None or min_accuracy is None):
        raise OptionError(
            "the search has no goal. Give both --max-params and --min-accuracy, or --pareto."
        )


@contextmanager
def _search(
    recipe: Recipe, out: Path, storage: str | None, name: str | None, quiet: bool
) -> Iterator[Any]:
    """Yield a search that prints its trials and stops on signals."""
    tuning = _extra("maestro_lod.cli.tuning.recipes", "lod tune", "tune")
    display = Display(Console(), quiet)
    with stoppable(display, recipe, "the same command", lambda: True) as asked:
        yield tuning.Tuning(
            recipe,
            out,
            storage=storage,
            name=name,
            watchers=_watchers(recipe, display),
            watch=lambda trial: None if quiet else say(str(trial)),
            stop=lambda: bool(asked),
        )


def _end_as(found: Any) -> None:
    """Print the place of the chosen model; exit with 1 if no model is within both limits."""
    if found.chosen is not None:
        say(f"model and report: {found.chosen.where}")
    if found.status != "satisfied":
        raise typer.Exit(1)


def _free_directory(name: str) -> Path:
    """Return the first of runs/NAME, runs/NAME-2, … that does not exist."""
    number = 1
    while True:
        directory = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not directory.exists():
            return directory
        number += 1


def _launch(arguments: list[str], nproc: int, restarts: int, quiet: bool) -> None:
    """Run a command in several processes and exit with their code."""
    if code := launch([*arguments, *(["--quiet"] if quiet else [])], nproc, restarts):
        raise typer.Exit(code)


def _train(run: Run, quiet: bool) -> None:
    display = Display(Console(), quiet or not is_main_process())
    again = f"lod resume {shlex.quote(str(run.directory))}"
    if processes() > 1:
        again += f" --nproc {processes()}"
    watchers = _watchers(run.recipe, display) if is_main_process() else [display]
    with (
        stoppable(display, run.recipe, again, run.checkpoint.exists) as asked,
        process_group(run.recipe.device),
    ):
        result = run.train(watchers, stop=lambda: bool(asked))
    if is_main_process():
        say(f"\n{_result_table(result)}\n\nreport: {run.directory / 'report.html'}")


def _watchers(recipe: Recipe, display: Display) -> list[Watcher]:
    watchers: list[Watcher] = [display]
    if recipe.tensorboard:
        module = _extra("maestro_lod.cli.tensorboard", "tensorboard=true", "tensorboard")
        watchers.append(module.TensorBoard())
    return watchers


def _extra(module: str, what: str, extra: str) -> Any:
    """Import a module that needs the packages of an extra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise OptionError(f"{what} needs more packages: {install_command(extra)}.") from None


def _result_table(result: dict[str, Any]) -> str:
    """Return the result of a run as a table, relative to the dense model."""
    cost = result["summary"]
    lines = [f"{'':14}{'params':>14}{'MACs':>18}"]
    for title, kind in (("dense", "dense_"), ("this model", "fused_")):
        params, macs = cost[f"{kind}params"], cost[f"{kind}macs"]
        of_macs = macs / max(cost["dense_macs"], 1)
        shares = f"  ({params / cost['dense_params']:.2f}×, {of_macs:.2f}×)"
        lines.append(f"{title:14}{params:>14,}{macs:>18,}{shares if kind == 'fused_' else ''}")
    ranks = [row for row in cost["layers"] if row["rank"] is not None]
    if ranks:
        shown = "  ".join(f"{row['name']} {row['rank']}/{row['full_rank']}" for row in ranks[:12])
        lines.append(f"{'ranks':14}{shown}{'  …' if len(ranks) > 12 else ''}")
    size = result["size"]
    if "bits" in size and (size["bits"] != 32 * cost["fused_params"]):
        indices = f", {size['index_bits'] // 8:,} more for indices" if "index_bits" in size else ""
        lines.append(
            f"{'stored':14}{size['params']:>14,}  values, {-(-size['bits'] // 8):,} bytes "
            f"({size['relative_bits']:.2f}×){indices}"
        )
    if result["ledger"] and result["ledger"]["relative_macs"] is not None:
        ledger = result["ledger"]
        lines.append(
            f"{'training cost':14}{ledger['relative_macs']:.2f}× MACs, "
            f"{ledger['relative_params']:.2f}× parameters in memory, relative to dense training"
        )
    for split in ("validation", "test"):
        if result[split]:
            shown = "  ".join(f"{name} {_shown(name, v)}" for name, v in result[split].items())
            lines.append(f"{split:14}{shown}")
    return "\n".join(lines)


def _shown(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"
