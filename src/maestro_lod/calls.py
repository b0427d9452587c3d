"""The arguments of one call of a model, and changes to all the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from maestro_lod.errors import OptionError

Example: TypeAlias = "Tensor | tuple[Any, ...] | Mapping[str, Any] | Call"
"""An input of the model: one tensor, a tuple of arguments, or keyword arguments. Only its shapes
and dtypes matter, unless the model itself looks at values."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on_meta(self) -> Call:
        """Return the call with tensors on the meta device: shapes and dtypes alone."""
        return self.changed(lambda tensor: torch.empty_like(tensor, device="meta"))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Return the call with its tensors changed; of packed sequences only their data."""
        args, kwargs = with_tensors((self.args, self.kwargs), change)
        return Call(args, kwargs)

    @property
    def is_packed(self) -> bool:
        """Whether there are packed sequences among the arguments."""
        return any(map(_is_packed, tree_leaves((self.args, self.kwargs), is_leaf=_is_packed)))


def with_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested inputs with each tensor changed; of packed sequences only their data."""

    def of_one(value: Any) -> Any:
        if _is_packed(value):  # the lengths in it say what is computed
            return value._replace(data=change(value.data))
        return change(value) if isinstance(value, Tensor) else value

    return tree_map(of_one, inputs, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def as_call(example: Example) -> Call:
    """Return the call that an example stands for, with its values."""
    if isinstance(example, Tensor | PackedSequence):
        return Call((example,), {})
    if isinstance(example, tuple):
        return Call(example, {})
    if isinstance(example, Mapping):
        return Call((), dict(example))
    if isinstance(example, Call):
        return example
    raise OptionError(
        f"example is a {type(example).__name__}. Give a tensor, a tuple of arguments or a mapping "
        "of keyword arguments."
    )
