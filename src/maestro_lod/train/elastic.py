"""Train one model for every size.

First the whole model is trained. Then its ranks are ordered, and from there on every step trains
the whole model and, taught by it, a submodel. Sizes are rungs of a ladder, evenly spaced in the
logarithm of the cost, so that small ones are trained as often as large ones; how many ranks each
layer keeps on a rung is decided by the weights, after every epoch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.collectives import peer_failure_context
from maestro_lod.errors import (
    OptionError,
    TrainingError,
    require_nonnegative,
    require_seed,
    require_whole,
)
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.model.cost import Costs
from maestro_lod.model.inputs import Example
from maestro_lod.sizes.allocation import allocation, smallest_cost
from maestro_lod.sizes.rank_order import order_ranks
from maestro_lod.train.method import RunPlan
from maestro_lod.train.rank_training import WARMUP, RankTraining
from maestro_lod.train.steps import (
    Draw,
    backward_pass,
    live_ranks,
    missing_shape,
    soft_cross_entropy,
    teacher_pass,
)
from maestro_lod.train.zero_ranks import ProtectedRanks

_RUNGS = 32  # sizes on a ladder, the whole model not among them
_NEAR = 3  # each layer is cut as on a rung up to this far away: a search has a choice then
_WORTH = 0.7  # of the dense cost: a kind of cost that ranks do not bring below this has no ladder


def require_smallest(smallest: float) -> float:
    """Return the smallest size to train, or raise OptionError if it is not a share."""
    if not 0.0 < require_nonnegative("elastic", smallest) < 1.0:
        raise OptionError(
            f"elastic={smallest!r} must be a share of the dense model between 0 and 1, such as "
            "0.1: the smallest size to train."
        )
    return smallest


class SizeSampler:
    """Draws submodels of all sizes, each as often as any other."""

    def __init__(
        self, model: nn.Module, smallest: float, *, seed: int = 0, left_out: set[str] | None = None
    ) -> None:
        self._model, self._layers = model, require_low_rank(model)
        self.smallest = smallest
        self.left_out = set() if left_out is None else left_out
        """Layers that are not cut, because the model's forward never reaches them."""
        self.generator = torch.Generator("cpu").manual_seed(require_seed(seed))
        self._names: list[str] = []
        self._ladders: list[list[list[int]]] = []  # kind of cost -> rung -> rank of each layer

    @property
    def built(self) -> bool:
        """Whether there are sizes to draw."""
        return bool(self._ladders)

    def build(self, costs: Costs) -> None:
        """Choose the ranks of each layer at each rung, by the current weights."""
        kinds = ("params",) if costs.dense.macs is None else ("params", "macs")
        ladders = {kind: self._ladder(costs, kind) for kind in kinds}
        self._names = list(self._layers)
        self._ladders = [ladder for ladder in ladders.values() if ladder] or [
            [[layer.rank for layer in self._layers.values()]] * _RUNGS  # nothing saves any cost
        ]

    def _ladder(self, costs: Costs, kind: str) -> list[list[int]]:
        dense = int(getattr(costs.dense, kind))
        here = {name: layer.rank for name, layer in self._layers.items()}
        top = min(dense, int(getattr(costs.at(here), kind)))
        lowest = smallest_cost(self._model, costs, kind)
        bottom = max(self.smallest * dense, lowest)
        if lowest > _WORTH * dense or bottom >= top:
            return []
        spent = allocation(self._model, costs, kind, most=top)
        limits = [round(top * (bottom / top) ** (i / _RUNGS)) for i in range(1, _RUNGS + 1)]
        return [[*spent.within(limit).values()] for limit in limits]

    def sample(self) -> dict[str, int]:
        """Draw a size, and for each layer a rung near it."""
        ranks = live_ranks(self._layers, self.left_out)
        if not ranks:
            raise TrainingError(
                "no rank is left to sample: every low-rank layer has rank 0 or is frozen. "
                "Set min_rank=1."
            )
        ladder = self._ladders[self._draw(len(self._ladders))]
        rung = self._draw(_RUNGS)
        drawn = {}
        for index, name in enumerate(self._names):
            near = rung + self._draw(2 * _NEAR + 1) - _NEAR
            if name in ranks:
                drawn[name] = max(1, ladder[min(max(near, 0), _RUNGS - 1)][index])
        return drawn

    def _draw(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.generator, device="cpu"))

    def chances(self) -> dict[str, list[float]]:
        """Return the probability that a draw leaves each layer at rank 1, 2, …."""
        ranks = live_ranks(self._layers, self.left_out)
        chances = {name: [0.0] * rank for name, rank in ranks.items()}
        rungs = [*_near_rungs()]
        share = 1 / (len(self._ladders) * len(rungs)) if self._ladders else 0.0
        for ladder in self._ladders:
            for index, name in enumerate(self._names):
                for rung in rungs if name in ranks else ():
                    chances[name][max(1, ladder[rung][index]) - 1] += share
        return chances

    def fingerprint(self) -> str:
        """Return a short text that is the same where all draws to come are."""
        state = bytes(self.generator.get_state().tolist())
        rest = repr((self._names, sorted(self.left_out), self._ladders))
        return f"{zlib.crc32(rest.encode(), zlib.crc32(state)):08x}"

    def state_dict(self) -> dict[str, Any]:
        """Return all state as tensors, strings and lists."""
        return {
            "strategy": "elastic",
            "generator": self.generator.get_state(),
            "names": list(self._names),
            "ladders": torch.tensor(self._ladders, dtype=torch.int64, device="cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state exactly; the next draw is the one that would have come next."""
        generator: Tensor = state["generator"]
        self.generator.set_state(generator.to("cpu", torch.uint8))
        self._names, self._ladders = list(state["names"]), state["ladders"].tolist()


class ElasticTraining(RankTraining):
    """Trains every size of a model down to a share of the dense one, in params and in MACs.

    >>> train = ElasticTraining(model, optimizer, smallest=0.1)
    >>> train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))

    Each step has two passes, so that steps go through `backward`; `fit` does that.

    Args:
        model: A model with low-rank layers.
        optimizer: One optimizer that holds all trainable factors.
        smallest: The smallest size to train, as a share of the dense model.
        warmup_epochs: How many epochs train the whole model first. Without a number `fit` takes
            three tenths of its run, and a loop of your own the first epoch; 0 is for models that
            are trained already.
        threshold: The importance at or below which ranks are removed; None removes none.
        seed: Seed of the sampled sizes.
        min_rank: The rank that no layer falls below.
        ema: An averaged copy of the model that is cut together with it.
        example: An input of the model, on which MACs are counted. Without it the first input of
            the training is used, unless the model is compiled or sharded.

    Raises:
        LayerError: The model has no low-rank layers, or parameters that cannot be trained.
        OptionError: An option is invalid, or no layer could lose a rank.
        TrainingError: The optimizer does not hold the factors, or cannot follow a shrink.
    """

    name: ClassVar[str] = "ElasticTraining"
    required_state: ClassVar[tuple[str, ...]] = (*RankTraining.required_state, "sampler")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        smallest: float = 0.1,
        warmup_epochs: int | None = None,
        threshold: float | None = 1e-7,
        seed: int = 0,
        min_rank: int = 0,
        ema: AveragedModel | None = None,
        example: Example | None = None,
    ) -> None:
        require_smallest(smallest)
        require_seed(seed)
        self._plans_warmup = warmup_epochs is None
        self.warmup_epochs = 1
        if warmup_epochs is not None:
            self.warmup_epochs = require_whole("warmup_epochs", warmup_epochs)
        if threshold is not None:
            threshold = require_nonnegative("threshold", threshold)
        self.threshold = threshold
        super().__init__(model, optimizer, min_rank=min_rank, ema=ema, example=example)
        self._protected = ProtectedRanks(self.model)
        self._begin(record_example=example is None)
        self.sampler = SizeSampler(
            self.model, smallest, seed=seed, left_out=self._steps.left_out
        )  # fmt: skip

    @property
    def in_warmup(self) -> bool:
        """Whether this epoch trains the whole model alone."""
        return self.epoch < self.warmup_epochs

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        super().start(model, optimizer, plan)
        if self.epoch == 0 and self._plans_warmup:  # a resumed run keeps its plan
            self.warmup_epochs = round(WARMUP * plan.epochs)

    # -- one step ------------------------------------------------------------------------------

    def _prepare_step(self, passes: int) -> Draw | None:
        if passes == 1:
            raise OptionError("ElasticTraining needs two passes: use backward(forward, loss).")
        if not self.in_warmup and not self.sampler.built:
            self.sampler.build(self.ledger.costs(self.model))
        self._compare_processes(unfactored=self.in_warmup)
        return None if self.in_warmup else self.sampler.sample

    def backward(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Tensor:
        """Do both passes of one step, each with its own backward: whole model and submodel.

        >>> train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))

        The submodel learns from the output of the whole model where the two can be compared, and
        else from the loss.

        Args:
            forward: Returns an output of the model.
            loss: Returns the loss of an output.
            weight: Scales all losses: 1/k where the gradients of k batches are accumulated.
            soft_loss: Compares the submodel's output with that of the whole model; by default the
                cross-entropy of scores (N, classes, …).

        Returns:
            The sum of the weighted losses, detached.

        Raises:
            OptionError: The loss is not one number that gradients can come from.
            TrainingError: The loss is NaN or infinite; weights are as before the step.
        """
        with peer_failure_context():
            draw = self._prepare_step(passes=2)
            total: Tensor | float = 0.0
            if draw is not None:
                total, teacher = teacher_pass(
                    forward, loss, weight, lambda y: bool(soft_loss) or not missing_shape(y)
                )
                if teacher is not None:
                    compare = soft_loss or soft_cross_entropy
                    loss = lambda output: compare(output, teacher)  # noqa: E731
            with self._steps.one(draw):
                return backward_pass(forward, loss, weight) + total

    # -- one epoch -----------------------------------------------------------------------------

    def _ranks_to_keep(self, *, last: bool) -> dict[str, int] | None:
        return self._protected.useful_ranks(
            self.epoch, self.threshold, self.min_rank, self._unfactored.ranks,
            remedy="Lower the threshold or set min_rank=1.",
        )  # fmt: skip

    def _chances(self) -> dict[str, list[float]]:
        return self._steps.chances(self.sampler.chances())

    @property
    def _full_passes(self) -> float:
        return self._steps.sampled

    def _after_epoch(self, lost: Mapping[str, int]) -> None:
        if self.epoch == self.warmup_epochs:
            order_ranks(self.model, self.optimizer, self.ema)
        if not self.in_warmup:
            self.sampler.build(self.ledger.costs(self.model))

    # -- reports and state ---------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        drawn = {"the ranks to draw (seed and steps so far)": self.sampler.fingerprint()}
        return super().facts() | drawn

    def _options(self) -> str:
        return (
            f"smallest={self.sampler.smallest!r} threshold={self.threshold!r} "
            f"min_rank={self.min_rank}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "sampler": {**self.sampler.state_dict(), "alone": self.warmup_epochs},
            "unmoved": dict(self._protected.ranks),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self.sampler.load_state_dict(state["sampler"])
        # older states lack the following
        warmup = state["sampler"].get("alone", self.warmup_epochs)
        self.warmup_epochs = require_whole("alone", warmup)
        protected = state.get("unmoved", {})
        self._protected.ranks = {name: require_whole(name, r) for name, r in protected.items()}


def _near_rungs() -> Iterator[int]:
    """Go through all rungs that a layer may get, as often as draws lead to them."""
    for rung in range(_RUNGS):
        for near in range(rung - _NEAR, rung + _NEAR + 1):
            yield min(max(near, 0), _RUNGS - 1)
