"""Directories of transformers that hold low-rank and extracted models.

`lod.decompose` works on a transformers model as on any other; only saving and loading need help.
A directory has the usual files, and `quantization_config` in config.json says which layers differ
from the dense model's: with it, transformers itself loads the directory once `maestro_lod` is
imported. Without this library it stops at tensors of another shape, or takes the modelling file
in the directory if it is allowed to (`trust_remote_code=True`).
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.errors import CheckpointError, LayerError, OptionError, listed
from maestro_lod.files.atomic import replacing_files, writing
from maestro_lod.files.tensor_file import opened_file, write_tensors
from maestro_lod.integrations.model_directory import (
    CONFIG,
    FRONTIER,
    LOD_WEIGHTS,
    WEIGHTS,
    architecture_of,
    build,
    has_weights,
    read_config,
    read_generation_config,
    weight_files,
)
from maestro_lod.integrations.quantizer import (
    METHOD,
    LowRankConfig,
    attach,
    can_store_by_rank,
    stored_state,
    structure_in,
    untie_missing,
)
from maestro_lod.integrations.remote_code import add_remote_code
from maestro_lod.integrations.stock_directories import load_stock
from maestro_lod.layers.ranks import Ranks, low_rank_layers, require_low_rank, resolve
from maestro_lod.layers.registry import low_rank_type
from maestro_lod.layers.uses import module_role
from maestro_lod.model.checkpoint import load, require_ordered
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.replace import copy_on_meta
from maestro_lod.model.structure import Form, Structure, restructure, uninitialized


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a low-rank or extracted transformers model to a directory: config and weights.

    A low-rank model is written with every smaller size in it. Files of an earlier save are replaced
    only once all new ones are written. Read the directory with `from_pretrained` of this module, or
    with the one of transformers after `import maestro_lod`.

    Args:
        model: A model of transformers.
        directory: Where to write; it is made if it does not exist.

    Raises:
        LayerError: If the model is not one of transformers, or all of its layers are the dense
            model's.
        CheckpointError: If the directory cannot be written.
    """
    if not isinstance(model, PreTrainedModel):
        raise LayerError(
            f"{type(model).__name__} is not a transformers model. Use lod.save for others."
        )
    if shard_group(model) is not None:
        raise LayerError(
            f"{type(model).__name__} is sharded over processes. Write it with lod.save."
        )
    structure = structure_in(model)
    if not structure:
        require_low_rank(model)
    if low_rank_layers(model):
        require_ordered(model)
    by_rank = can_store_by_rank(model, structure)
    described = LowRankConfig()
    described.describe(model, structure, by_rank=by_rank)
    directory = Path(directory)
    with writing(directory), replacing_files(directory) as place:
        config = _config_of(model)
        config.quantization_config = described.to_dict()
        vars(config).pop("auto_map", None)  # code of the source, which is not copied
        if by_rank:
            add_remote_code(model, config, structure, place)
        config.save_pretrained(place)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(place)
        state = stored_state(model, structure, by_rank)
        write_tensors(state, {"format": "pt"}, place / WEIGHTS)
    with writing(directory):
        (directory / LOD_WEIGHTS).unlink(missing_ok=True)  # of an earlier version


def _config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of the config that says what is needed to build the model again."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    if _shares_head(model):
        config.tie_word_embeddings = True
    return config


def _shares_head(model: nn.Module) -> bool:
    """Return whether a head uses the factors of its embedding.

    Such a model must be built tied, since further weights may be tied (BERT's output bias), so the
    config in the file is tied. After building, its config must not be: transformers' `tie_weights`
    would look for the dense weight of the embedding. Weights that are tied then stay tied.
    """
    return any(module_role(module) == "shared" for module in model.modules())


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    ranks: Ranks | None = None,
    max_params: float | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Return the model that was saved to a directory, in eval mode, like the stock function does.

    It was saved by `save_pretrained` of this module, or by transformers: `Trainer.save_model`, a
    checkpoint of a Trainer, `extract(model).save_pretrained`. Nothing is downloaded, and no code of
    the directory runs: the architecture is one of the installed transformers.

    Args:
        directory: What was written.
        ranks: The ranks to keep, as for `maestro_lod.load`; of a directory that `save_pretrained`
            of this module wrote, only their bytes are read.
        max_params: The most parameters instead: a count, or as a float a share of the original's.
            The best of the sizes that `compress` was given is read, by the directory's
            frontier.json.
        dtype: That of the saved model unless given.

    Returns:
        The low-rank or extracted model.

    Raises:
        CheckpointError: If the directory is not complete, or is of another architecture.
        OptionError: If `ranks` or `max_params` are asked for and the directory holds one size, or
            no size is that small.
    """
    directory = Path(directory)
    if max_params is not None:
        ranks = _ranks_within(directory, max_params, ranks)
    if not (directory / CONFIG).is_file():
        raise CheckpointError(
            f"{directory} has no {CONFIG}. Give a directory that save_pretrained wrote."
        )
    config = read_config(directory)
    described = described_in(config)
    kind = architecture_of(config, directory)
    if described is not None:
        del config.quantization_config
        if described.shares_head:
            config.tie_word_embeddings = True
    elif not (directory / LOD_WEIGHTS).is_file() and not has_weights(directory):
        raise CheckpointError(
            f"{directory} has no {WEIGHTS}. Give a directory that save_pretrained wrote."
        )
    model = build(kind, config, dtype, directory)
    if described is not None:
        _load(model, directory, described, ranks)
    elif (directory / LOD_WEIGHTS).is_file():
        load(directory / LOD_WEIGHTS, into=model, ranks=ranks)
    else:
        load_stock(model, directory, ranks)
    if _shares_head(model):
        model.config.tie_word_embeddings = False
        untie_missing(model)
    read_generation_config(model, directory)
    attach(model)
    return model


def _ranks_within(directory: Path, max_params: float, ranks: Ranks | None) -> dict[str, int]:
    """Return the ranks of the best size of a directory within a limit."""
    if ranks is not None:
        raise OptionError(f"from_pretrained got {ranks=} and {max_params=}. Give one of them.")
    if not (directory / FRONTIER).is_file():
        raise OptionError(
            f"{directory} has no {FRONTIER} to choose a size by. Give ranks=, or compress for "
            "several sizes: lod compress --sizes 0.7,0.5."
        )
    return Frontier.load(directory / FRONTIER).pick(max_params=max_params)


def described_in(config: PreTrainedConfig) -> LowRankConfig | None:
    """Return what a config says about the layers of a low-rank model, None of any other model."""
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, dict) or found.get("quant_method") != METHOD:
        return None
    return LowRankConfig(**found)


def _load(
    model: PreTrainedModel, directory: Path, described: LowRankConfig, ranks: Ranks | None
) -> None:
    """Give the dense model the layers that its config describes, and their tensors, in place."""
    structure = described.structure
    try:
        on_meta = copy_on_meta(model)
        _require_ranks(on_meta, structure)
        rehearsal = restructure(on_meta, structure, fill=uninitialized)
        layers = low_rank_layers(rehearsal)
        if ranks is not None and not layers:
            raise OptionError(f"{directory} holds one size, an extracted model: leave ranks out.")
        limits = {name: (layer.rank, layer.full_rank) for name, layer in layers.items()}
        chosen = resolve(ranks, limits) if ranks is not None else {}
        smaller = {name: Form("low-rank", rank) for name, rank in chosen.items()}
        restructure(model, structure | smaller, fill=uninitialized)
    except LayerError as error:
        raise CheckpointError(f"{directory} is of another model: {error}") from None
    for name, layer in low_rank_layers(model).items():
        layer.dense_only |= described.layers[name].get("dense_only", False)
    state = _read(model, directory, structure | smaller, described.by_rank)
    own = model.state_dict(keep_vars=True)
    loaded = {id(own[key]) for key in state if key in own}
    missing = [key for key, value in own.items() if key not in state and id(value) not in loaded]
    foreign = [key for key in state if key not in own]
    if missing or foreign:
        raise CheckpointError(
            f"{directory} does not hold the tensors that its {CONFIG} describes; missing: "
            f"{listed(missing)}; not of this model: {listed(foreign)}. Get the directory again."
        )
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{directory} is of another model. {error}") from None


def _require_ranks(model: nn.Module, structure: Structure) -> None:
    """Raise LayerError for a rank that no layer has: factors of it could take all memory."""
    for name, module in model.named_modules():
        form = structure.get(name)
        if form is None or not form.rank or low_rank_type(type(module)) is None:
            continue
        full = uninitialized(name, module, 1).full_rank
        if form.rank > full:
            raise LayerError(f"its layer {name!r} has rank {form.rank}, and at most {full} ranks.")


def _read(
    model: nn.Module, directory: Path, structure: Structure, by_rank: bool
) -> dict[str, Tensor]:
    """Read the tensors of a directory, of low-rank layers only the ranks in the structure."""
    if not has_weights(directory):
        raise CheckpointError(f"{directory} has no {WEIGHTS}. Get the directory again.")
    own = model.state_dict().keys()
    rows: dict[str, int | None] = {}
    for name, form in structure.items():
        if form.kind == "low-rank":
            rows |= {f"{name}.u": form.rank, f"{name}.v": form.rank}
    state = {}
    for file_name in weight_files(directory):
        with opened_file(directory / file_name) as file:
            for key, shape in file.shapes.items():
                if shape == (0,) and key not in own:
                    continue  # it stands for a tensor of the dense model
                is_u = key in rows and key.endswith(".u")
                if is_u and not by_rank:
                    state[key] = file.read(key)[:, : rows[key]]
                elif is_u:
                    state[key] = file.read(key, rows[key]).transpose(0, 1)
                else:
                    state[key] = file.read(key, rows.get(key))
    return state
