"""What a model is given, and the call of a model on it: examples, batches, devices, modes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from maestro_lod.errors import OptionError

Example: TypeAlias = "Tensor | tuple[Any, ...] | Mapping[str, Any] | Call"
"""An input of the model: one tensor, a tuple of arguments, or keyword arguments. Only its shapes
and dtypes matter, unless the model itself looks at values."""


Batch: TypeAlias = "tuple[Any, Any] | Tensor | Mapping[str, Any]"
"""A pair of inputs of the model (a tensor, a tuple or a mapping of arguments) and the target; or
inputs alone. Of a mapping, `labels` are the target, and stay among the arguments."""
Loss: TypeAlias = Callable[[Any, Any], Tensor]


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


def samples_in(target: Any) -> int:
    """Count the samples of a batch by the first tensor in its target; 1 if there is none."""
    return next((len(t) for t in tree_leaves(target) if isinstance(t, Tensor) and t.ndim), 1)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs of a batch and its target, None if it has none."""
    if isinstance(batch, Mapping):
        return batch, batch.get("labels")
    if isinstance(batch, Tensor | PackedSequence):
        return batch, None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise OptionError(
        f"a batch is a {type(batch).__name__}. Give a pair (inputs, target), whose inputs may be a "
        "tuple of arguments, a mapping of keyword arguments, or a tensor."
    )


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on one input, a tuple of arguments, or a mapping of keyword arguments."""
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        several = isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence)
        return model(*inputs) if several else model(inputs)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise OptionError(
            "a batch of one sample cannot train a norm over the batch. Choose a batch size that "
            "leaves no single sample over, or drop it: DataLoader(…, drop_last=True)."
        ) from error


def on_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a batch."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):  # a tuple of four, but one input
        return value.to(device)  # type: ignore[arg-type]
    if isinstance(value, tuple | list):
        return tuple(on_device(part, device) for part in value)
    if isinstance(value, Mapping):
        return {key: on_device(part, device) for key, part in value.items()}
    return value


def device_of(model: nn.Module) -> torch.device:
    """Return where the parameters of a model are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into one mode for the `with` block, then each module back into its own."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def autocast(device: torch.device, enabled: bool) -> Any:
    """Return a context in which matrix products run in bfloat16, or one that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Evaluate a model inside: no gradients, no dropout, norms that look at the batch alone.

    Running statistics mix those of many submodels and fit none of them. Modes and running
    statistics are as before afterwards, whatever happens.
    """
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module, _ in modes if isinstance(module, _NormBase)]
    statistics = [(b, b.clone()) for norm in norms for b in norm.buffers(recurse=False)]
    try:
        for module, _ in modes:
            module.training = isinstance(module, _NormBase)
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in statistics:
                buffer.copy_(before)


def require_number(value: object, source: str) -> float:
    """Return what a user's function gave as a float, or refuse what is not one number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
    what = shape or type(value).__name__
    raise OptionError(
        f"{source} returned a {what}. Return one number, such as a mean over a batch."
    )
