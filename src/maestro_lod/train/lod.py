"""LoD (low-rank ordered decomposition): the paper's way to train ordered ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from maestro_lod.distributed.agreement import Agreement
from maestro_lod.distributed.collectives import peer_failure_context
from maestro_lod.distributed.ddp import find_wrappers, renew
from maestro_lod.distributed.fsdp import adopt_shards
from maestro_lod.errors import (
    MaestroError,
    OptionError,
    TrainingError,
    listed,
    require_bool,
    require_nonnegative,
    require_whole,
)
from maestro_lod.layers.composed import composed_once
from maestro_lod.layers.ranks import ranks, require_all_active, unwrapped
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Example
from maestro_lod.sizes.rank_order import order_ranks
from maestro_lod.train.diagnostics import (
    require_finite_parameters,
    require_ranks_to_train,
    require_trainable,
    unshrunk,
    warn_about_large_steps,
)
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.method import RunPlan, require_saved_by
from maestro_lod.train.progress import MethodRecord
from maestro_lod.train.rank_penalty import RankPenalty, require_penalty
from maestro_lod.train.sampling import RankSampler
from maestro_lod.train.shrink import (
    cut,
    require_averaged,
    require_optimizer,
    unwrapped_optimizer,
)
from maestro_lod.train.steps import (
    Draw,
    Steps,
    backward_pass,
    missing_shape,
    soft_cross_entropy,
    teacher_pass,
)
from maestro_lod.train.unfactored import Unfactored
from maestro_lod.train.zero_ranks import ProtectedRanks, mostly_zero_initialized

logger = logging.getLogger(__name__)

_WARMUP = 0.3
"""The share of a run that trains the whole model first, if it starts mostly as zeros.

Better on held-out data than 0, 0.1 and 0.5.
"""
_PENALTY_USES = {None: None, False: "due", True: "applied"}  # in saved states
_STATE = ("epoch", "ranks", "steps", "forwards", "whole", "ledger", "penalty", "sampler")


class LoD:
    """Trains a decomposed model by the paper's method: samples, penalizes and removes ranks.

    >>> train = LoD(model, optimizer, penalty=64e-6)
    >>> for epoch in range(epochs):
    ...     for x, y in loader:
    ...         with train.step():
    ...             loss = F.cross_entropy(model(x), y) + train.penalty_loss()
    ...             loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     train.end_epoch()

    If a layer starts mostly as zeros, the whole model is trained first: for 30 % of the run with
    `fit`, and for the first epoch in your own loop. Until such a layer has grown, the layers before
    it get very small gradients, which are too noisy at sampled ranks.

    Args:
        model: A model with low-rank layers.
        optimizer: One optimizer that holds all trainable factors.
        penalty: λ of the hierarchical group lasso.
        threshold: The importance at or below which ranks are removed; None removes none.
        seed: Seed of the sampled ranks.
        sampling: How the active ranks of a step are sampled; see `RankSampler`.
        proximal: Replace the penalty's gradient by its exact proximal step after every
            `optimizer.step()`, which reaches zero under any optimizer.
        min_rank: The smallest rank of a layer.
        full_pass: Add a pass at full rank to every step, which goes through `backward`.
        distill: Train the sampled pass on the predictions of the full one.
        ema: An averaged copy of the model, which is cut to the same ranks.
        example: An input of the model, on which MACs are counted. Without it the first input of
            the training is used, unless the model is compiled or sharded.

    Raises:
        LayerError: The model has no low-rank layers, or parameters that cannot be trained.
        OptionError: An option is invalid, or no layer could lose a rank.
        TrainingError: The optimizer does not hold the factors, or does not support a shrink.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        penalty: float = 0.0,
        threshold: float | None = 1e-7,
        seed: int = 0,
        sampling: str = "pairs",
        proximal: bool = False,
        min_rank: int = 0,
        full_pass: bool = False,
        distill: bool = False,
        ema: AveragedModel | None = None,
        example: Example | None = None,
    ) -> None:
        self.full_pass = require_bool("full_pass", full_pass)
        self.distill = require_bool("distill", distill)
        if self.distill and not self.full_pass:
            raise OptionError("distill=True needs the full pass as its teacher: full_pass=True.")
        penalty, proximal = require_penalty(penalty), require_bool("proximal", proximal)
        if threshold is not None:
            threshold = require_nonnegative("threshold", threshold)
        self.threshold = threshold
        self.sampler = RankSampler(unwrapped(model), strategy=sampling, seed=seed)
        self.model = unwrapped(model)
        self.optimizer = unwrapped_optimizer(optimizer)
        require_all_active(self.model, "training")
        adopt_shards(self.model)
        self.min_rank = require_whole("min_rank", min_rank)
        require_optimizer(self.model, self.optimizer)
        require_trainable(self.model)
        self._layers = require_ranks_to_train(self.model, self.min_rank, "LoD")
        self.ema = None if ema is None else require_averaged(ema)
        self.ledger = Ledger.open_for(self.model, example)
        self.epoch = 0
        """The number of finished epochs."""
        self._epochs: int | None = None  # planned, if `start` was called
        self._agreement = Agreement(self.model)
        self._protected = ProtectedRanks(self.model)
        self.warmup_epochs = int(mostly_zero_initialized(self.model))
        """Number of warm-up epochs at full rank, before ranks are sampled."""
        self._penalty = RankPenalty(penalty, self._layers, self.optimizer, proximal=proximal)
        self._unfactored = Unfactored(self.model, self.optimizer, self.ema)
        self._steps = Steps(self.model, self.optimizer, record_example=example is None)
        self.sampler.left_out = self._steps.left_out

    @property
    def penalty(self) -> float:
        """The current λ, which may be changed at any time."""
        return self._penalty.value

    @penalty.setter
    def penalty(self, value: float) -> None:
        self._penalty.value = require_penalty(value)

    @property
    def proximal(self) -> bool:
        """Whether λ is applied by proximal steps."""
        return self._penalty.proximal

    @property
    def in_warmup(self) -> bool:
        """Whether this epoch is a warm-up epoch at full rank."""
        return self.epoch < self.warmup_epochs

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        """Store the plan of a run; `fit` and the trainers' callbacks call this.

        Args:
            model: The trainer's model, wrapped or not.
            optimizer: The trainer's optimizer, wrapped or not.
            plan: The number of epochs and of optimizer steps.

        Raises:
            OptionError: The method was made for another model or optimizer.
        """
        same = self.optimizer is unwrapped_optimizer(optimizer)
        if not same or self.model is not unwrapped(model):
            raise OptionError(
                "LoD was created for another model or optimizer than fit has. Give both the same."
            )
        self._epochs = plan.epochs
        if self.epoch == 0 and self.warmup_epochs:  # a resumed run keeps its plan
            self.warmup_epochs = round(_WARMUP * plan.epochs)

    def compare_with(self, dense: Cost) -> None:
        """Report relative costs with respect to `dense` instead of this model's own dense form.

        For a model that is narrower than the one in the recipe.
        """
        self.ledger.other_dense = dense.params, dense.macs

    @property
    def history(self) -> list[dict[str, int]]:
        """The ranks in each finished epoch."""
        return [epoch.ranks for epoch in self.ledger.epochs]

    # -- one step ------------------------------------------------------------------------------

    def _prepare_step(self, passes: int) -> Draw | None:
        """Return the function that samples the next step's ranks; None in warm-up."""
        if self.full_pass and passes == 1:
            raise OptionError(
                "full_pass=True needs two passes per step. Use backward(forward, loss)."
            )
        self._penalty.begin_step(suspended=self.in_warmup)
        self._agreement.before_step(self)
        if self.in_warmup:
            self._unfactored.begin()
            return None
        return self.sampler.sample

    @contextmanager
    def step(self) -> Iterator[dict[str, int]]:
        """Do one training step inside the `with` block: one forward and backward.

        The block must cover the backward too: activation checkpointing runs the forward again.

        Yields:
            The active rank of each layer that the step trains.
        """
        with peer_failure_context(), self._steps.one(self._prepare_step(passes=1)) as drawn:
            yield drawn

    def begin_step(self) -> dict[str, int]:
        """Begin a step that lasts until `end_step()`, and return the ranks that it trains.

        For trainers that call back at the beginning and the end of a step.
        """
        return self._steps.begin(self._prepare_step(passes=1))

    def end_step(self) -> None:
        """End a step that `begin_step()` began, after its forward and backward."""
        self._steps.end()

    def penalty_loss(self) -> Tensor:
        """Return λ times the group lasso, to be added to the loss.

        Returns:
            A differentiable scalar; zero in proximal mode and in warm-up epochs.
        """
        return self._penalty.loss()

    def add_penalty_gradients(self, weight: float = 1.0) -> None:
        """Add the gradients of `penalty_loss()` to the factors, instead of adding it to the loss.

        Call it once per optimizer step, after the last backward and before gradients are clipped;
        or after each of k batches, with a weight of 1/k.

        Args:
            weight: Multiplies the penalty.
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
        """Do all passes of one step, and add the gradients of the penalty.

        >>> train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))

        That is one pass at sampled ranks and, with `full_pass`, one at full rank before it. Warm-up
        epochs have one pass at full rank.

        Args:
            forward: Returns an output of the model.
            loss: Returns the loss of an output.
            weight: Scales all losses: 1/k where the gradients of k batches are accumulated.
            soft_loss: The loss of the sampled pass for `distill`, of its output and that of the
                full pass; by default the cross-entropy of scores (N, classes, …).

        Returns:
            The sum of the weighted losses and the penalty, detached.

        Raises:
            OptionError: The loss is not one number that gradients can come from, or `distill`
                cannot compare two outputs.
            TrainingError: The loss is NaN or infinite; weights are as before the step.
        """
        with peer_failure_context():
            draw = self._prepare_step(passes=2)
            total = self._two_passes(forward, loss, draw, weight, soft_loss)
            return total + self._penalty.add_gradients(weight)

    def _two_passes(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        draw: Draw | None,
        weight: float,
        soft_loss: Callable[[Any, Any], Tensor] | None,
    ) -> Tensor:
        """Do the sampled pass, after one at full rank with `full_pass`."""
        two = self.full_pass and draw is not None
        with composed_once(self.model, 2) if two else nullcontext():
            total: Tensor | float = 0.0
            if two:
                total, teacher = teacher_pass(forward, loss, weight, self._teaches(soft_loss))
                if teacher is not None:
                    compare = soft_loss or soft_cross_entropy
                    loss = lambda output: compare(output, teacher)  # noqa: E731
            with self._steps.one(draw):
                return backward_pass(forward, loss, weight) + total

    def _teaches(self, soft_loss: object) -> Callable[[Any], bool]:
        """Return a predicate: is this output a target of the next pass? It checks the output."""

        def teaches(output: Any) -> bool:
            if not self.distill:
                return False
            if soft_loss is None and (shape := missing_shape(output)):
                raise OptionError(
                    f"distill=True compares scores of {shape}. Give a function that compares two "
                    "outputs: backward(…, soft_loss=lambda output, teacher: …), or in fit a loss "
                    "with a method soft(output, teacher, target)."
                )
            return True

        return teaches

    # -- one epoch -----------------------------------------------------------------------------

    def end_epoch(self, *, last: bool = False) -> dict[str, int]:
        """Record the cost of the epoch, and remove ranks.

        Args:
            last: Whether this epoch is the last one of the training.

        Returns:
            The number of removed ranks by layer, without layers that lost none.

        Raises:
            TrainingError: Nothing was trained in this epoch, or the weights are not finite.
        """
        require_bool("last", last)
        self._agreement.end_epoch(self)
        self._steps.require_some(self.epoch)
        require_optimizer(self.model, self.optimizer)
        require_finite_parameters(self.model)
        self._penalty.require_applied(self.epoch)
        keep = self._protected.useful_ranks(
            self.epoch, self.threshold, self.min_rank, self._unfactored.ranks,
            remedy=f"Lower penalty={self.penalty} or set min_rank=1.",
        )  # fmt: skip
        self._steps.measure(self.ledger)
        chances = self._steps.chances(self.sampler.chances())
        full_pass = self._steps.sampled * self.full_pass
        cost = self.ledger.epoch_cost(self.model, chances, full_pass=full_pass)
        lost: dict[str, int] = {}
        if keep is not None:
            lost = cut(self.model, keep, self.optimizer, self.ema, self._agreement.wrappers)
        self.ledger.epochs.append(cost)
        logger.info(
            "epoch %d: total rank %d, %d parameters; ranks removed: %s",
            self.epoch, sum(cost.ranks.values()), cost.params, lost or "none",
        )  # fmt: skip
        self.epoch += 1
        self._steps.new_epoch()
        self._penalty.applied = None
        if self.epoch == self.warmup_epochs:
            order_ranks(self.model, self.optimizer, self.ema)
            warn_about_large_steps(self.model, self.optimizer)
        self._penalty.warn_if_stalled(self.threshold, lost)
        self._agreement.new_epoch()
        return lost

    # -- reports and state ---------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """Return what must be the same in all processes that train the model."""
        return {
            "the ranks of the model": ranks(self.model),
            "the options of LoD": f"penalty={self.penalty!r} threshold={self.threshold!r} "
            f"min_rank={self.min_rank} proximal={self.proximal} full_pass={self.full_pass} "
            f"distill={self.distill}",
            "the ranks to sample (seed and steps so far)": self.sampler.fingerprint(),
        }

    def record(self) -> MethodRecord:
        """Return the ranks, the deployed size and λ."""
        record = MethodRecord(
            **self.ledger.sizes(self.model),
            ranks={name: layer.rank for name, layer in self._layers.items()},
            penalty=self.penalty,
        )
        if self.threshold is None or self._epochs is None:
            return record
        share, passed = record.relative_params or 0.0, (self.epoch, self._epochs)
        return replace(record, note=unshrunk(self._layers, share, self.penalty, *passed))

    def training_cost(self) -> dict[str, float | None]:
        """Return the cost of training so far, relative to training the dense model."""
        return self.ledger.relative()

    def state_dict(self) -> dict[str, Any]:
        """Return all state as numbers, strings, lists and tensors; save it with the model's."""
        self._steps.measure(self.ledger)
        return {
            "epoch": self.epoch,
            "ranks": {name: layer.rank for name, layer in self._layers.items()},
            **self._steps.counts(),
            "ledger": self.ledger.state_dict(),
            "unfactored": self._unfactored.names,
            "penalty": self.penalty,
            "penalty_use": _PENALTY_USES[self._penalty.applied],
            "sampler": {**self.sampler.state_dict(), "alone": self.warmup_epochs},
            "unmoved": dict(self._protected.ranks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state exactly; load the states of model and optimizer first.

        Args:
            state: A state from `state_dict()` of the same method, also of older versions.

        Raises:
            TrainingError: It is not a state of this method, or has other ranks than the model.
                Nothing has changed then.
        """
        require_saved_by("LoD", state)
        self._require_state(state)
        require_optimizer(self.model, self.optimizer)
        before = self.state_dict()
        try:
            self._restore(state)
        except Exception as error:
            self._restore(before)
            if isinstance(error, MaestroError):
                raise
            raise TrainingError(
                f"this is not a state of LoD ({error!r}). Give one from its state_dict()."
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.ledger.load_state_dict(state["ledger"])
        self.epoch = require_whole("epoch", state["epoch"])
        self._steps.load_counts(state)
        self._penalty.value = require_nonnegative("penalty", state["penalty"])
        # older states lack the following
        self._unfactored.hold(state.get("unfactored", ()))
        self.warmup_epochs = require_whole("alone", state["sampler"].get("alone", 0))
        protected = state.get("unmoved", {})
        self._protected.ranks = {name: require_whole(name, r) for name, r in protected.items()}
        uses = {use: applied for applied, use in _PENALTY_USES.items()}
        if (use := state.get("penalty_use", "applied")) not in uses:
            raise ValueError(f"penalty_use is {use!r}")
        self._penalty.applied = uses[use]
        for wrapper in find_wrappers(self.model):
            renew(wrapper)  # its buckets may have other ranks than the loaded model

    def _require_state(self, state: Any) -> None:
        """Raise TrainingError if it is not a state of LoD at the model's ranks."""
        entries = state if isinstance(state, Mapping) else {}
        if missing := [part for part in _STATE if part not in entries]:
            raise TrainingError(
                f"this is not a state of LoD: it has no {listed(missing)}. Give one from its "
                "state_dict()."
            )
        current = {name: layer.rank for name, layer in self._layers.items()}
        saved = state["ranks"]
        if not isinstance(saved, Mapping):
            raise TrainingError(
                f"the ranks of a state are {saved!r:.40}, not a mapping of names. Give one from "
                "LoD.state_dict()."
            )
        if saved != current:
            differing = [
                name for name in {**current, **saved} if current.get(name) != saved.get(name)
            ]
            raise TrainingError(
                f"the saved state has other ranks than the model: {listed(differing)}. Load the "
                "model's state_dict of the same moment before this one."
            )
