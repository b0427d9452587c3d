"""Evaluate a model on data, and recompute its BatchNorm statistics."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from maestro_lod.errors import OptionError
from maestro_lod.model.inputs import (
    Batch,
    Loss,
    ModelInputs,
    autocast,
    in_mode,
    model_device,
    on_device,
    samples_in,
    split_batch,
)
from maestro_lod.train.diagnostics import mismatch, require_loss

IGNORED = -100  # the value of ignored targets, as in torch's cross-entropy
SAMPLES = 2048  # training samples on which a search compares submodels; as in the paper


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of class scores in the last dimension, over all targets that are not ignored.

    Without options it is the `loss` of an output that has one: transformers' models compute it
    from `labels` among their arguments.

    Args:
        label_smoothing: As for torch's cross-entropy.
        reduction: "mean" or "sum" over the targets; the paper's λ for its Transformer needs "sum".
    """

    label_smoothing: float = 0.0
    reduction: str = "mean"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self == CrossEntropy() and isinstance(
            output_loss := getattr(output, "loss", None), Tensor
        ):
            return output_loss
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
        """Return the cross-entropy with the probabilities of a teacher's scores as targets."""
        counts = target.flatten() != IGNORED
        logits = (getattr(t, "logits", t) for t in (output, teacher))
        scores, teacher_scores = (t.flatten(0, -2)[counts] for t in logits)
        return F.cross_entropy(scores, teacher_scores.softmax(-1), reduction=self.reduction)


@dataclass
class Score:
    """Sums of losses and correct predictions, for the means over samples."""

    loss: float = 0.0
    correct: float = 0.0
    count: int = 0
    classified: int = 0
    """Samples with a class as target; without any there is no accuracy."""

    def add(self, loss: Tensor, output: Any, target: Any, *, summed: bool = False) -> None:
        """Add a batch with its mean loss, or with the sum of its losses."""
        hits = correct_predictions(output, target)
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
        """Return the mean loss and the accuracy, if known, by name."""
        if self.count == 0:
            return {}
        means = {f"{prefix}loss": self.loss / self.count}
        if self.classified:
            means[f"{prefix}accuracy"] = self.correct / self.classified
        return means


def sums(loss: Loss) -> bool:
    """Return True if a loss is a sum over the batch; one without `reduction` is a mean."""
    return getattr(loss, "reduction", "mean") == "sum"


def evaluation_loss(loss: Loss) -> Loss:
    """Return the loss for evaluation: the training loss, or cross-entropy without options."""
    return CrossEntropy() if isinstance(loss, CrossEntropy) else loss


def correct_predictions(output: Any, target: Any) -> Tensor | None:
    """Return for each target if it was predicted, ignored ones left out; None without classes.

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


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], loss: Loss | None = None, *, amp: bool = False
) -> dict[str, float]:
    """Evaluate a model.

    >>> evaluate(model, batches)["accuracy"]

    Args:
        model: The model, at its active ranks.
        batches: As `fit` takes them.
        loss: Returns the loss of (output, target); by default cross-entropy.
        amp: Compute in bfloat16 where that is safe.

    Returns:
        The mean loss; the accuracy where targets are classes; and the perplexity of text, whose
        targets have a second dimension.

    Raises:
        OptionError: No batch has a target, or the loss cannot be computed from them.
    """
    loss = loss or CrossEntropy()
    device, score, sequences = model_device(model), Score(), False
    with in_mode(model, training=False):
        for inputs, target in map(split_batch, batches):
            target = on_device(target, device)
            with autocast(device, amp):
                output = ModelInputs.wrap(inputs).to(device).call(model)
                value = require_loss(loss(output, target), trained=False)
            score.add(value, output, target, summed=sums(loss))
            sequences = isinstance(target, Tensor) and target.ndim > 1
    if score.count == 0:
        raise OptionError("the evaluation data has no batch with a target. Give it at least one.")
    means = score.means()
    if sequences and score.classified:
        means["perplexity"] = math.exp(min(means["loss"], 700.0))  # above, it overflows
    return means


@torch.no_grad()
def recalibrate(
    model: nn.Module, batches: Iterable[Batch], most: int = 100, *, amp: bool = False
) -> int:
    """Recompute the statistics of all BatchNorms as plain means over batches, in place.

    Training mixes the statistics of many sampled submodels; this leaves those of the model at its
    active ranks. Everything else stays in eval mode; momentum and modes are restored.

    Args:
        model: The model, at its active ranks.
        batches: As `fit` takes them; targets are ignored.
        most: How many batches to use at most.
        amp: Compute in bfloat16 where that is safe.

    Returns:
        How many batches were used: 0 if the model has no BatchNorm with statistics.

    Raises:
        OptionError: The data has no batch. The statistics have not changed then.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms or most == 0:
        return 0
    device, used = model_device(model), 0
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
                    ModelInputs.wrap(inputs).to(device).call(model)
                used += 1
            if used == 0:
                raise OptionError(
                    "the data to recalibrate BatchNorm on has no batch. Give at least one."
                )
        except BaseException:
            for norm, buffers in zip(norms, before, strict=True):
                norm.load_state_dict(buffers, strict=False)
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    return used


# -- a fixed set of training samples ---------------------------------------------------------------


def first_samples(train_data: Iterable[Batch], count: int = SAMPLES) -> list[tuple[Any, Any]]:
    """Return the same training samples each time, as one batch if they can be concatenated.

    The data is read with a fixed seed of torch's global generator, whose state is then restored.
    """
    batches: list[tuple[Any, Any]] = []
    samples = 0
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for inputs, target in map(split_batch, train_data):
            batches.append((inputs, target))
            samples += samples_in(target)
            if samples >= count:
                break
    if not batches:
        raise OptionError("the training data has no batch to search on. Give at least one.")
    if all(isinstance(part, Tensor) for batch in batches for part in batch):
        inputs = torch.cat([inputs for inputs, _ in batches])[:count]
        return [(inputs, torch.cat([target for _, target in batches])[:count])]
    return batches


def mean_loss(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> float:
    """Return the mean loss over all targets of some batches; NaN if all are ignored."""
    return score(model, batches, loss).means().get("loss", math.nan)


def score(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> Score:
    """Return the losses and correct predictions of some batches, in the current modes."""
    device, total = model_device(model), Score()
    for inputs, target in map(split_batch, batches):
        target = on_device(target, device)
        output = ModelInputs.wrap(inputs).to(device).call(model)
        total.add(loss(output, target), output, target, summed=sums(loss))
    return total


def judge(train_data: Iterable[Batch], loss: Loss) -> Callable[[nn.Module], float]:
    """Return a function that computes a model's loss on the first samples, which it reads once."""

    @functools.cache
    def batches() -> list[tuple[Any, Any]]:
        return first_samples(train_data)

    return lambda model: mean_loss(model, batches(), loss)
