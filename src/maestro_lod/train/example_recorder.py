"""The first call of a model that is being trained: an example of its input that nobody gave."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from maestro_lod.model.inputs import ModelInputs


class FirstCall:
    """Notes the shapes of the first input that reaches a model while `listening`."""

    def __init__(self, model: nn.Module) -> None:
        self.listening = False
        self.noted: ModelInputs | None = None
        self._handle = model.register_forward_pre_hook(_Note(weakref.ref(self)), with_kwargs=True)

    def remove(self) -> None:
        """Listen no more."""
        self._handle.remove()


class _Note:
    """A forward hook that notes one call; that of a pickled or copied model notes nothing."""

    def __init__(self, first: weakref.ref[FirstCall] | None = None) -> None:
        self._first = first

    def __reduce__(self) -> tuple[type[_Note], tuple[()]]:
        return _Note, ()

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._first is None:
            return  # inside a compiled graph this hook must stay without effect
        first = self._first()
        if first is not None and first.listening and first.noted is None:
            first.noted = ModelInputs(args, kwargs).on_meta()
