"""Directories as Hugging Face has them, for low-rank models.

`lod.decompose` works on a transformers model as on any other; only saving and loading need help.
The stock `from_pretrained` builds the dense model; given factors, it would leave those layers
randomly initialized, print a report and raise nothing. Our file therefore has a name of its own, at
which the stock loader stops with an error.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from maestro_lod.errors import CheckpointError, LayerError
from maestro_lod.integrations.model_directory import (
    CONFIG,
    LOD_WEIGHTS,
    architecture_of,
    has_weights,
    read_config,
    read_generation_config,
)
from maestro_lod.integrations.stock_directories import load_stock
from maestro_lod.layers.ranks import Ranks, require_low_rank
from maestro_lod.layers.uses import module_role
from maestro_lod.model.checkpoint import load, save


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a low-rank transformers model to a directory: config and weights, every size in one.

    Files of an earlier save are replaced only once all new ones are written. Read the directory
    with `from_pretrained` of this module.
    """
    if not isinstance(model, PreTrainedModel):
        raise LayerError(
            f"{type(model).__name__} is no transformers model. Use maestro_lod.save for others."
        )
    require_low_rank(model)
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as name:
            written = Path(name)
            _config_of(model).save_pretrained(written)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(written)
            save(model, written / LOD_WEIGHTS)
            for file in sorted(written.iterdir()):
                file.replace(directory / file.name)
    except OSError as error:
        raise CheckpointError(f"cannot write to {directory} ({error}).") from error


def _config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of the config that says what is needed to build the model again."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    if _shares_head(model):
        config.tie_word_embeddings = True
    return config


def _shares_head(model: nn.Module) -> bool:
    """Say whether a head uses the factors of its embedding; such a model needs care with ties.

    It must be built tied, since further weights may be (BERT's output bias), so the file says that
    it is. Once it is built, its config must say that it is not: else transformers' `tie_weights`
    looks for the dense weight of the embedding. What is tied by then stays tied.
    """
    return any(module_role(module) == "shared" for module in model.modules())


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    ranks: Ranks | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Return the model that was saved to a directory, in eval mode, like the stock function does.

    It was saved by `save_pretrained` of this module, or by transformers: `Trainer.save_model`, a
    checkpoint of a Trainer, `extract(model).save_pretrained`. Nothing is downloaded: the
    architecture is one of the installed transformers. Only the `ranks` asked for are read, see
    `maestro_lod.load`; `dtype` is that of the saved model unless given.
    """
    directory = Path(directory)
    stock = not (directory / LOD_WEIGHTS).is_file() and has_weights(directory)
    for needed in (CONFIG,) if stock else (CONFIG, LOD_WEIGHTS):
        if not (directory / needed).is_file():
            raise CheckpointError(
                f"{directory} has no {needed}. Give a directory that save_pretrained wrote."
            )
    config = read_config(directory)
    kind: Any = architecture_of(config, directory)  # its methods are not annotated
    model: PreTrainedModel = kind._from_config(config, dtype=dtype or config.dtype).eval()
    if stock:
        load_stock(model, directory, ranks)
    else:
        load(directory / LOD_WEIGHTS, into=model, ranks=ranks)
    if _shares_head(model):
        model.config.tie_word_embeddings = False
    read_generation_config(model, directory)
    return model
