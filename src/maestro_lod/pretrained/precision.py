"""Half precision as float32: training needs it, and CPUs compute faster with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from maestro_lod.model.inputs import map_tensors


@contextmanager
def in_single_precision(model: nn.Module) -> Iterator[None]:
    """Convert half precision of a model to float32 inside, and its values back after it."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.dtype for tensor in tensors]
    for tensor in tensors:
        tensor.data = single(tensor.data)
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(dtype)


def single(values: Any) -> Any:
    """Return nested values with tensors in at least float32; others are unchanged."""
    if isinstance(values, Mapping):
        return {key: single(value) for key, value in values.items()}
    if isinstance(values, tuple | list) and not isinstance(values, PackedSequence):
        return tuple(single(value) for value in values)
    return map_tensors(values, _single)


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
