"""`lod …`: thin, strict, typed; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from maestro_lod.display import Display
    from maestro_lod.report import write_report
    from maestro_lod.tasks.deployment import SUFFIXES, Trained, find_frontier
    from maestro_lod.tasks.deployment import bench as compare
    from maestro_lod.tasks.deployment import deploy as write_deployment
    from maestro_lod.tasks.recipe import Recipe, all_settings, load_recipe, recipe_names
    from maestro_lod.tasks.run import Interrupted, Run, Watcher
    from maestro_lod.tasks.setup import OwnCodeError, data_of, model_of, own_names
except ImportError as missing:  # the core works without what the program needs
    sys.exit(f"lod needs more than the library itself ({missing}): pip install 'maestro-lod[cli]'")

from maestro_lod.cost import summary as summary_of
from maestro_lod.errors import (
    CheckpointError,
    MaestroError,
    OptionError,
    TrainingError,
    listed,
    nearest,
)
from maestro_lod.memory import keep_freed_memory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a model once, low-rank with ordered ranks, and get every size out.",
    epilog="Start with: [bold]lod train digits[/bold]",
)

# what does not fit is said in one line; torch would log a page about it before
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

# typer brings its own click, or uses the installed one: take the class from where typer has it
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _settings() -> str:
    """List every setting, one to a line, for the help."""
    lines = [r"[bold]Settings[/bold], for --set and recipe files [dim]\[default, others][/dim]:"]
    for setting in all_settings():
        switch = setting.values == "true, false"
        known = setting.default if switch or "," not in setting.values else setting.values
        shown = rf" [dim]\[{known}][/dim]" if known else ""
        lines.append(f"{setting.key:23}{setting.meaning}{shown}")
    return "\n".join(lines)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the final table only.")]
Limit = Annotated[str | None, typer.Option(help="A share of dense (0.25), or a count.")]


@app.command(epilog=_settings())
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe's name (see: lod recipes), or a YAML file."
        ),
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
    chosen = load_recipe(recipe, _with_data(change, data))
    _train(Run.create(chosen, out or _free_directory(Path(chosen.recipe).name or "run")), quiet)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run that was stopped.")],
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped, killed or interrupted, exactly where it was."""
    run = Run.open(directory)
    if run.finished:
        raise OptionError(
            f"the run in {directory} has finished. To write its report anew: lod report {directory}"
        )
    _train(run, quiet)


@app.command()
def tune(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe's name (see: lod recipes), or a YAML file."
        ),
    ],
    max_params: Annotated[
        int | None, typer.Option(help="Most parameters that the model may have.")
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="Least accuracy on validation data, such as 0.98.")
    ] = None,
    pareto: Annotated[
        int | None,
        typer.Option(
            metavar="TRIALS",
            help="Instead: so many trials over λ and learning rate, for the best trade-offs "
            "between accuracy and MACs.",
        ),
    ] = None,
    largest: Annotated[
        float | None, typer.Option(help="Largest λ. [dim]\\[default: up to 8 × the recipe's][/dim]")
    ] = None,
    smallest: Annotated[
        float | None, typer.Option(help="Smallest λ. [dim]\\[default: largest / 1024][/dim]")
    ] = None,
    few: Annotated[
        float, typer.Option(help="Share of --max-params below which a trial ends as too sparse.")
    ] = 0.5,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where trials are written. [dim]\\[default: runs/tune-RECIPE][/dim]"),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|URL",
            help="Where the search is kept: a file, or a database such as postgresql://… "
            "[dim]\\[default: search.journal in --out][/dim]",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the search. [dim]\\[default: RECIPE][/dim]")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the data sets lie; else $LOD_DATA.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Search the λ that gives a model within limits: halve it until one is accurate enough.

    The same command goes on with a search that was stopped, and joins one that runs: start it as
    often as you have machines, with the same --out or --storage. Ends with exit code 1 if no model
    is within both limits.

    Examples:

      lod tune lenet-mnist --max-params 12000 --min-accuracy 0.98

      lod tune lenet-mnist --pareto 30
    """
    if pareto is not None and (max_params is not None or min_accuracy is not None):
        raise OptionError("--pareto has no limits: leave --max-params and --min-accuracy out.")
    if pareto is None and (max_params is None or min_accuracy is None):
        raise OptionError("give both --max-params and --min-accuracy, or --pareto.")
    chosen = load_recipe(recipe, _with_data(change, data))
    tuning = _extra("maestro_lod.tasks.tuning", "lod tune", "tune")
    display = Display(Console(), quiet)
    with _stoppable(display, chosen, "the same command", lambda: True) as asked:
        search = tuning.Tuning(
            chosen,
            out or Path("runs") / f"tune-{Path(chosen.recipe).name or 'run'}",
            storage=storage,
            name=name,
            watchers=_watchers(chosen, display),
            watch=lambda trial: None if quiet else _say(str(trial)),
            stop=lambda: bool(asked),
        )
        if pareto is not None:
            found = search.explore(pareto, largest=largest, smallest=smallest)
        else:
            found = search.tune(
                max_params=max_params,
                min_accuracy=min_accuracy,
                largest=largest,
                smallest=smallest,
                few=few,
            )
    _say(f"\n{found}")
    if pareto is None and found.chosen is not None:
        _say(f"model and report: {found.chosen.where}")
    if pareto is None and found.status != "satisfied":
        raise typer.Exit(1)


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run directories.")],
    out: Annotated[
        Path | None, typer.Option(help="The page. [dim]\\[default: report.html in the first][/dim]")
    ] = None,
) -> None:
    """Write one self-contained HTML page about one run, or several side by side."""
    try:
        page = write_report(directories, out or directories[0] / "report.html")
    except CheckpointError as error:  # nothing has failed but what was given
        raise OptionError(str(error)) from error
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


@app.command()
def frontier(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    method: Annotated[
        str, typer.Option(help="look-ahead, per-cost, greedy (the paper's), knapsack or threshold.")
    ] = "look-ahead",
    quiet: Quiet = False,
) -> None:
    """Find the best submodel for every size, without training, and add them to the report.

    Stop it at any time: the next call goes on where it was.
    """
    run = Run.open(directory)
    with _search_bar(quiet) as progress:
        found = find_frontier(Trained.of(run), method=method, progress=progress)
    write_report([directory], directory / "report.html")
    _say(f"{found}\n\nwritten: {directory / 'frontier.json'}, {directory / 'report.html'}")


@app.command()
def deploy(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    out: Annotated[Path, typer.Option(help="A new directory for the files.")],
    to: Annotated[
        list[str] | None, typer.Option(help="onnx, pt2 or safetensors; may be repeated.")
    ] = None,
    max_params: Limit = None,
    max_macs: Limit = None,
    max_bytes: Limit = None,
    max_latency: Annotated[float | None, typer.Option(help="Seconds, here, at --batch.")] = None,
    min_accuracy: Annotated[float | None, typer.Option(help="A share, such as 0.9.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size to time with.")] = 1,
    multiple: Annotated[
        int | None, typer.Option("--round", min=1, help="Round ranks to a multiple.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="For ONNX, an int8 file too.")] = False,
    allow_slower: Annotated[
        bool, typer.Option("--allow-slower", help="Write it even if dense is faster here.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write the best size within limits to files that were verified, tested and timed.

    Examples:

      lod deploy runs/digits --max-macs 0.25 --out phone

      lod deploy runs/digits --max-params 5000 --to onnx --to pt2 --int8 --out watch
    """
    formats = to or ["onnx"]
    for format_ in formats:
        if format_ not in SUFFIXES:
            raise OptionError(
                f"there is no format {format_!r}.{nearest(format_, SUFFIXES)} Formats: "
                f"{listed(SUFFIXES)}."
            )
    limits = {
        "max_params": _number("max-params", max_params),
        "max_macs": _number("max-macs", max_macs),
        "max_bytes": _number("max-bytes", max_bytes),
        "max_latency": max_latency,
        "min_accuracy": min_accuracy,
    }
    given = {key: value for key, value in limits.items() if value is not None}
    if not given:
        raise OptionError("give a limit, such as --max-macs 0.25 or --max-params 5000.")
    with _search_bar(quiet) as progress:
        done = write_deployment(
            Trained.of(Run.open(directory)), given, formats, out, batch=batch, multiple=multiple,
            int8=int8, allow_slower=allow_slower, progress=progress,
        )  # fmt: skip
    _say(f"{done}\n\nwritten to {out}")


@app.command()
def bench(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    quiet: Quiet = False,
) -> None:
    """Print latency, size and test accuracy of dense and deployed sizes side by side."""
    with _search_bar(quiet) as progress:
        text = compare(Trained.of(Run.open(directory)), batch=batch, progress=progress)
    _say(text)


def main(arguments: list[str] | None = None) -> None:
    """Run the program; ends with exit code 0, 1 (failed), 2 (wrong input) or 130 (interrupted)."""
    keep_freed_memory()
    try:
        code = app(args=arguments, prog_name="lod", standalone_mode=False) or 0
    except OwnCodeError as error:
        traceback.print_exception(error.__cause__)  # theirs to read
        code = _complain(error, 1)
    except (TrainingError, CheckpointError) as error:
        code = _complain(error, 1)
    except MaestroError as error:
        code = _complain(error, 2)
    except _UsageError as error:
        message = error.format_message()  # empty where the help was shown instead
        end = "" if message.endswith((".", "?")) else "."
        code = _complain(f"{message}{end} See: lod --help", 2) if message else 2
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("interrupted.", 130)
    except BrokenPipeError:  # `lod … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _complain(f"{error.filename or 'cannot go on'}: {error.strerror}.", 1)
    except Exception:
        traceback.print_exc()
        code = _complain("this is a fault of lod, not yours; please report it with the above.", 1)
    sys.exit(code)


def _complain(error: object, code: int) -> int:
    line = " ".join(f"lod: {error}".split())  # some of torch's messages have several
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    return code


def _say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _number(option: str, text: str | None) -> int | float | None:
    """Read a count or a share; what looks like a whole number is a count."""
    if text is None:
        return None
    try:
        return float(text) if set(text) & set(".eE") else int(text)
    except ValueError:
        raise OptionError(
            f"--{option} {text!r} is no number: give a share of dense such as 0.25, or a count."
        ) from None


@contextmanager
def _search_bar(quiet: bool) -> Iterator[Callable[[int, float], None]]:
    """Show how far a search of sizes has come: from all of the cost down to nothing."""
    console = Console()
    if quiet or not console.is_terminal:
        yield lambda count, share: None
        return
    columns = TextColumn("searching sizes"), BarColumn(), TextColumn("{task.fields[state]}")
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=1.0, state="")

        def show(count: int, share: float) -> None:
            bars.update(task, completed=1.0 - share, state=f"{count} sizes, down to {share:.2f}×")

        yield show


def _free_directory(name: str) -> Path:
    """Return runs/NAME, or runs/NAME-2, …: the first that is not taken."""
    number = 1
    while True:
        directory = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not directory.exists():
            return directory
        number += 1


def _with_data(change: list[str] | None, data: Path | None) -> list[str]:
    """Return the changes of a recipe, --data among them."""
    if data is None:
        return change or []
    return [*(change or []), f"data.directory={json.dumps(str(data.absolute()))}"]  # for any name


def _train(run: Run, quiet: bool) -> None:
    display = Display(Console(), quiet)
    again = f"lod resume {shlex.quote(str(run.directory))}"
    with _stoppable(display, run.recipe, again, run.checkpoint.exists) as asked:
        result = run.train(_watchers(run.recipe, display), stop=lambda: bool(asked))
    _say(f"\n{_result_table(run, result)}\n\nreport: {run.directory / 'report.html'}")


def _watchers(recipe: Recipe, display: Display) -> list[Watcher]:
    watchers: list[Watcher] = [display]
    if recipe.tensorboard:
        module = _extra("maestro_lod.integrations.tensorboard", "tensorboard=true", "tensorboard")
        watchers.append(module.TensorBoard())
    return watchers


def _extra(module: str, what: str, extra: str) -> Any:
    """Import a module whose packages are an extra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise OptionError(
            f"{what} needs the package: pip install 'maestro-lod[{extra}]'."
        ) from None


@contextmanager
def _stoppable(
    display: Display, recipe: Recipe, again: str, saved: Callable[[], bool]
) -> Iterator[list[int]]:
    """Let signals stop a training, and say how to go on after whatever has ended it."""
    asked: list[int] = []
    try:
        with _stop_on_signal(lambda: display.begun) as asked, _warnings_in_a_line():
            yield asked
    except Interrupted:
        display.close()
        _say(f"stopped; everything is saved. Go on with: {again}")
        raise typer.Exit(128 + asked[0]) from None
    except KeyboardInterrupt:
        display.close()
        hint = f" Go on from the last checkpoint with: {again}" if saved() else ""
        raise typer.Exit(_complain(f"interrupted.{hint}", 130)) from None
    except MaestroError:
        raise
    except Exception as error:
        names = own_names(recipe)
        if not names:
            raise
        raise OwnCodeError(
            f"{type(error).__name__}: {error}. This recipe runs your own {listed(names)}: the "
            f"above says where it failed. Once that is mended, go on with: {again}"
        ) from error
    finally:
        display.close()


@contextmanager
def _stop_on_signal(begun: Callable[[], bool]) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that a run can save and stop.

    Before it has begun, or the second time, they stop it at once.
    """
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if asked or not begun():
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show warnings as what they say, without the place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _complain(f"note: {message}", 0)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _result_table(run: Run, result: dict[str, Any]) -> str:
    """Lay out what a run has reached beside the dense model."""
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
