"""Options of the commands: their flags, types and help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the final table only.")]
RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe's name (see: lod recipes), or a YAML file."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated."),
]
DataFolder = Annotated[
    Path | None, typer.Option(help="Directory that contains the datasets (default: $LOD_DATA).")
]
Processes = Annotated[
    int,
    typer.Option("--nproc", min=1, max=1024, help="Processes on this machine that train together."),
]
Restarts = Annotated[
    int, typer.Option(min=0, help="How often all processes are restarted after one of them ends.")
]

# of lod tune
MaxParams = Annotated[int | None, typer.Option(help="Largest number of parameters of the model.")]
MinAccuracy = Annotated[
    float | None, typer.Option(help="Least accuracy on validation data, such as 0.98.")
]
Trials = Annotated[
    int | None,
    typer.Option(
        metavar="TRIALS",
        help="Search without limits: number of trials over λ and learning rate, for the best "
        "trade-offs between accuracy and MACs.",
    ),
]
Largest = Annotated[
    float | None, typer.Option(help="Largest λ. [dim]\\[default: up to 8 × the recipe's][/dim]")
]
Smallest = Annotated[
    float | None, typer.Option(help="Smallest λ. [dim]\\[default: largest / 1024][/dim]")
]
Few = Annotated[
    float, typer.Option(help="Share of --max-params below which a trial ends as too sparse.")
]
TrialsFolder = Annotated[
    Path | None,
    typer.Option(help="Directory of the trials. [dim]\\[default: runs/tune-RECIPE][/dim]"),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|URL",
        help="Storage of the search: a file, or a database such as postgresql://… "
        "[dim]\\[default: search.journal in --out][/dim]",
    ),
]
SearchName = Annotated[
    str | None, typer.Option(help="Name of the search. [dim]\\[default: RECIPE][/dim]")
]

# of runs
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the user code that it names although it was not trained here."
    ),
]
FinishedRun = Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")]
Limit = Annotated[
    str | None, typer.Option(metavar="AMOUNT", help="A share of dense (25%, 0.25x), or 300k, 1.2M.")
]
Formats = Annotated[
    list[str] | None, typer.Option(help="onnx, pt2, pte or safetensors; may be repeated.")
]
Multiple = Annotated[
    int | None,
    typer.Option("--round", min=1, max=2**16, help="Round ranks to a multiple of this number."),
]
Batch = Annotated[int, typer.Option(min=1, max=2**16, help="Batch size of the timings.")]
PreferSpeed = Annotated[
    bool,
    typer.Option(
        "--prefer-speed",
        help="Multiply out layers that are slower factored; leave out files slower than dense.",
    ),
]


def with_data(change: list[str] | None, data: Path | None) -> list[str]:
    """Return the changes of a recipe, including that of --data."""
    if data is None:
        return change or []
    return [
        *(change or []),
        f"data.directory={json.dumps(str(data.absolute()))}",
    ]  # JSON quotes any name
