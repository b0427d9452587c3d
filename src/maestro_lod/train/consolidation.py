"""The parts of consolidation: which size a step trains, by what it learns, and how fast.

All sizes of a decomposed model are trained together, one per step, under the frozen whole model.
The optimizer is the one that trained the whole model. Consolidation is short and starts from
factors, so that it has a learning rate of its own: a multiple of the rate that the optimizer began
with, along a warm-up and half a cosine. The norm of gradients is limited relative to those of the
warm-up: gradients of small sizes are long, and would otherwise overrule those of large ones.

Under SGD that is enough, and all sizes have the same rate. Steps of Adam and its relatives are as
long for short gradients as for long ones. Under these, small sizes, which have the most to learn,
are trained faster, in inverse proportion to their size. Changes of all layers add up in the
outputs, so that no size is trained faster than a rate that falls with the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from maestro_lod.distributed.collectives import Group, sum_over
from maestro_lod.distributed.shards import Cut, is_sharded, local_part
from maestro_lod.errors import TrainingError
from maestro_lod.model.inputs import Loss
from maestro_lod.train.schedule import cosine
from maestro_lod.train.steps import call_after_steps, call_before_steps

Comparison: TypeAlias = Callable[[Any, Any, Any], Tensor]
"""How far an output is from a teacher's: comparison(output, teacher, target)."""

_SGD = 2.0
"""The learning rate of all sizes under SGD, relative to its initial one. This and the following
were chosen on held-out data of an MLP, LeNet, a ResNet, an LSTM and a Transformer."""
_RATE = 0.5
"""The same of a size under other optimizers, times its share of the dense model."""
_FASTEST = 5.0
"""The highest such rate, times the root of the number of layers."""
_WARM_UP = 0.05  # of the steps
_LONGEST = 0.35  # gradient, relative to the mean norm of those in the warm-up
_ENDS = 0.15
"""How often the smallest size, which learns slowest, and the largest, which must lose nothing, are
each trained besides their turns among all."""

_VALUES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_VALUE_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


def comparison_for(loss: Loss) -> Comparison | None:
    """Return how a loss compares an output with a teacher's; None where that is not known.

    A loss can define it by a method `soft(output, teacher, target)`. Torch's losses of values
    compare with the teacher's values, its cross-entropy with the teacher's probabilities.
    """
    if (soft := getattr(loss, "soft", None)) is not None:
        compare: Comparison = soft
        return compare
    if isinstance(loss, _VALUES) or loss in _VALUE_FUNCTIONS:
        return lambda output, teacher, target: loss(output, teacher)
    if isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy:
        return lambda output, teacher, target: F.cross_entropy(output, teacher.softmax(1))
    return None


class Rungs:
    """The sizes that are trained together, from the largest to the smallest, and their draws."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.limits: list[int] = []
        """What each size may cost."""
        self.ranks: list[dict[str, int]] = []
        self.dense = 1
        """The cost of the dense model."""
        self._drawn = 0  # of the sizes, by the last draw

    def chances(self) -> list[float]:
        """Return how likely each size is drawn."""
        count = len(self.ranks)
        if count == 1:
            return [1.0]
        return [(1 - 2 * _ENDS) / count + _ENDS * (i in (0, count - 1)) for i in range(count)]

    def draw(self) -> dict[str, int]:
        """Draw the ranks of a step."""
        chances = torch.tensor(self.chances(), dtype=torch.float64, device="cpu")
        self._drawn = int(torch.multinomial(chances, 1, generator=self.generator))
        return self.ranks[self._drawn]

    @property
    def share(self) -> float:
        """The size of the last draw, as a share of the dense model."""
        return self.limits[self._drawn] / self.dense

    def state_dict(self) -> dict[str, Any]:
        """Return all state as tensors, numbers, lists and mappings."""
        ranks = [dict(each) for each in self.ranks]
        return {
            "generator": self.generator.get_state(), "limits": [*self.limits], "ranks": ranks,
            "dense": self.dense,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state exactly."""
        self.generator.set_state(state["generator"].to("cpu", torch.uint8))
        self.limits = [int(limit) for limit in state["limits"]]
        self.dense = int(state["dense"])
        self.ranks = [{str(n): int(r) for n, r in each.items()} for each in state["ranks"]]


class Pace:
    """The learning rate of each step of consolidation, and the largest norm of its gradient."""

    def __init__(self, optimizer: Optimizer, layers: int) -> None:
        self._optimizer = optimizer
        self._fastest = None if isinstance(optimizer, SGD) else _FASTEST / math.sqrt(layers)
        self._shares: list[float] = []  # of the dense model, of the sizes since the last step
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.total: int | None = None
        """The steps of consolidation; None before it begins."""
        self.step = 0
        """Optimizer steps of consolidation so far."""
        self.all_steps = 0
        """Optimizer steps so far, those before consolidation included."""
        self.norm: Tensor | None = None
        """The mean norm of gradients in the warm-up."""
        call_before_steps(optimizer, self._before_step)
        call_after_steps(optimizer, self._after_step)

    def begin(self, total: int) -> None:
        """Begin a consolidation of `total` steps and clear the state of the optimizer."""
        if total < 1:
            raise TrainingError("consolidation takes steps: its epochs have no batch.")
        self.total, self.step, self.norm = total, 0, None
        groups = self._optimizer.param_groups
        given = zip(groups, self._rates, strict=True)
        self._rates = [float(group.get("initial_lr", rate)) for group, rate in given]
        self._optimizer.state.clear()

    def trains(self, share: float) -> None:
        """Note that the next step trains a size, given as a share of the dense model."""
        self._shares.append(share)

    def _rate(self) -> float:
        """Return the rate of the sizes since the last step, relative to the initial one."""
        if self._fastest is None:
            return _SGD
        return fmean(min(_RATE / share, self._fastest) for share in self._shares or [1.0])

    @property
    def _warm_up(self) -> int:
        return max(1, round(_WARM_UP * (self.total or 0)))

    @torch.no_grad()
    def _before_step(self) -> None:
        if self.total is None:
            return
        pace = cosine(self.total, warmup=self._warm_up)(self.step) * self._rate()
        self._shares.clear()
        gradients = []
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = pace * rate
            gradients += [p.grad for p in group["params"] if p.grad is not None]
        self._limit(gradients)

    def _limit(self, gradients: Sequence[Tensor]) -> None:
        """Scale gradients that are too long; no value leaves its device."""
        if not gradients:
            return
        norm = _norm(gradients)
        if (scaled := getattr(self._optimizer, "grad_scale", None)) is not None:
            norm = norm / scaled.to(norm.device)  # fused optimizers divide by it in their step
        mean = norm if self.norm is None else self.norm.to(norm.device)
        if self.step < self._warm_up:
            mean = torch.where(norm.isfinite(), mean + (norm - mean) / (self.step + 1), mean)
        self.norm = mean
        scale = _LONGEST * mean / norm.clamp_min(torch.finfo(torch.float32).tiny)
        scale = torch.where(scale.isfinite(), scale.clamp(max=1.0), 1.0)  # GradScaler skips these
        for gradient in gradients:
            local_part(gradient).mul_(scale.to(gradient.device, gradient.dtype))

    def _after_step(self) -> None:
        self.all_steps += 1
        self.step += self.total is not None

    def state_dict(self) -> dict[str, Any]:
        """Return all state as tensors, numbers and lists."""
        norm = None if self.norm is None else self.norm.clone()
        return {
            "rates": [*self._rates], "total": self.total, "step": self.step,
            "all_steps": self.all_steps, "norm": norm,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state exactly."""
        self._rates = [float(rate) for rate in state["rates"]]
        self.total, self.step = state["total"], int(state["step"])
        self.all_steps, norm = int(state["all_steps"]), state["norm"]
        self.norm = None if norm is None else norm.clone()


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients; those of shards are summed over processes."""
    first = gradients[0].device
    lengths: dict[Group | None, list[Tensor]] = {}
    for gradient in gradients:
        cut = Cut.from_tensor(gradient) if is_sharded(gradient) else None  # type: ignore[arg-type]
        part = local_part(gradient)
        length = torch.linalg.vector_norm(part.to(_at_least_single(part))).float().to(first)
        lengths.setdefault(None if cut is None else cut.group, []).append(length)
    norms = []
    for group, members in lengths.items():
        norm = torch.linalg.vector_norm(torch.stack(members))
        norms.append(norm if group is None else sum_over(norm.square(), group).sqrt())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _at_least_single(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)
