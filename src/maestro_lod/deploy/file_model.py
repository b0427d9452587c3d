"""An exported file as a module, so that it can be evaluated like a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from maestro_lod.deploy.export import Exported, open_runner
from maestro_lod.model.inputs import ModelInputs, in_mode


class FileModel(nn.Module):
    """Runs a file, in parts of the batch if the file does not take all of it at once."""

    def __init__(self, file: Exported, model: nn.Module, call: ModelInputs) -> None:
        """Open a file that was exported from a model; a call gives the structure of outputs."""
        super().__init__()
        self._run, self._size = open_runner(file.path), file.batch
        with torch.no_grad(), in_mode(model, training=False):
            leaves, self._structure = tree_flatten(call.call(model))
        self._leaves = leaves

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = ModelInputs(args, kwargs)
        count = call.batch_size
        size = self._size or count
        parts = [self._run(call.rows(start, size)) for start in range(0, count, size)]
        outputs = iter([torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True)])
        leaves = [next(outputs) if isinstance(x, Tensor) else x for x in self._leaves]
        return tree_unflatten(leaves, self._structure)
