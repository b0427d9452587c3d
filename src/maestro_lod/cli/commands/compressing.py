"""`lod compress` and `lod distill`: every size of a pretrained model."""

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

from maestro_lod.cli.commands import options
from maestro_lod.cli.quality import Quality, quality_report
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.recipe_files import recipe_names
from maestro_lod.cli.setup import data_of, dense_model_of, loss_of
from maestro_lod.cli.terminal import say
from maestro_lod.cli.unfinished import unfinished
from maestro_lod.cli.user_code import call_with_options, import_function, with_article
from maestro_lod.deploy.export import export
from maestro_lod.errors import DataError, OptionError, listed, suggest
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.checkpoint import save, save_plain
from maestro_lod.model.cost import count_params
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import ModelInputs, split_batch
from maestro_lod.model.surgery import extract, fuse
from maestro_lod.model.survey import Tied
from maestro_lod.pretrained import compression, distillation
from maestro_lod.progress import OnProgress, ProgressLine, progress_enabled
from maestro_lod.sizes.outputs import own_outputs, own_scores, scores_loss
from maestro_lod.text import install_command, parse_size
from maestro_lod.train.evaluate import evaluation_loss

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
NoCorrection = Annotated[
    bool,
    typer.Option("--no-correction", help="Leave out the correction: less time, a larger loss."),
]
Steps = Annotated[
    int, typer.Option(min=0, help="Steps of distillation from the original at the end.")
]


def compress(
    source: Source,
    out: NewDirectory,
    max_params: Annotated[
        str | None, typer.Option(help="A share of the model (0.5), or a count.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Several such sizes instead: 0.9,0.7,0.5.")
    ] = None,
    data: OwnData = None,
    to: Formats = None,
    int8: Int8 = False,
    batches: Count = 16,
    distill_steps: Steps = 0,
    share_tied: ShareTied = False,
    no_correction: NoCorrection = False,
    quiet: options.Quiet = False,
) -> None:
    """Compress a pretrained model to a limit, using data but no training.

    For a transformers directory it writes a complete one, with tokenizer and model card: the model
    with all smaller sizes in it, which transformers loads after `import maestro_lod`. With --to
    dense it writes merged weights of the original's size, which load everywhere; with --to onnx
    also a file that needs no library. With --sizes the model is corrected for all of them, and
    frontier.json lists them: lod.from_pretrained(OUT, max_params=0.5). Finished stages are kept in
    OUT.unfinished until all is written: after a kill, the same command resumes there.

    Examples:
      lod compress ./MiniLM --data sentences.txt --max-params 0.7 --out small

      lod compress ./llama --data stories.jsonl --max-params 0.5 --distill-steps 500 --out small

      lod compress ./llama --data stories.jsonl --sizes 0.9,0.7,0.5 --out sizes
    """
    formats = _require_formats(to, int8)
    if (max_params is None) == (sizes is None):
        raise OptionError("give one of --max-params and --sizes.")
    limit = None if max_params is None else parse_size(max_params, "--max-params")
    limits = None if sizes is None else [parse_size(s, "--sizes") for s in sizes.split(",")]
    with unfinished(out) as work:
        model, inputs, quality, scores = _opened(source, data, batches)
        directory = Path(source) if Path(source).is_dir() else None
        tied: Tied = "share" if share_tied else "keep"
        with _bars(quiet) as report:
            done = compression.compress(
                model,
                inputs,
                max_params=limit,
                sizes=limits,
                tied=tied,
                correct=not no_correction,
                distill_steps=distill_steps,
                loss=own_scores if scores else own_outputs,
                soft_loss=scores_loss if scores else None,
                resume=work.parts,
                on_progress=report,
            )
        measured = quality.compare()

        def write(place: Path) -> None:
            _write(model, place, formats, inputs, int8, done.frontier if limits else None)
            if directory is not None:
                complete = _extra("maestro_lod.integrations.directory_files").complete_directory
                left_out = complete(
                    place, directory, quality=measured, data=f"held-out batches of {data}"
                )
                for name, reason in left_out.items():
                    say(f"not copied: {name} ({reason})")

        work.write(write)
    sizes_found = f"\n{done.frontier}" if limits else ""
    say(f"{done}{sizes_found}\n{quality_report(measured)}\nwritten to {out}")


def distill(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory that lod compress has written.")
    ],
    teacher: Annotated[Path, typer.Option(help="The original, a transformers directory.")],
    data: Annotated[
        str, typer.Option(metavar="FILE|FUNCTION", help="Text or a function, as for lod compress.")
    ],
    out: NewDirectory,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 500,
    lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 5e-4,
    batches: Annotated[int, typer.Option(min=1, help="Batches to train on.")] = 128,
    only: Annotated[
        bool, typer.Option("--only", help="Train only this size, without the smaller ones.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a compressed transformers model to reproduce the outputs of the original.

    One batch in eight is held out to measure the distance to the original before and after. If it
    did not fall, the earlier weights are written.

    Example:
      lod distill small --teacher ./llama --data stories.jsonl --steps 500 --out distilled
    """
    with unfinished(out) as work:
        saved = _extra("maestro_lod.integrations.huggingface")
        original = _extra("maestro_lod.integrations.model_texts").open_model(teacher)
        model = saved.from_pretrained(directory)
        inputs = _batches(data, teacher, batches)
        with _bars(quiet) as report:
            done = distillation.distill(
                model, original, inputs, steps=steps, lr=lr, sizes="only" if only else "below",
                resume=work.parts, on_progress=report,
            )  # fmt: skip

        def write(place: Path) -> None:
            saved.save_pretrained(model, place)
            _extra("maestro_lod.integrations.directory_files").complete_directory(place, teacher)

        work.write(write)
    say(f"{done}\nwritten to {out}")


def deploy_directory(directory: Path, out: Path, max_params: str | None) -> None:
    """Write one size of a compressed transformers directory as plain layers."""
    limit = None if max_params is None else parse_size(max_params, "--max-params")
    saved = _extra("maestro_lod.integrations.huggingface")
    with unfinished(out) as work:
        plain = extract(saved.from_pretrained(directory, max_params=limit))

        def write(place: Path) -> None:
            saved.save_pretrained(plain, place)
            _extra("maestro_lod.integrations.directory_files").complete_directory(place, directory)
            (place / "frontier.json").unlink(missing_ok=True)  # of the sizes that are left out

        work.write(write)
    say(f"{count_params(plain):,} parameters\nwritten to {out}")


def _require_formats(to: list[str] | None, int8: bool) -> list[str]:
    formats = [*dict.fromkeys(to or ["safetensors"])]
    if unknown := [name for name in formats if name not in _FORMATS]:
        raise OptionError(f"--to {listed(unknown)} is not known. Choose from {listed(_FORMATS)}.")
    if {"dense", "safetensors"} <= set(formats):
        raise OptionError("--to dense and --to safetensors write the same file. Give one of them.")
    if int8 and "onnx" not in formats:
        raise OptionError("--int8 needs the format onnx. Add --to onnx, or remove --int8.")
    return formats


def _opened(
    source: str, data: str | None, count: int
) -> tuple[nn.Module, list[Any], Quality, bool]:
    """Return the model, its batches, its quality, and whether it gives plain tensors of scores."""
    path = Path(source)
    if path.is_dir():
        if data is None:
            raise OptionError(
                "--data is missing. Give text that the model is used on; it decides which ranks to "
                "keep."
            )
        model = _extra("maestro_lod.integrations.model_texts").open_model(path)
        batches, measured = distillation.hold_out(_batches(data, path, _with_held_out(count)))
        return model, batches, Quality(model, measured), False
    if source not in (names := recipe_names()) and path.suffix not in (".yaml", ".yml"):
        raise OptionError(
            f"{source!r} is neither a directory nor a recipe.{suggest(source, names)} For a model "
            f"on a hub, download it first (hf download {source} --local-dir {path.name}) and give "
            "the directory."
        )
    recipe = load_recipe(source, [])
    own = data_of(recipe)
    model, scores = dense_model_of(recipe, own).eval(), recipe.loss.name == "cross_entropy"
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise OptionError(
            f"the model of {source} is on the meta device, without values. Build it with weights."
        )
    if data is None and own.validation is not None:
        quality = Quality(model, own.validation, evaluation_loss(loss_of(recipe)))
        return model, list(itertools.islice(own.train, count)), quality, scores
    more = _with_held_out(count)
    batches, measured = distillation.hold_out(
        list(itertools.islice(own.train, more)) if data is None else _own(data, more)
    )
    return model, batches, Quality(model, measured), scores


def _with_held_out(count: int) -> int:
    """Return the number of batches of which `hold_out` leaves this many."""
    return count + -(-count // (distillation.HELD_OUT - 1))


def _batches(data: str, directory: Path, count: int) -> list[Any]:
    if ":" in data and not Path(data).exists():
        return _own(data, count)
    texts = _extra("maestro_lod.integrations.model_texts").text_batches
    found: list[Any] = texts(Path(data), directory, most=count)
    return found


def _own(data: str, count: int) -> list[Any]:
    given = call_with_options(import_function(data, "data"), {}, f"data {data!r}")
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
            f"transformers directories need the package: {install_command('huggingface')}."
        ) from None


def _quality(model: nn.Module, inputs: list[Any]) -> dict[str, float]:
    """Measure a language model on batches of token ids; nothing of other models."""
    perplexity = _extra("maestro_lod.integrations.model_texts").perplexity(model, inputs)
    return {} if perplexity is None else {"perplexity": perplexity}


def _write(
    model: nn.Module,
    out: Path,
    formats: list[str],
    inputs: list[Any],
    int8: bool,
    sizes: Frontier | None,
) -> None:
    if "onnx" in formats:
        first = split_batch(inputs[0])[0]
        call = ModelInputs.wrap(first)
        export(model, out / "model.onnx", example=call)
        if int8:
            export(model, out / "model.int8.onnx", example=call, quantize="int8")
    if sizes is not None:
        sizes.save(out / "frontier.json")
    of_transformers = hasattr(model, "config") and hasattr(model, "save_pretrained")
    if "dense" not in formats and of_transformers:
        _extra("maestro_lod.integrations.huggingface").save_pretrained(model, out)
    elif "dense" not in formats:
        save(model, out / "model.safetensors", frontier=sizes)
    else:
        dense: Any = fuse(model, by=dict.fromkeys(low_rank_layers(model), "dense"))
        if of_transformers:
            dense.save_pretrained(out)
        else:
            save_plain(dense, out / "model.safetensors")


@contextmanager
def _bars(quiet: bool) -> Iterator[OnProgress]:
    """Show the stage, its progress, and the time that it will still take."""
    console = Console()
    if quiet or not console.is_terminal:
        lines: dict[str, ProgressLine] = {}

        def tell(done: int, total: int, note: str) -> None:
            lines.setdefault(note, ProgressLine(note))(lambda: f"{done} of {total}")

        with progress_enabled(not quiet):
            yield tell
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=console, transient=True) as bars:

        def show(done: int, total: int, note: str) -> None:
            if note not in tasks:
                tasks[note] = bars.add_task(note, total=total)
            bars.update(tasks[note], completed=done)

        yield show
