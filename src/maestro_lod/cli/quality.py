"""Quality of a model before and after compression, on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.errors import OptionError
from maestro_lod.model.inputs import Loss, ModelInputs, device_of, in_mode, split_batch
from maestro_lod.sizes.outputs import values_loss
from maestro_lod.train.evaluate import evaluate

_DISTANCE = "squared distance to the original's outputs, of their mean square"
_JUDGES = ("accuracy", "perplexity", "loss", _DISTANCE)
"""Metrics by which a model is compared; the first one that was measured decides."""
_NOTICEABLE = 0.05
"""Relative increase that counts as noticeable; of an accuracy, one point."""


class Quality:
    """Quality of a model on held-out batches, measured now and again after a change.

    The measure is loss and accuracy if a loss is given, perplexity for language models, and the
    distance of the outputs to the present ones for other models.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], loss: Loss | None = None) -> None:
        if any(tensor.is_meta for tensor in model.state_dict().values()):
            raise OptionError(
                f"{type(model).__name__} has weights without values (on the meta device). Load "
                "them before."
            )
        self._model, self._batches, self._loss = model, batches, loss
        self._outputs: list[Any] = []
        self._before = self._measured()

    def report(self) -> str:
        """Return a line with the quality before and after, and one with advice if it is worse."""
        after = self._measured()
        values = [
            f"{name} {self._before[name]:.4g} before, {after[name]:.4g} after" for name in after
        ]
        line = f"on held-out batches: {'; '.join(values)}"
        judge = next(name for name in _JUDGES if name in after)
        if not _is_worse(judge, self._before[judge], after[judge]):
            return line
        return (
            f"{line}\nthis is noticeably worse than the original: give more "
            "--distill-steps, or a larger --max-params."
        )

    @torch.no_grad()
    def _measured(self) -> dict[str, float]:
        model = self._model
        if self._loss is not None:
            return evaluate(model, self._batches, self._loss)
        device = device_of(model)
        calls = [ModelInputs.of(split_batch(batch)[0]).to(device) for batch in self._batches]
        with in_mode(model, training=False):
            if "CausalLM" in type(model).__name__:
                return {"perplexity": _perplexity([_next_token(model, each) for each in calls])}
            outputs = [each.call(model) for each in calls]
        self._outputs = self._outputs or outputs
        found = [float(values_loss(*pair)) for pair in zip(outputs, self._outputs, strict=True)]
        return {_DISTANCE: sum(found) / len(found)}


def _next_token(model: nn.Module, call: ModelInputs) -> tuple[float, int]:
    """Return the summed cross-entropy of all tokens that follow others, and their number."""
    inputs: Mapping[str, Tensor] = call.kwargs
    ids = inputs["input_ids"]
    counts = inputs.get("attention_mask", torch.ones_like(ids))[:, 1:].flatten() > 0
    scores = call.call(model).logits[:, :-1].flatten(0, 1)[counts].float()
    return float(F.cross_entropy(scores, ids[:, 1:].flatten()[counts], reduction="sum")), len(
        scores
    )


def _perplexity(sums: Sequence[tuple[float, int]]) -> float:
    loss, count = (sum(column) for column in zip(*sums, strict=True))
    return math.exp(min(loss / max(1, count), 700.0))


def _is_worse(name: str, before: float, after: float) -> bool:
    if name == "accuracy":
        return before - after > 0.01
    return not after - before <= _NOTICEABLE * (1.0 if name == _DISTANCE else abs(before))
