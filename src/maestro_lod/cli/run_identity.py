"""What ties the files of a run together: its settings, and the digest of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.cli.recipe import Recipe
from maestro_lod.cli.yaml_settings import shown
from maestro_lod.errors import CheckpointError, listed

MAY_CHANGE = (
    *("recipe", "description", "code"),
    *("epochs", "device", "threads", "checkpoint_every", "tensorboard"),
)


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that may not change once a run has begun."""
    settings = recipe.model_dump(mode="json", exclude={*MAY_CHANGE})
    settings["data"].pop("directory")  # data may move
    return settings


def require_same_settings(before: Mapping[str, Any] | None, recipe: Recipe, file: Path) -> None:
    """Refuse a file of other settings and name them; files of older versions hold none."""
    now = fixed_settings(recipe)
    known = {key: value for key, value in (before or {}).items() if key in now}
    changed = _differences("", known, {key: now[key] for key in known})
    if changed:
        raise CheckpointError(
            f"{file} does not belong to {file.parent / 'config.yaml'}: {listed(changed, 3)}. Once "
            f"a run has begun only {', '.join(MAY_CHANGE[3:])} and data.directory may change. Undo "
            "that, or begin another run with it: lod train config.yaml --out DIR"
        )


def _differences(place: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            line
            for key in {**before, **now}
            if before.get(key) != now.get(key)
            for line in _differences(f"{place}.{key}", before.get(key), now.get(key))
        ]
    return [f"{place[1:]} is {shown(before)} in one and {shown(now)} in the other"]


def require_same_weights(about: Mapping[str, Any], model: nn.Module, file: Path) -> None:
    """Refuse a file about other weights; those of older versions do not say which."""
    if about.get("weights") not in (None, weights_digest(model)):
        raise CheckpointError(
            f"{file} is of another model than model.safetensors beside it holds, weight by weight. "
            "Restore the one that is wrong, or make it anew by lod train or lod frontier."
        )


def weights_digest(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers, the same on every device."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {[*value.shape]}".encode())
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
