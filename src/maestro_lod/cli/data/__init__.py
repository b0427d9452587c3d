"""Built-in datasets: batches for training, validation and test."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from maestro_lod.cli.data.batches import USUAL_SHARE, Batches, Data, Request
from maestro_lod.cli.user_code import nearest_name
from maestro_lod.errors import DataError, OptionError, listed, suggest
from maestro_lod.text import install_command

__all__ = ["DATA", "Batches", "Data", "load_data"]

DATA = {
    "digits": "digits",
    "mnist": "decoded",
    "cifar10": "decoded",
    "imagenet": "decoded",
    "multi30k": "text",
}
"""Module that loads each dataset; imported on use, because each needs other packages."""


def load_data(
    name: str,
    *,
    batch: int,
    seed: int = 0,
    directory: Path | None = None,
    validation: float = USUAL_SHARE,
    limit: int | None = None,
    **options: Any,
) -> Data:
    """Load a built-in dataset.

    Args:
        name: A key of `DATA`.
        batch: Batch size.
        seed: With torch's global generator, fixes the order and the augmentation of an epoch.
        directory: Directory that contains the datasets; by default $LOD_DATA, then the Hub.
        validation: Share of the training set that is held out, the same samples in every run.
        limit: Largest number of training samples, and of test samples.
        **options: Options of that dataset alone (multi30k: `min_count`).

    Returns:
        The batches, an example input and a note.

    Raises:
        OptionError: If the name or an option is unknown or wrong.
        DataError: If the dataset or a package is missing, or a file is damaged.

    Example:
        >>> data = load_data("digits", batch=64)
        >>> inputs, target = next(iter(data.train))
    """
    if name not in DATA:
        raise OptionError(
            f"data {name!r} is unknown, not one of {listed(DATA)}.{nearest_name(name, DATA)}"
        )
    request = Request(name, batch, seed, directory, validation, limit)
    try:
        load = importlib.import_module(f"{__name__}.{DATA[name]}").load
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise DataError(
            f"{name} needs the package {package}: {install_command('data')}."
        ) from error
    parameters = inspect.signature(load).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise OptionError(
                f"{name} has no option {option!r}; it has {listed(known)}.{suggest(option, known)}"
            )
    data: Data = load(request, **options)
    return data
