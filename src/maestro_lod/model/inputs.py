"""Model inputs: examples and batches, and the call of a model on them."""

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
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from maestro_lod.errors import OptionError

Example: TypeAlias = "Tensor | PackedSequence | tuple[Any, ...] | Mapping[str, Any] | ModelInputs"
"""An input of the model: one tensor, a tuple of arguments, or keyword arguments. Only its shapes
and dtypes matter, unless the model's code reads values."""


Batch: TypeAlias = "tuple[Any, Any] | Tensor | Mapping[str, Any]"
"""A pair of inputs of the model (a tensor, a tuple or a mapping of arguments) and the target; or
inputs alone. In a mapping `labels` are the target, and stay among the arguments."""
Loss: TypeAlias = Callable[[Any, Any], Tensor]
"""`loss(output, target)`: the loss of one batch."""
Objective: TypeAlias = "Callable[[nn.Module], Tensor | float]"
"""`objective(model)`: the value that a search minimizes, measured on data of the user."""


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def wrap(cls, inputs: Any) -> ModelInputs:
        """Return the call for a user's inputs.

        A tuple or list holds several arguments, a mapping holds keyword arguments, and anything
        else, such as a tensor or a PackedSequence, is one argument.
        """
        if isinstance(inputs, ModelInputs):
            return inputs
        if isinstance(inputs, Mapping):
            return cls((), dict(inputs))
        if isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence):
            return cls(tuple(inputs), {})
        return cls((inputs,), {})

    @classmethod
    def from_example(cls, example: Example) -> ModelInputs:
        """Return the call for an `example=`; raise OptionError for other types."""
        if isinstance(example, Tensor | tuple | Mapping | ModelInputs):
            return cls.wrap(example)
        raise OptionError(
            f"example is a {type(example).__name__}. Give a tensor, a tuple of arguments or a "
            "mapping of keyword arguments."
        )

    def call(self, model: nn.Module) -> Any:
        """Run a model on the inputs; explain the error of a batch norm for a single sample."""
        try:
            return model(*self.args, **self.kwargs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise OptionError(
                "a batch norm cannot train on a batch of one sample. Choose a batch size that "
                "leaves no single sample, or drop it: DataLoader(…, drop_last=True)."
            ) from error

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Apply a function to every tensor (for PackedSequence: to `.data` only)."""
        return ModelInputs(*map_tensors((self.args, self.kwargs), change))

    def to(self, device: torch.device) -> ModelInputs:
        """Return the inputs with their tensors on a device."""
        return ModelInputs(*on_device((self.args, self.kwargs), device))

    def on_meta(self) -> ModelInputs:
        """Return the inputs with tensors on the meta device: only shapes and dtypes."""
        return self.map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"))

    def drawn(self, device: torch.device, *, batch: int | None = None) -> ModelInputs:
        """Return the inputs with random floats and unchanged integers, for a batch size if given.

        Tensors whose leading dimension is the batch size are resized; rows of integers are repeated
        in turn. The same values are drawn every time.
        """
        generator = torch.Generator(device).manual_seed(0)
        size = self.batch_size

        def draw(value: Tensor) -> Tensor:
            if batch is not None and value.ndim and value.shape[0] == size:
                rows = torch.arange(batch, device=value.device) % max(size, 1)
                value = value.index_select(0, rows)
            return drawn(value, device, generator)

        args, kwargs = tree_map_only(Tensor, draw, (self.args, self.kwargs))
        return ModelInputs(args, kwargs)

    def rows(self, start: int, count: int) -> ModelInputs:
        """Return some rows of the batch; after the last one it begins again."""
        size = self.batch_size

        def select(value: Tensor) -> Tensor:
            if not value.ndim or value.shape[0] != size:
                return value
            rows = torch.arange(start, start + count, device=value.device) % size
            return value.index_select(0, rows)

        return self.map_tensors(select)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def batch_size(self) -> int:
        """The leading dimension of the first tensor."""
        tensors = self.tensors
        if not tensors or not tensors[0].ndim:
            raise OptionError(
                "the example has no tensor with a batch dimension. Give a batch of one sample."
            )
        return int(tensors[0].shape[0])

    @property
    def is_packed(self) -> bool:
        """Whether there are packed sequences among the arguments."""
        return any(map(_is_packed, tree_leaves((self.args, self.kwargs), is_leaf=_is_packed)))


def drawn(value: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return random floats of the same shape and layout, or whole numbers unchanged."""
    if value.is_floating_point():
        return torch.empty_like(value, device=device).normal_(generator=generator)
    if value.is_meta:
        raise OptionError(
            f"the example has {value.dtype} values on the meta device, which cannot be drawn. "
            "Give an example with values."
        )
    return value.to(device)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested inputs or outputs."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of nested inputs (for PackedSequence: to `.data` only)."""

    def change_leaf(value: Any) -> Any:
        if isinstance(value, PackedSequence):  # its lengths determine what is computed
            return value._replace(data=change(value.data))
        return change(value) if isinstance(value, Tensor) else value

    return tree_map(change_leaf, tree, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


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


def on_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of nested inputs or targets."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):  # a tuple of four, but one input
        return value.to(device)  # type: ignore[arg-type]
    if isinstance(value, tuple | list):
        return tuple(on_device(part, device) for part in value)
    if isinstance(value, Mapping):
        return {key: on_device(part, device) for key, part in value.items()}
    return value


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode of a model inside the `with` block; restore that of each module after it."""
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
    """Evaluate a model inside the block without gradients and dropout, norms by batch statistics.

    Running statistics mix those of many submodels and fit none of them. Modes and running
    statistics are restored, also after errors.
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
    """Return the result of a user's function as a float; raise OptionError if it is not one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
    result = shape or type(value).__name__
    raise OptionError(
        f"{source} returned a {result}. Return one number, such as a mean over a batch."
    )
