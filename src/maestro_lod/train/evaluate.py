"""How good a model is on data, and BatchNorm statistics that belong to its present weights."""

from __future__ import annotations

import copy
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from maestro_lod.errors import OptionError
from maestro_lod.train.checks import mismatch, require_loss

Batch: TypeAlias = "tuple[Any, Any] | Tensor | Mapping[str, Any]"
"""A pair of inputs of the model (a tensor, a tuple or a mapping of arguments) and the target; or
inputs alone. Of a mapping, `labels` are the target, and stay among the arguments."""
Loss: TypeAlias = Callable[[Any, Any], Tensor]

IGNORED = -100  # targets that do not count, as in torch's cross-entropy


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of class scores in the last dimension, over all targets that count.

    Without options it is the loss that an output brings along, if it has one: models of
    transformers compute it from `labels` among their arguments.
    `reduction="sum"` sums over them, which is what the paper's λ for its Transformer goes with.
    """

    label_smoothing: float = 0.0
    reduction: str = "mean"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self == CrossEntropy() and isinstance(own := getattr(output, "loss", None), Tensor):
            return own
        try:
            return F.cross_entropy(
                output.flatten(0, -2),
                target.flatten(),
                ignore_index=IGNORED,
                label_smoothing=self.label_smoothing,
                reduction=self.reduction,
            )
        except (AttributeError, IndexError, RuntimeError, ValueError) as error:
            if (problem := mismatch(output, target, IGNORED)) is None:
                raise
            raise problem from error

    def soft(self, output: Any, teacher: Any, target: Tensor) -> Tensor:
        """Return the same with the probabilities of a teacher's scores in place of targets."""
        counts = target.flatten() != IGNORED
        given = (getattr(t, "logits", t) for t in (output, teacher))
        scores, taught = (t.flatten(0, -2)[counts] for t in given)
        return F.cross_entropy(scores, taught.softmax(-1), reduction=self.reduction)


@dataclass
class Score:
    """Sums over samples, whose means are loss and accuracy; addable batch by batch."""

    loss: float = 0.0
    correct: float = 0.0
    count: int = 0
    classified: int = 0
    """How many of them had a class as target: without any there is no accuracy."""

    def add(self, loss: Tensor, output: Any, target: Any, *, summed: bool = False) -> None:
        """Add one batch, given its mean loss, or the sum of its losses."""
        hits = hits_of(output, target)
        count = samples_in(target) if hits is None else hits.numel()
        if hits is not None:
            self.correct += hits.sum().item()
            self.classified += count
        if count:  # the mean over nothing is NaN
            self.loss += loss.item() * (1 if summed else count)
        self.count += count

    def __iadd__(self, other: Score) -> Score:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def means(self, prefix: str = "") -> dict[str, float]:
        """Return what is known, by name."""
        if self.count == 0:
            return {}
        means = {f"{prefix}loss": self.loss / self.count}
        if self.classified:
            means[f"{prefix}accuracy"] = self.correct / self.classified
        return means


def sums(loss: Loss) -> bool:
    """Say whether a loss is a sum over the batch; one that does not say so is a mean."""
    return getattr(loss, "reduction", "mean") == "sum"


def to_evaluate(loss: Loss) -> Loss:
    """Return what to judge by after training with a loss: itself, or plain cross-entropy."""
    return CrossEntropy() if isinstance(loss, CrossEntropy) else loss


def hits_of(output: Any, target: Any) -> Tensor | None:
    """Say for each target that counts whether it was predicted; None if targets are no classes.

    Class scores are in the last dimension of the output.
    """
    if not (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and target.dtype == torch.int64
        and output.shape[:-1] == target.shape
        and output.ndim > target.ndim
    ):
        return None
    hits = output.detach().argmax(-1) == target
    return hits[target != IGNORED]


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


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], loss: Loss | None = None, *, amp: bool = False
) -> dict[str, float]:
    """Return the mean loss, and the accuracy where targets are classes, over all batches.

    Text (targets with a second dimension) also gets its perplexity.
    """
    loss = loss or CrossEntropy()
    device, score, sequences = device_of(model), Score(), False
    with in_mode(model, training=False):
        for inputs, target in map(split_batch, batches):
            target = on_device(target, device)
            with autocast(device, amp):
                output = call(model, on_device(inputs, device))
                value = require_loss(loss(output, target), trained=False)
            score.add(value, output, target, summed=sums(loss))
            sequences = isinstance(target, Tensor) and target.ndim > 1
    if score.count == 0:
        raise OptionError("there is nothing to evaluate on: the data has no batch with a target.")
    means = score.means()
    if sequences and score.classified:
        means["perplexity"] = math.exp(min(means["loss"], 700.0))  # above, it overflows
    return means


def autocast(device: torch.device, enabled: bool) -> Any:
    """Return a context in which matrix products run in bfloat16, or one that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()


@torch.no_grad()
def recalibrate(
    model: nn.Module, batches: Iterable[Batch], most: int = 100, *, amp: bool = False
) -> int:
    """Recompute the statistics of all BatchNorms as plain means over batches, in place.

    Training mixes the statistics of many sampled submodels; this leaves those of the model at its
    active ranks. Everything else stays in eval mode; momentum and modes are restored. Returns how
    many batches were used: 0 if the model has no BatchNorm with statistics.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms or most == 0:
        return 0
    device, used = device_of(model), 0
    momenta = [norm.momentum for norm in norms]
    before = [copy.deepcopy(dict(norm.named_buffers())) for norm in norms]
    with in_mode(model, training=False):
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over all batches
                norm.training = True
            for inputs, _ in map(split_batch, itertools.islice(batches, most)):
                with autocast(device, amp):
                    call(model, on_device(inputs, device))
                used += 1
            if used == 0:
                raise OptionError("BatchNorm cannot be recalibrated: the data has no batch.")
        except BaseException:
            for norm, buffers in zip(norms, before, strict=True):
                norm.load_state_dict(buffers, strict=False)
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    return used


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
