"""Directories of transformers models: config and safetensors weights, and nothing that runs code.

transformers gets the tensors, never the directory: by itself it also reads pickled files, adapters,
and files elsewhere that an index names, and fills missing tensors with random values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from maestro_lod.errors import CheckpointError, listed
from maestro_lod.files.atomic import require_no_link_out
from maestro_lod.files.json_files import read_json_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FRONTIER = "frontier.json"
"""The sizes of a model that was compressed for several."""
LOD_WEIGHTS = "lod.safetensors"
"""Low-rank weights of directories that version 0.1 wrote; they are still read."""

_GENERATION, _ADAPTER = "generation_config.json", "adapter_config.json"
_REPEATED, _MOST = ("layer", "depth", "experts"), 10_000
"""Parts of config names that count repeated modules, and the largest number that is accepted."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_config(directory: Path) -> PreTrainedConfig:
    """Return the config of a directory, without a choice of kernels, which may be a hub's."""
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}: it is not a transformers model.")
    if (directory / _ADAPTER).exists():
        raise CheckpointError(
            f"{directory} holds an adapter ({_ADAPTER}). Merge it into its model first: "
            "model.merge_and_unload().save_pretrained(…)."
        )
    require_no_link_out(directory)
    _require_buildable(read_json_file(directory / CONFIG), directory / CONFIG)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        config._attn_implementation = "eager" if config.output_attentions else None
        config._experts_implementation = None
    except Exception as error:  # of another library, for content of other people
        raise CheckpointError(
            f"{directory / CONFIG} cannot be read ({first_line(error)})."
        ) from error
    return config


def _require_buildable(content: Mapping[str, Any], path: Path) -> None:
    """Refuse more layers than any model has: transformers would build them until memory is gone."""
    for key, value in content.items():
        if isinstance(value, dict):
            _require_buildable(value, path)
        elif type(value) is int and value > _MOST and any(word in key for word in _REPEATED):
            raise CheckpointError(
                f"{path} asks for {key}={value:.3g}: at most {_MOST:,} are built."
            )


def architecture_of(config: PreTrainedConfig, directory: Path) -> type[PreTrainedModel]:
    """Return the class of the model that a directory holds, one of the installed transformers."""
    names = config.architectures
    name = str(names[0]) if isinstance(names, list) and names else "none"
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    raise CheckpointError(
        f"{directory / CONFIG} names the architecture {name!r}, which transformers "
        f"{transformers.__version__} does not have. Build the model yourself and call "
        f"maestro_lod.load({LOD_WEIGHTS!r}, into=model)."
    )


def build(
    kind: Any, config: PreTrainedConfig, dtype: torch.dtype | None, directory: Path
) -> PreTrainedModel:
    """Return a model of an architecture with new weights, in eval mode."""
    try:
        model: PreTrainedModel = kind._from_config(config, dtype=dtype or config.dtype).eval()
    except Exception as error:  # of another library, for content of other people
        raise CheckpointError(
            f"{directory / CONFIG} describes a model that cannot be built ({first_line(error)})."
        ) from error
    return model


def has_weights(directory: Path) -> bool:
    """Return whether a directory holds weights that transformers itself has written."""
    return (directory / WEIGHTS).is_file() or (directory / INDEX).is_file()


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory, from safetensors files in it alone."""
    _require_weights(directory)
    try:
        return {
            key: value
            for name in weight_files(directory)
            for key, value in safetensors.torch.load_file(directory / name).items()
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the weights in {directory} cannot be read ({error}).") from error


def weight_files(directory: Path) -> list[str]:
    """Return the names of the safetensors files in a directory that hold its weights."""
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    index = read_json_file(directory / INDEX, {"weight_map": {str: str}})
    names = sorted(set(index["weight_map"].values()))
    for name in names:
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {name!r}, which is not a safetensors file in it")
    return names


def _require_weights(directory: Path) -> None:
    if has_weights(directory):
        return
    if (directory / LOD_WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory} holds a low-rank model ({LOD_WEIGHTS}). Give the original, or read it "
            "with maestro_lod.integrations.huggingface.from_pretrained."
        )
    pickled = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise CheckpointError(
            f"{directory} holds pickled weights only ({listed(pickled)}), which can run code when "
            "they are read. Load them where you trust them, and write safetensors: "
            "AutoModel.from_pretrained(…).save_pretrained(…)."
        )
    raise CheckpointError(f"{directory} has no weights: neither {WEIGHTS} nor {INDEX} is there.")


def read_generation_config(model: PreTrainedModel, directory: Path) -> None:
    """Give a model the generation config of its directory, if there is one."""
    if not (directory / _GENERATION).is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # of another library, for content of other people
        raise CheckpointError(
            f"{directory / _GENERATION} cannot be read ({first_line(error)})."
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
