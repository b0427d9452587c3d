"""The data of the paper: each name gives batches to train and to test on."""

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
"""Name → the module here that loads it; imported when asked for, as each needs other packages."""


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
    """Load one of `DATA`; `options` are those of that dataset alone (multi30k: `min_count`).

    `validation` is the share of the training set that is kept apart, the same samples in every
    run. `limit` uses only the first so many training samples, and as many test samples. `seed`
    and torch's global generator fix the order and the augmentation of an epoch.
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
