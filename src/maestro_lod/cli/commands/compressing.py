"""`lod compress` and `lod heal`: every size of a model that one did not train."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from maestro_lod.amounts import amount_of
from maestro_lod.cli.commands import options
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.recipe_files import recipe_names
from maestro_lod.cli.setup import data_of, dense_model_of
from maestro_lod.cli.terminal import say
from maestro_lod.cli.unfinished import unfinished
from maestro_lod.cli.user_code import called, own_function, with_article
from maestro_lod.deploy.export import export
from maestro_lod.errors import DataError, OptionError, listed, nearest
from maestro_lod.files.stage_cache import Kept
from maestro_lod.installing import install
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.checkpoint import save, save_plain
from maestro_lod.model.inputs import Call, as_call, split_batch
from maestro_lod.model.surgery import fuse
from maestro_lod.model.survey import Tied
from maestro_lod.pretrained.compression import Progress as Report
from maestro_lod.pretrained.compression import compress as compressed
from maestro_lod.pretrained.distillation import heal as healed
from maestro_lod.progress import Telling, progress_shown
from maestro_lod.sizes.outputs import own_outputs, own_scores, scores_loss

_FORMATS = ("safetensors", "dense", "onnx")

Source = Annotated[
    str, typer.Argument(metavar="PATH|RECIPE", help="A transformers directory, or a recipe.")
]
OwnData = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FUNCTION",
        help="Text (.txt, .jsonl, .parquet), or package.module:function that returns batches. "
        "[dim]\\[default: the recipe's data][/dim]",
    ),
]
Formats = Annotated[
    list[str] | None,
    typer.Option(help="safetensors, dense (merged weights), onnx; may be repeated."),
]
Count = Annotated[int, typer.Option(min=1, help="Batches to calibrate on.")]
NewDirectory = Annotated[Path, typer.Option(help="A new directory for the files.")]
Int8 = Annotated[
    bool, typer.Option("--int8", help="With --to onnx: also a file with weights in 8 bits.")
]
ShareTied = Annotated[
    bool, typer.Option("--share-tied", help="Decompose an embedding that is tied to the head.")
]
Fast = Annotated[bool, typer.Option("--fast", help="No correction: less time, a larger loss.")]
Steps = Annotated[int, typer.Option(min=0, help="Steps of healing by the original.")]


def compress(
    source: Source,
    out: NewDirectory,
    max_params: Annotated[str, typer.Option(help="A share of the model (0.5), or a count.")],
    data: OwnData = None,
    to: Formats = None,
    int8: Int8 = False,
    batches: Count = 16,
    heal: Steps = 0,
    share_tied: ShareTied = False,
    fast: Fast = False,
    quiet: options.Quiet = False,
) -> None:
    """Cut a pretrained model to a limit, by data and without training.

    Of a transformers directory it writes a complete one, with tokenizer and model card: the model
    with all smaller sizes in it, which transformers loads after import maestro_lod; with --to dense
    instead merged weights of the original's size, which load everywhere. With --to onnx also a file
    that needs no library. What is finished is kept beside the directory until all is written: after
    a kill, the same command goes on.

    Examples:

      lod compress ./MiniLM --data sentences.txt --max-params 0.7 --out small

      lod compress ./llama --data stories.jsonl --max-params 0.5 --heal 500 --out small
    """
    formats = _require_formats(to, int8)
    limit = amount_of(max_params, "--max-params")
    with unfinished(out) as work:
        model, inputs, scores = _opened(source, data, batches)
        directory = Path(source) if Path(source).is_dir() else None
        before = _quality(model, inputs) if directory else {}
        tied: Tied = "share" if share_tied else "keep"
        with _bars(quiet) as report:
            done = compressed(
                model, inputs, max_params=limit, tied=tied, sequential=not fast, healing=heal,
                loss=own_scores if scores else own_outputs,
                soft_loss=scores_loss if scores else None, keep=work.parts, progress=report,
            )  # fmt: skip
        quality = {what: (value, _quality(model, inputs)[what]) for what, value in before.items()}
        measured_on = f"{len(inputs)} batches of {data}, which the compression was calibrated on"

        def write(place: Path) -> None:
            _write(model, place, formats, inputs, int8)
            if directory:
                complete = _extra("maestro_lod.integrations.directory_files").complete_directory
                left_out = complete(place, directory, quality=quality, data=measured_on)
                for name, reason in left_out.items():
                    say(f"not copied: {name} ({reason})")

        work.write(write)
    for what, (value, now) in quality.items():
        say(f"{what}: {value:.4g} before, {now:.4g} after ({measured_on})")
    say(f"{done}\nwritten to {out}")


def heal(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What lod compress wrote.")],
    teacher: Annotated[Path, typer.Option(help="The original, a transformers directory.")],
    data: Annotated[str, typer.Option(metavar="FILE|FUNCTION", help="As for lod compress.")],
    out: NewDirectory,
    steps: Annotated[int, typer.Option(min=1)] = 500,
    batches: Annotated[int, typer.Option(min=1, help="Batches to go through.")] = 128,
    only: Annotated[
        bool, typer.Option("--only", help="Heal this size alone, not those below it.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a compressed transformers model for some steps to say what the original says.

    Example:

      lod heal small --teacher ./llama --data stories.jsonl --steps 500 --out healed
    """
    with unfinished(out) as work:
        saved = _extra("maestro_lod.integrations.huggingface")
        original = _extra("maestro_lod.integrations.model_texts").open_model(teacher)
        model = saved.from_pretrained(directory)
        inputs = _batches(data, teacher, batches)
        kept = Kept(work.parts, {"of": directory, "data": data, "steps": steps, "only": only})
        with _bars(quiet) as report:
            losses = healed(
                model, inputs, teacher=original, steps=steps,
                sizes="only" if only else "below", checkpoint=kept.file("healing"),
                progress=lambda done, _: report("healing", done, steps),
            )  # fmt: skip

        def write(place: Path) -> None:
            saved.save_pretrained(model, place)
            _extra("maestro_lod.integrations.directory_files").complete_directory(place, teacher)

        work.write(write)
    tenth = max(1, steps // 10)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    say(f"distance to the original: {first:.4g} at first, {last:.4g} at last\nwritten to {out}")


def _require_formats(to: list[str] | None, int8: bool) -> list[str]:
    formats = [*dict.fromkeys(to or ["safetensors"])]
    if unknown := [name for name in formats if name not in _FORMATS]:
        raise OptionError(f"--to {listed(unknown)} is not known. Choose from {listed(_FORMATS)}.")
    if {"dense", "safetensors"} <= set(formats):
        raise OptionError("--to dense and --to safetensors write the same file. Give one of them.")
    if int8 and "onnx" not in formats:
        raise OptionError("--int8 is for ONNX files: give --to onnx too.")
    return formats


def _opened(source: str, data: str | None, count: int) -> tuple[nn.Module, list[Any], bool]:
    """Return the model, its batches, and whether it gives class scores as a plain tensor."""
    path = Path(source)
    if path.is_dir():
        if data is None:
            raise OptionError("--data is missing: what the model sees decides what can go.")
        model = _extra("maestro_lod.integrations.model_texts").open_model(path)
        return model, _batches(data, path, count), False
    if source not in (names := recipe_names()) and path.suffix not in (".yaml", ".yml"):
        raise OptionError(
            f"{source!r} is neither a directory nor a recipe.{nearest(source, names)} For a model "
            f"on a hub, download it first (hf download {source} --local-dir {path.name}) and give "
            "the directory."
        )
    recipe = load_recipe(source, [])
    own = data_of(recipe)
    model = dense_model_of(recipe, own)
    batches = list(itertools.islice(own.train, count)) if data is None else _own(data, count)
    return model.eval(), batches, recipe.loss.name == "cross_entropy"


def _batches(data: str, directory: Path, count: int) -> list[Any]:
    if ":" in data and not Path(data).exists():
        return _own(data, count)
    texts = _extra("maestro_lod.integrations.model_texts").text_batches
    found: list[Any] = texts(Path(data), directory, most=count)
    return found


def _own(data: str, count: int) -> list[Any]:
    given = called(own_function(data, "data"), {}, f"data {data!r}")
    try:
        batches = list(itertools.islice(given, count))
    except TypeError:
        raise OptionError(
            f"data {data!r} returned {with_article(given)}: return batches, such as a list."
        ) from None
    if not batches:
        raise DataError(f"data {data!r} has no batch.")
    return batches


def _extra(module: str) -> Any:
    """Import a module that needs transformers, whose bars are for terminals alone."""
    try:
        if not sys.stderr.isatty():
            importlib.import_module("transformers.utils.logging").disable_progress_bar()
        return importlib.import_module(module)
    except ImportError:
        raise OptionError(
            f"transformers directories need the package: {install('huggingface')}."
        ) from None


def _quality(model: nn.Module, inputs: list[Any]) -> dict[str, float]:
    """Measure a language model on batches of token ids; nothing of other models."""
    perplexity = _extra("maestro_lod.integrations.model_texts").perplexity(model, inputs)
    return {} if perplexity is None else {"perplexity": perplexity}


def _write(model: nn.Module, out: Path, formats: list[str], inputs: list[Any], int8: bool) -> None:
    if "onnx" in formats:
        first = split_batch(inputs[0])[0]
        call: Call = as_call(tuple(first) if isinstance(first, list) else first)
        export(model, out / "model.onnx", example=call)
        if int8:
            export(model, out / "model.int8.onnx", example=call, quantize="int8")
    of_transformers = hasattr(model, "config") and hasattr(model, "save_pretrained")
    if "dense" not in formats and of_transformers:
        _extra("maestro_lod.integrations.huggingface").save_pretrained(model, out)
    elif "dense" not in formats:
        save(model, out / "model.safetensors")
    else:
        dense: Any = fuse(model, by=dict.fromkeys(low_rank_layers(model), "dense"))
        if of_transformers:
            dense.save_pretrained(out)
        else:
            save_plain(dense, out / "model.safetensors")


@contextmanager
def _bars(quiet: bool) -> Iterator[Report]:
    """Show what is being done, how far it is, and how long it will take."""
    console = Console()
    if quiet or not console.is_terminal:
        telling: dict[str, Telling] = {}

        def tell(what: str, done: int, of: int) -> None:
            telling.setdefault(what, Telling(what))(lambda: f"{done} of {of}")

        with progress_shown(not quiet):
            yield tell
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=console, transient=True) as bars:

        def show(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done)

        yield show
