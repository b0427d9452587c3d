"""Predicates on torch's built-in layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

from torch import Tensor, nn


def is_linear_or_conv(module: nn.Module | None) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Return whether a module is exactly `nn.Linear`, or `nn.Conv2d` with zero padding."""
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros"
    return type(module) is nn.Linear


def embedding_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of a model that are looked up, not multiplied."""
    return {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}


def switch_off_fast_paths(model: nn.Module, changed: Collection[str]) -> None:
    """Switch off the fast paths of torch's transformer layers around changed layers."""
    containers = {name[:at] for name in changed for at, c in enumerate(name) if c == "."}
    containers |= {""} if changed else set()
    for name, module in model.named_modules():
        if name not in containers:
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # read only by the fast path
        elif isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
