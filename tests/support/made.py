"""Methods for models that are given, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from maestro_lod.model.cost import Cost, summary


def made(settings: Any, model: nn.Module, example: Any) -> Any:
    """The method of some settings, for a dense model, with SGD."""
    found = summary(model, example)
    dense = Cost(found.params, found.macs, 0)
    model = settings.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-3)
    return settings.make(model, optimizer, example=example, seed=3, dense=dense)
