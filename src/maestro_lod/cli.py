"""`lod …`: thin, strict, typed; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console

    from maestro_lod.display import Display
    from maestro_lod.report import write_report
    from maestro_lod.tasks.recipe import load_recipe, recipe_names
    from maestro_lod.tasks.run import Interrupted, Run, Watcher
    from maestro_lod.tasks.setup import data_of, model_of
except ImportError as missing:  # the core works without what the program needs
    sys.exit(f"lod needs more than the library itself ({missing}): pip install 'maestro-lod[cli]'")

from maestro_lod.cost import summary as summary_of
from maestro_lod.errors import CheckpointError, MaestroError, OptionError, TrainingError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a model once, low-rank with ordered ranks, and get every size out.",
    epilog="Start with: [bold]lod train digits[/bold]",
)

# typer brings its own click, or uses the installed one: take the class from where typer has it
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the final table only.")]


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name (see: lod recipes), or a YAML file.")
    ],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. [dim]\\[default: runs/RECIPE][/dim]")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the data sets lie; else $LOD_DATA.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe, and write model, metrics and report to a run directory.

    Stop with Ctrl-C at any time; [bold]lod resume[/bold] goes on as if nothing had happened.

    Examples:

      lod train digits

      lod train lenet-mnist --set penalty=64e-5 --set seed=1 --out runs/a

      lod train lenet-mnist --set method=dense

      lod train my.yaml     (model: my_package.models:build, data: my_package.data:load, epochs: 5)
    """
    changes = list(change or [])
    if data is not None:
        changes.append(f"data.directory={data}")
    chosen = load_recipe(recipe, changes)
    _train(Run.create(chosen, out or _free_directory(chosen.recipe)), quiet)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run that was stopped.")],
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped, killed or interrupted, exactly where it was."""
    run = Run.open(directory)
    if run.finished:
        raise OptionError(
            f"the run in {directory} has finished. Its report: {directory}/report.html"
        )
    _train(run, quiet)


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run directories.")],
    out: Annotated[
        Path | None, typer.Option(help="The page. [dim]\\[default: report.html in the first][/dim]")
    ] = None,
) -> None:
    """Write one self-contained HTML page about one run, or several side by side."""
    page = write_report(directories, out or directories[0] / "report.html")
    _say(str(page))


@app.command()
def summary(
    target: Annotated[str, typer.Argument(metavar="RECIPE|DIR", help="What to describe.")],
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
) -> None:
    """Print ranks, parameters and MACs of every layer, of a recipe's model or a finished run's."""
    if Path(target).is_dir() and target not in recipe_names():
        if change:
            raise OptionError("--set changes a recipe; the settings of a run are fixed.")
        model, data = Run.open(Path(target)).trained()
    else:
        recipe = load_recipe(target, change or [])
        data = data_of(recipe)
        model = model_of(recipe, data)
    _say(str(summary_of(model, data.example)))


@app.command()
def recipes() -> None:
    """List the recipes that come with the library."""
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        _say(f"{name:{width}}  {load_recipe(name).description}")


def main(arguments: list[str] | None = None) -> None:
    """Run the program; ends with exit code 0, 1 (failed), 2 (wrong input) or 130 (interrupted)."""
    try:
        app(args=arguments, standalone_mode=False)
        code = 0
    except typer.Exit as error:
        code = error.exit_code
    except (TrainingError, CheckpointError) as error:
        code = _complain(error, 1)
    except MaestroError as error:
        code = _complain(error, 2)
    except _UsageError as error:
        message = error.format_message()  # empty where the help was shown instead
        code = _complain(f"{message} See: lod --help", 2) if message else 2
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("interrupted.", 130)
    except BrokenPipeError:  # `lod … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception:
        traceback.print_exc()
        code = _complain("this is a fault of lod, not yours; please report it with the above.", 1)
    sys.exit(code)


def _complain(error: object, code: int) -> int:
    Console(stderr=True).print(
        f"lod: {error}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    return code


def _say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _free_directory(name: str) -> Path:
    """Return runs/NAME, or runs/NAME-2, …: the first that is not taken."""
    number = 1
    while True:
        directory = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not directory.exists():
            return directory
        number += 1


def _train(run: Run, quiet: bool) -> None:
    display = Display(Console(), quiet)
    watchers: list[Watcher] = [display]
    if run.recipe.tensorboard:
        watchers.append(_tensorboard())
    try:
        with _stop_on_signal() as asked:
            result = run.train(watchers, stop=lambda: bool(asked))
    except Interrupted:
        display.close()
        _say(f"stopped; everything is saved. Go on with: lod resume {run.directory}")
        raise typer.Exit(130) from None
    finally:
        display.close()
    _say(f"\n{_result_table(run, result)}\n\nreport: {run.directory / 'report.html'}")


def _tensorboard() -> Watcher:
    try:
        module = importlib.import_module("maestro_lod.integrations.tensorboard")
    except ImportError:
        raise OptionError(
            "tensorboard=true needs the package: pip install 'maestro-lod[tensorboard]'."
        ) from None
    watcher: Watcher = module.TensorBoard()
    return watcher


@contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that a run can save and stop; a second one stops at once."""
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _result_table(run: Run, result: dict[str, Any]) -> str:
    """Lay out what a run has reached beside the dense model."""
    cost = result["summary"]
    lines = [f"{'':14}{'params':>14}{'MACs':>18}"]
    for title, kind in (("dense", "dense_"), ("this model", "fused_")):
        params, macs = cost[f"{kind}params"], cost[f"{kind}macs"]
        shares = f"  ({params / cost['dense_params']:.2f}×, {macs / cost['dense_macs']:.2f}×)"
        lines.append(f"{title:14}{params:>14,}{macs:>18,}{shares if kind == 'fused_' else ''}")
    ranks = [row for row in cost["layers"] if row["rank"] is not None]
    if ranks:
        shown = "  ".join(f"{row['name']} {row['rank']}/{row['full_rank']}" for row in ranks[:12])
        lines.append(f"{'ranks':14}{shown}{'  …' if len(ranks) > 12 else ''}")
    if result["ledger"] and result["ledger"]["relative_macs"] is not None:
        ledger = result["ledger"]
        lines.append(
            f"{'training cost':14}{ledger['relative_macs']:.2f}× MACs, "
            f"{ledger['relative_params']:.2f}× parameters in memory, beside dense training"
        )
    for split in ("validation", "test"):
        if result[split]:
            shown = "  ".join(f"{name} {_shown(name, v)}" for name, v in result[split].items())
            lines.append(f"{split:14}{shown}")
    return "\n".join(lines)


def _shown(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"


if __name__ == "__main__":
    main()
