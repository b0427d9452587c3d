"""The one stateful object: everything that a training run needs beside model and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.agreement import Agreement
from maestro_lod.distributed.collectives import explaining_loss_of_others
from maestro_lod.distributed.fsdp import adopt_shards
from maestro_lod.errors import (
    OptionError,
    require_bool,
    require_nonnegative,
    require_whole,
)
from maestro_lod.layers.composed import composed_once
from maestro_lod.layers.ranks import ranks, require_all_active, unwrapped
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Example
from maestro_lod.train.budget import Landing
from maestro_lod.train.checks import (
    require_ranks_left,
    require_ranks_to_train,
    require_threshold,
    require_trainable,
)
from maestro_lod.train.elastic import Elastic, sampler_for
from maestro_lod.train.finite import require_finite_parameters
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.method import RunPlan
from maestro_lod.train.objective import Budget, Strength, require_strength
from maestro_lod.train.passes import Passes
from maestro_lod.train.rank_penalty import RankPenalty
from maestro_lod.train.record import MethodRecord
from maestro_lod.train.resumable import Resumable
from maestro_lod.train.shrink import (
    cut,
    ranks_above,
    require_averaged,
    require_optimizer,
    unwrapped_optimizer,
)
from maestro_lod.train.steps import SampledSteps
from maestro_lod.train.unfactored import Unfactored
from maestro_lod.train.unshrunk import unshrunk
from maestro_lod.train.zero_ranks import Grace, at_least, warn_of_large_steps

logger = logging.getLogger(__name__)


class LoD(Resumable):
    """Trains a decomposed model: samples ranks, penalizes useless ones, removes them.

    >>> train = LoD(model, optimizer, penalty=64e-6)
    >>> for epoch in range(epochs):
    ...     for x, y in loader:
    ...         with train.step():
    ...             loss = F.cross_entropy(model(x), y) + train.penalty_loss()
    ...             loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     train.end_epoch()

    `penalty` is λ, a `Pressure`, or a `Budget` to land on; `threshold` the importance at or below
    which ranks are removed, None to remove none; `sampling` a strategy of `RankSampler`, or
    `Elastic(0.1)` to train every size down to a tenth, which goes through `backward`; `proximal`
    replaces the penalty's gradient by its exact proximal step after every `optimizer.step()`, which
    reaches zero under any optimizer; `full_pass` adds a pass at full rank to every step, and
    `distill` then trains the sampled pass on its predictions: both go through `backward`. `ema` is
    an averaged copy that shrinks along. `example` is an input of the model for the ledger's MACs;
    without one the first batch is looked at, unless the model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        penalty: Strength = 0.0,
        threshold: float | None = 1e-7,
        seed: int = 0,
        sampling: str | Elastic = "pairs",
        proximal: bool = False,
        min_rank: int = 0,
        full_pass: bool = False,
        distill: bool = False,
        ema: AveragedModel | None = None,
        example: Example | None = None,
    ) -> None:
        self.passes = Passes.of(sampling, full_pass, distill)
        budget = isinstance(strength := require_strength(penalty), Budget)
        self.threshold = require_threshold(threshold, needed=budget)
        self.model = unwrapped(model)
        optimizer = self.optimizer = unwrapped_optimizer(optimizer)
        require_all_active(self.model, "training")
        adopt_shards(self.model)
        self.min_rank = max(require_whole("min_rank", min_rank), 1 if budget else 0)
        self.sampler = sampler_for(self.model, sampling, seed, budget=budget)
        require_optimizer(self.model, optimizer)
        require_trainable(self.model)
        self._layers = require_ranks_to_train(self.model, self.min_rank)
        self.ema = None if ema is None else require_averaged(ema)
        self.ledger = Ledger.of(self.model, example)
        self._unfactored = Unfactored(self.model, optimizer, self.ema)
        self._penalty = RankPenalty(
            strength, self.model, optimizer, self.ledger,
            ema=self.ema, proximal=require_bool("proximal", proximal), min_rank=self.min_rank,
        )  # fmt: skip
        self.proximal = self._penalty.proximal
        self.epoch = 0
        self._epochs: int | None = None  # planned, if somebody says so
        self._grace, self._agreement = Grace(self.model), Agreement(self.model)
        self._steps = SampledSteps(self.model, optimizer, self.sampler, note_input=example is None)

    @property
    def penalty(self) -> float:
        """λ as it is now."""
        return self._penalty.value

    @penalty.setter
    def penalty(self, value: float) -> None:
        self._penalty.value = require_nonnegative("penalty", value)

    @property
    def landing(self) -> Landing | None:
        """When and where the model lands on its budget, if there is one."""
        return self._penalty.landing

    @property
    def history(self) -> list[dict[str, int]]:
        """The ranks that were in force in each finished epoch."""
        return [epoch.ranks for epoch in self.ledger.epochs]

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        """Learn how long training lasts, where λ depends on it; `fit` calls this."""
        same = self.optimizer is unwrapped_optimizer(optimizer)
        if not same or self.model is not unwrapped(model):
            raise OptionError("LoD was made for another model or optimizer than fit was given.")
        self._penalty.start(plan)
        if self.epoch == 0:  # a run that goes on has its plan, for however long
            self.sampler.expect(plan.epochs)
        self._epochs = plan.epochs

    def compare_with(self, dense: Cost) -> None:
        """Say all that is relative beside this dense model, not beside the model's own dense form.

        For a model that is narrower than the one that a user has in mind.
        """
        self.ledger.beside = dense.params, dense.macs
        if self.landing is not None:
            self.landing.compare_with(dense)

    # -- one step ------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[dict[str, int]]:
        """Draw the ranks of one step and keep them active inside the `with` block.

        The block must cover forward and backward: activation checkpointing runs the forward again.
        Yields what was drawn.
        """
        with (
            explaining_loss_of_others(),
            self._steps.one(whole=self._whole(passes=1)) as drawn,
        ):
            yield drawn

    def begin_step(self) -> dict[str, int]:
        """Draw the ranks of one step, keep them active until `end_step()`, and return them.

        For trainers that call back at the beginning and end of a step.
        """
        return self._steps.begin(whole=self._whole(passes=1))

    def end_step(self) -> None:
        """Make all ranks active again, after forward and backward of a step that was begun."""
        self._steps.end()

    def _whole(self, passes: int) -> bool:
        """Say whether a step trains the whole model, or refuse one of too few passes."""
        if self.passes.full_pass and passes == 1:
            what = "sampling=Elastic(…)" if self.passes.elastic else "full_pass=True"
            raise OptionError(f"{what} needs two passes: use backward(forward, loss).")
        landing, waits = self.landing, self.sampler.waits(self.epoch, self.ledger)
        self._penalty.begin_step(whole=waits)
        self._agreement.before_step(self)
        if waits or (landing is not None and not landing.landed):
            self._unfactored.begin()
        return waits or landing is not None

    def penalty_loss(self) -> Tensor:
        """Return λ times the group lasso, to be added to the loss; zero in proximal mode."""
        return self._penalty.loss()

    def add_penalty_gradients(self, weight: float = 1.0) -> None:
        """Add the gradients of `penalty_loss()` to those that are there, in place of adding it.

        Once per optimizer step: after the last backward, whatever was accumulated, and before
        gradients are clipped. Or after each of k batches, with a weight of 1/k.
        """
        self._penalty.add_gradients(weight)

    def backward(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Tensor:
        """Do the passes of one step, gradients included, and return the summed loss.

        >>> train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))

        With `full_pass` that is a pass at full rank and a sampled one, each with its own backward,
        unless all ranks are trained anyway; otherwise the sampled one. The penalty is included.
        `weight` scales all of it: 1/k where the gradients of k batches are accumulated.
        `soft_loss(output, teacher)` is what `distill` trains the sampled pass on, given the output
        of the full one; without it that is the cross-entropy of scores (N, classes, …).
        """
        with explaining_loss_of_others():
            whole = self._whole(passes=2)
            passes = self.passes.on_the_same_weights(whole=whole)
            with composed_once(self.model, passes) if passes > 1 else nullcontext():
                total = self.passes.backward(
                    forward, loss, self._steps.one(whole=whole), weight, soft_loss, whole=whole
                )
            return total + self._penalty.add_gradients(weight)

    # -- one epoch -----------------------------------------------------------------------------

    def end_epoch(self, *, last: bool = False) -> dict[str, int]:
        """Book the epoch's cost, remove useless ranks, and return how many each layer lost.

        If it is the last one, the model fits its budget afterwards, whatever was planned.
        """
        require_bool("last", last)
        self._agreement.end_epoch(self)
        self._steps.require_some(self.epoch)
        self._penalty.require_applied(self.epoch)
        require_optimizer(self.model, self.optimizer)
        require_finite_parameters(self.model)
        keep = self._ranks_to_keep(last)
        full_passes = self._steps.sampled * self.passes.full_pass
        cost = self.ledger.epoch_cost(self.model, self._steps.chances(), full_pass=full_passes)
        lost: dict[str, int] = {}
        if self.threshold is not None:
            lost = cut(self.model, keep, self.optimizer, self.ema, self._agreement.wrappers)
        self.ledger.epochs.append(cost)
        logger.info(
            "epoch %d: total rank %d, %d parameters; ranks removed: %s",
            self.epoch, sum(cost.ranks.values()), cost.params, lost or "none",
        )  # fmt: skip
        self.epoch += 1
        self._penalty.use = None
        self._steps.new_epoch()
        self.sampler.end_epoch(self.epoch, self.ledger, self.optimizer, self.ema)
        if self.epoch == self.sampler.alone and not self.passes.elastic:
            warn_of_large_steps(self.model, self.optimizer)
        self._agreement.new_epoch()
        self._penalty.warn_of_floor(self.threshold, lost)
        return lost

    def _ranks_to_keep(self, last: bool) -> dict[str, int]:
        if self.landing is not None and (last or self.landing.due(self.epoch + 1)):
            self.land()
        spared = {**self._grace.end_epoch(self.epoch), **self._unfactored.ranks}
        keep = at_least(ranks_above(self.model, self.threshold or 0.0, self.min_rank), spared)
        require_ranks_left(keep, self.threshold, self.penalty)
        self._steps.measure(self.ledger)
        return keep if self.landing is None else self.landing.end_epoch(self.model)

    def land(self) -> None:
        """Fit the budget now, whatever the plan: ranks too many become zero until end_epoch().

        For a loop of your own: long before its end, since what is left still has to be trained.
        """
        self._penalty.land()

    def facts(self) -> dict[str, object]:
        """Say what must be the same in all processes that train the model."""
        return {
            "the ranks of the model": ranks(self.model),
            "the options of LoD": f"penalty={self.penalty!r} threshold={self.threshold!r} "
            f"min_rank={self.min_rank} proximal={self.proximal} {self.passes}",
            "the ranks to draw (seed and steps so far)": self.sampler.fingerprint(),
        }

    def record(self) -> MethodRecord:
        """Say what the model is and would cost now, deployed."""
        record = MethodRecord(
            **self.ledger.sizes(self.model),
            ranks={name: layer.rank for name, layer in self._layers.items()},
            penalty=self.penalty,
            budget=None if self.landing is None else self.landing.share,
            phase=None if self.landing is None else self.landing.phase,
        )
        if self.landing is not None or self.threshold is None or self._epochs is None:
            return record
        share, passed = record.relative_params or 0.0, (self.epoch, self._epochs)
        return replace(record, note=unshrunk(self._layers, share, self.penalty, *passed))

    def training_cost(self) -> dict[str, float | None]:
        """Return what training has cost so far, relative to training the dense model."""
        return self.ledger.relative()
