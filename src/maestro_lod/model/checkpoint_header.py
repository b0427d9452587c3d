"""Checkpoint header: the metadata that describes the structure of a saved model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from maestro_lod.errors import CheckpointError, LayerError
from maestro_lod.files.json_files import Shape, parse_json
from maestro_lod.files.tensor_file import TensorFile
from maestro_lod.layers.pivoted import PivotedForm
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.layers.registry import low_rank_type, unpacked_type
from maestro_lod.model.structure import UNPACKED, Form, Structure, read_structure, uninitialized

ELASTIC, PLAIN, _VERSION = "maestro-lod", "maestro-lod plain", 1
"""The formats: one file with every size, or with one."""
_HEADER: dict[str, Shape] = {
    "ranks": {str: int}, "opened": [str], "heads": {str: str}, "aliases": {str: str},
    "dense_only": [str],
}  # fmt: skip
_PLAIN: Shape = {
    "layers": {str: str}, "factored": {str: int}, "pivoted?": {str: int}, "aliases": {str: str},
}  # fmt: skip


def elastic_metadata(model: nn.Module, aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a low-rank model's file, which holds every size."""
    try:
        structure = read_structure(model)
    except LayerError as error:
        raise CheckpointError(str(error)) from None

    def select(kind: str) -> dict[str, Form]:
        return {name: form for name, form in structure.items() if form.kind == kind}

    header = {
        "ranks": {name: form.rank for name, form in select("low-rank").items()},
        "opened": list(select("unpacked")),
        "heads": {name: form.embedding for name, form in select("shared").items()},
        "aliases": aliases,
        "dense_only": [n for n, layer in low_rank_layers(model).items() if layer.dense_only],
    }
    metadata = {"format": ELASTIC, "version": str(_VERSION)}
    return metadata | {key: json.dumps(value) for key, value in header.items()}


def plain_metadata(model: nn.Module, aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of an extracted model's file, which holds one size."""
    types = {name: type(module).__name__ for name, module in with_parameters(model)}
    ranks = {"factored": _factored_ranks(model), "pivoted": _pivoted_ranks(model)}
    config = json.dumps({"layers": types, **ranks, "aliases": aliases})
    return {"format": PLAIN, "version": str(_VERSION), "config": config}


def with_parameters(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that hold parameters directly, by name."""
    return [
        (name, m)
        for name, m in model.named_modules()
        if any(p is not None for p in m._parameters.values())
    ]


def _factored_ranks(model: nn.Module) -> dict[str, int]:
    return {name: rank for name, m in model.named_modules() if (rank := _factored_rank(m))}


def _pivoted_ranks(model: nn.Module) -> dict[str, int]:
    return {name: m.rank for name, m in model.named_modules() if isinstance(m, PivotedForm)}


def _factored_rank(module: nn.Module) -> int | None:
    """Return the rank of a factored layer as `extract` makes it, None for other modules."""
    parameters = module._parameters
    if set(parameters) == {"u", "v"} and parameters["v"] is not None:  # in an unpacked layer
        return parameters["v"].shape[0]
    if not isinstance(module, nn.Sequential) or len(module) != 2:
        return None
    first, second = module
    if None in (low_rank_type(type(first)), low_rank_type(type(second))):
        return None
    if getattr(first, "bias", None) is not None:
        return None
    width: Any = getattr(second, "in_features", None) or getattr(second, "in_channels", 0)
    return int(width) // getattr(second, "groups", 1)


@dataclass(frozen=True)
class CheckpointHeader:
    """The structure and aliases that a file's header describes."""

    structure: Structure
    aliases: dict[str, str]
    """The names of tensors that are stored under another name, with that name."""
    types: dict[str, str] | None = None
    """The type of every module that holds parameters; only in plain files."""
    dense_only: tuple[str, ...] = ()
    """The layers that only a dense layer can replace, because of how they are called."""

    @property
    def ranks(self) -> dict[str, int]:
        forms = self.structure.items()
        return {name: form.rank or 0 for name, form in forms if form.kind == "low-rank"}


def read_header(file: TensorFile, path: Path, into: nn.Module) -> CheckpointHeader:
    """Read the header of a file; raise CheckpointError if it is not a model's."""
    metadata = file.metadata
    if metadata.get("format") not in (ELASTIC, PLAIN):
        raise CheckpointError(
            f"{path} was not written by maestro_lod's save or export. Read a plain file of tensors "
            "with safetensors.torch.load_file and load_state_dict."
        )
    try:
        if int(metadata["version"]) > _VERSION:
            raise CheckpointError(
                f"{path} has format version {metadata['version']}, this library reads up to "
                f"{_VERSION}. Update maestro-lod."
            )
        if metadata["format"] == PLAIN:
            return _plain_header(metadata, file.shapes, path, into)
        return _elastic_header(metadata, file.shapes)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the header of {path} is damaged ({error!r}). Use another copy."
        ) from error


def _elastic_header(
    metadata: dict[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> CheckpointHeader:
    ranks, opened, heads, aliases, dense_only = (
        parse_json(metadata.get(key, "[]") if key == "dense_only" else metadata[key], shape)
        for key, shape in _HEADER.items()
    )
    if not (
        all(rank >= 0 for rank in ranks.values())
        and all(first in shapes for first in aliases.values())
        and all(embedding in ranks for embedding in heads.values())
    ):
        raise ValueError("ranks, heads and aliases contradict each other")
    for name, rank in ranks.items():
        for factor in (f"{name}.u".lstrip("."), f"{name}.v".lstrip(".")):
            shape = shapes.get(
                aliases.get(factor, factor), (rank, 0)
            )  # missing tensors are reported later
            if len(shape) < 2 or shape[0] != rank:
                raise ValueError(f"{factor} has shape {shape}, not rank {rank}")
    structure = {
        **dict.fromkeys(opened, UNPACKED),
        **{name: Form("low-rank", rank) for name, rank in ranks.items()},
        **{name: Form("shared", embedding=embedding) for name, embedding in heads.items()},
    }
    return CheckpointHeader(structure, dict(aliases), dense_only=tuple(dense_only))


def _plain_header(
    metadata: dict[str, str], shapes: Mapping[str, tuple[int, ...]], path: Path, into: nn.Module
) -> CheckpointHeader:
    config = parse_json(metadata["config"], _PLAIN)
    types, aliases = config["layers"], config["aliases"]
    forms = {name: Form("factored", rank) for name, rank in config["factored"].items()}
    forms |= {name: Form("pivoted", rank) for name, rank in config.get("pivoted", {}).items()}
    if not all((form.rank or 0) > 0 for form in forms.values()):
        raise ValueError("a rank is not a whole number above zero")
    if not all(first in shapes for first in aliases.values()):
        raise ValueError("a shared tensor is missing")
    if low_rank_layers(into):
        raise CheckpointError(
            f"{path} holds one size, but {type(into).__name__} is decomposed. Load it into the "
            "dense model."
        )
    return CheckpointHeader(_plain_structure(types, forms, into), dict(aliases), types)


def structure_of_plain(model: nn.Module, dense: nn.Module) -> Structure:
    """Return how an extracted model differs from the dense one."""
    types = {name: type(module).__name__ for name, module in with_parameters(model)}
    forms = {name: Form("factored", rank) for name, rank in _factored_ranks(model).items()}
    forms |= {name: Form("pivoted", rank) for name, rank in _pivoted_ranks(model).items()}
    return _plain_structure(types, forms, dense)


def _plain_structure(
    types: Mapping[str, str], forms: Mapping[str, Form], dense: nn.Module
) -> Structure:
    modules = dict(dense.named_modules())
    structure: Structure = {}
    for name, form in forms.items():
        above = name.rpartition(".")[0]
        if name and unpacked_type(type(modules.get(above))) is not None:
            structure[above] = UNPACKED
        if structure.get(above) == UNPACKED or low_rank_type(type(modules.get(name))) is not None:
            structure[name] = form
    for name, module in modules.items():  # a layer of another library may have become torch's
        stored, kind = types.get(name, type(module).__name__), low_rank_type(type(module))
        if kind is not None and stored != type(module).__name__:
            plain = uninitialized(name, module, 1).to_torch("dense")
            structure |= {name: Form("dense")} if type(plain).__name__ == stored else {}
    return structure
