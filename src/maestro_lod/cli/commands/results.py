"""Commands for finished runs: report, summary, frontier, deploy, bench, verify."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from maestro_lod.cli.bench import bench as compare
from maestro_lod.cli.commands import options
from maestro_lod.cli.commands.compressing import deploy_directory
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.recipe_files import recipe_names
from maestro_lod.cli.report import write_report
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import data_of, model_of
from maestro_lod.cli.terminal import complain, say, search_bar
from maestro_lod.cli.trained import Trained, find_frontier, quality_loss, require_deployable
from maestro_lod.cli.trained import deploy as write_deployment
from maestro_lod.deploy.manifest import MANIFEST, matches_manifest, read_digests
from maestro_lod.errors import CheckpointError, OptionError, listed
from maestro_lod.files.atomic import require_no_link
from maestro_lod.files.json_files import parse_json, read_limited
from maestro_lod.model.checkpoint import verify as verify_tensors
from maestro_lod.model.cost import summary as summary_of
from maestro_lod.sizes.frontier_search import require_method
from maestro_lod.text import parse_size


def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run directories.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Path of the page. [dim]\\[default: DIR/report.html; report-A-B.html for several]"
            "[/dim]"
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML page about one run, or a comparison of several."""
    try:
        page = write_report(directories, out or _place_of(directories))
    except CheckpointError as error:  # a usage error: the given directory cannot be used
        raise OptionError(str(error)) from error
    say(str(page))


def _place_of(directories: Sequence[Path]) -> Path:
    """Return the default path of a page: in its run, or in the working directory for several."""
    names = [directory.resolve().name for directory in dict.fromkeys(directories)]
    if len(names) == 1:
        return directories[0] / "report.html"
    return Path(f"report-{'-'.join(names)}"[:120] + ".html")


def summary(
    target: Annotated[
        str,
        typer.Argument(metavar="RECIPE|DIR", help="A recipe, or the directory of a finished run."),
    ],
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
    trust: options.Trust = False,
) -> None:
    """Print rank, parameters and MACs of every layer of a recipe or a finished run."""
    if Path(target).is_dir() and target not in recipe_names():
        if change:
            raise OptionError(f"--set does not apply to a finished run: {target}. Give a recipe.")
        model, data = Run.open(Path(target), trust=trust).trained()
    else:
        recipe = load_recipe(target, change or [])
        data = data_of(recipe)
        model = model_of(recipe, data)
    say(str(summary_of(model, data.example)))


def frontier(
    directory: options.FinishedRun,
    method: Annotated[
        str, typer.Option(help="Search: measured, look-ahead, or greedy as in the paper.")
    ] = "measured",
    cost: Annotated[str, typer.Option(help="Cost to reduce: macs or params.")] = "macs",
    trust: options.Trust = False,
    quiet: options.Quiet = False,
) -> None:
    """Search the best ranks of every size, without training, and add them to the report.

    An interrupted search is resumed by the same command.
    """
    require_method(method)
    if cost not in ("macs", "params"):
        raise OptionError(f"--cost {cost!r} is unknown. Choose macs or params.")
    run = Run.open(directory, trust=trust)
    with search_bar(quiet) as progress:
        found = find_frontier(Trained.of(run), method=method, cost=cost, on_progress=progress)
    say(f"{found}\n\nwritten: {directory / 'frontier.json'}, {directory / 'report.html'}")


def deploy(
    directory: options.FinishedRun,
    out: Annotated[Path, typer.Option(help="New directory for the files.")],
    to: options.Formats = None,
    max_params: options.Limit = None,
    max_macs: options.Limit = None,
    max_bytes: options.Limit = None,
    max_latency: Annotated[
        float | None, typer.Option(help="Seconds per batch on this machine.")
    ] = None,
    min_accuracy: Annotated[float | None, typer.Option(help="Least accuracy, such as 0.9.")] = None,
    batch: options.Batch = 1,
    multiple: options.Multiple = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Also write int8 files, of onnx and pte.")
    ] = False,
    finetune_epochs: Annotated[
        int, typer.Option(help="Epochs to train the chosen size before it is written.", min=0)
    ] = 0,
    prefer_speed: options.PreferSpeed = False,
    trust: options.Trust = False,
    quiet: options.Quiet = False,
) -> None:
    """Export the model of a run, in full or cut to a size, and verify the files.

    The files are also tested and timed. A format that cannot represent the model is left out with
    a message, and the exit code is 3.

    Examples:
      lod deploy runs/digits --out phone

      lod deploy runs/digits --max-params 10% --to onnx --to pt2 --int8 --out watch

      lod deploy runs/digits --max-macs 25% --finetune-epochs 1 --out phone

    For a transformers directory of lod compress it writes another one, of the size within
    --max-params alone and without low-rank layers:
      lod deploy sizes --max-params 0.7 --out small
    """
    if (directory / "config.json").is_file():
        others = (to, max_macs, max_bytes, max_latency, min_accuracy, multiple, int8 or None,
                  finetune_epochs or None, prefer_speed or None)  # fmt: skip
        if any(option is not None for option in others):
            raise OptionError(
                f"{directory} is a transformers directory, of which only --max-params and --out "
                "can be used. Leave the other options out."
            )
        deploy_directory(directory, out, max_params)
        return
    formats = [*dict.fromkeys(to or ["onnx"])]
    counts = {"max_params": max_params, "max_macs": max_macs, "max_bytes": max_bytes}
    limits: dict[str, float | None] = {
        key: None if text is None else parse_size(text, f"--{key.replace('_', '-')}")
        for key, text in counts.items()
    }
    limits |= {"max_latency": max_latency, "min_accuracy": min_accuracy}
    given = {key: value for key, value in limits.items() if value is not None}
    require_deployable(given, formats, out, int8=int8)
    trained = Trained.of(Run.open(directory, trust=trust))
    with search_bar(quiet) as progress:
        done = write_deployment(
            trained, given, formats, out, batch=batch, multiple=multiple,
            int8=int8, prefer_speed=prefer_speed, finetune_epochs=finetune_epochs,
            on_progress=progress,
        )  # fmt: skip
    say(f"{done}\n\nwritten to {out}")
    if (worse := quality_loss(trained, done)) is not None:
        say(worse)
    if done.point is not None and trained.plain is not None:
        say(
            "the model was not trained low-rank: it was cut by SVD, and zero weights did not stay "
            "zero"
        )
    for name, why in done.left_out.items():
        complain(f"left out: {name}. {why}", 3)
    if done.left_out:
        raise typer.Exit(3)


def bench(
    directory: options.FinishedRun,
    batch: options.Batch = 1,
    reference: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A dense run of the same task, as another row."),
    ] = None,
    trust: options.Trust = False,
    quiet: options.Quiet = False,
) -> None:
    """Print latency, size and test accuracy of the dense model and of smaller sizes."""
    with search_bar(quiet) as progress:
        trained = Trained.of(Run.open(directory, trust=trust))
        other = None if reference is None else Trained.of(Run.open(reference, trust=trust))
        text = compare(trained, batch=batch, reference=other, on_progress=progress)
    say(text)


def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or a directory.")],
) -> None:
    """Check that files are as they were written; exit with 1 if one is damaged."""
    if not path.exists():
        raise OptionError(f"{path} does not exist.")
    files = _files_to_verify(path)
    if not files:
        raise OptionError(
            f"{path} has no file to verify. Give a directory with {listed(_VERIFIED)} files."
        )
    damaged = 0
    for file in files:
        try:
            if file != path:
                require_no_link(file)
            say(f"{file}: {_VERIFIED.get(file.suffix, _exported)(file)}")
        except CheckpointError as error:
            damaged += 1
            say(f"{file}: DAMAGED. {error}")
    if damaged:
        raise CheckpointError(f"{damaged} of {len(files)} files in {path} are damaged.")


def _files_to_verify(path: Path) -> list[Path]:
    """Return the files that can be verified, and all that a manifest lists, existing or not."""
    found = path.rglob("*") if path.is_dir() else [path]
    files = {file for file in found if file.suffix in _VERIFIED and file.is_file()}
    for directory in {file.parent for file in files if file.name == MANIFEST}:
        with suppress(CheckpointError):  # reported when the manifest is verified
            files |= {directory / name for name in read_digests(directory) or ()}
    return sorted(files)


def _tensors(file: Path) -> str:
    proven = verify_tensors(file)
    if matches_manifest(file) or proven:
        return "as written"
    return "complete; written before digests were stored, so not verifiable"


def _exported(file: Path) -> str:
    if matches_manifest(file):
        return "as written"
    return "not verifiable: no digest was stored when it was written"


def _lines(file: Path) -> str:
    """Require that a file is JSON, as a whole or line by line."""
    try:
        text = read_limited(file)
        for part in text.splitlines() if file.suffix == ".jsonl" else [text]:
            parse_json(part)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"it is not JSON ({error}).") from error
    if file.name == MANIFEST:
        read_digests(file.parent)
    return "readable"


_VERIFIED = {
    ".safetensors": _tensors,
    ".json": _lines,
    ".jsonl": _lines,
    ".onnx": _exported,
    ".data": _exported,
    ".pt2": _exported,
    ".pte": _exported,
}
"""Function that verifies a file, by suffix; other files count if a manifest lists them."""
