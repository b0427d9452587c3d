"""The modelling file of a directory, for people who load it without this library.

transformers runs it only where `trust_remote_code=True` allows that.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from maestro_lod.integrations import modeling_maestro_lod as modeling
from maestro_lod.integrations.quantizer import dense_on_meta
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.structure import Structure

MODELING = f"{modeling.__name__.rpartition('.')[2]}.py"


def add_remote_code(
    model: PreTrainedModel, config: PreTrainedConfig, structure: Structure, directory: Path
) -> None:
    """Write the modelling file and name it in the config, where it can express the model.

    It can where the low-rank layers are linear layers, embeddings and convolutions without groups.
    Other models need the library, and so do extracted ones.
    """
    layers = low_rank_layers(model)
    modules = dict(dense_on_meta(model).named_modules())
    if {form.kind for form in structure.values()} - {"low-rank", "shared"}:
        return
    if not all(modeling.supports(modules[name]) for name in layers):
        return
    shutil.copyfile(Path(modeling.__file__), directory / MODELING)
    config.auto_map = {
        name: f"{MODELING.removesuffix('.py')}.{kind.__name__}"
        for name, kind in _auto_classes(config).items()
    }


def _auto_classes(config: PreTrainedConfig) -> dict[str, type]:
    """Return transformers' automatic classes for a config, and what each of them builds."""
    found: dict[str, Any] = {}
    for name in dir(transformers):
        mapping = (
            getattr(getattr(transformers, name), "_model_mapping", None)
            if (name.startswith("AutoModel"))
            else None
        )
        if mapping is not None and type(config) in mapping:
            kind = mapping[type(config)]
            found[name] = kind[0] if isinstance(kind, tuple) else kind
    return {name: kind for name, kind in found.items() if hasattr(transformers, kind.__name__)}
