"""The one stateful object: everything that a training run needs beside model and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map_only

from maestro_lod.calls import Example
from maestro_lod.errors import (
    LayerError,
    MaestroError,
    OptionError,
    TrainingError,
    listed,
    require_bool,
    require_nonnegative,
    require_whole,
)
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import require_all_active, require_low_rank, unwrapped
from maestro_lod.train.budget import Steering
from maestro_lod.train.checks import require_loss, require_trainable
from maestro_lod.train.distillation import require_class_scores, soft_cross_entropy
from maestro_lod.train.finite import require_finite_loss, require_finite_parameters
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.method import RunPlan
from maestro_lod.train.rank_penalty import RankPenalty
from maestro_lod.train.record import MethodRecord
from maestro_lod.train.sampling import RankSampler
from maestro_lod.train.shrink import (
    cut,
    ranks_above,
    require_averaged,
    require_optimizer,
    require_unwrapped,
    unmoved_ranks,
)
from maestro_lod.train.steps import SampledSteps
from maestro_lod.train.strength import Budget, Strength, require_strength

logger = logging.getLogger(__name__)


class LoD:
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
    which ranks are removed, None to remove none; `sampling` a strategy of `RankSampler`; `proximal`
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
        sampling: str = "pairs",
        proximal: bool = False,
        min_rank: int = 0,
        full_pass: bool = False,
        distill: bool = False,
        ema: AveragedModel | None = None,
        example: Example | None = None,
    ) -> None:
        _require_inner_model(model)
        for option, value in (
            ("proximal", proximal),
            ("full_pass", full_pass),
            ("distill", distill),
        ):
            require_bool(option, value)
        strength = require_strength(penalty)
        budget = isinstance(strength, Budget)
        _require_consistent(budget, threshold, full_pass, distill)
        self.model, self.optimizer = unwrapped(model), optimizer
        require_all_active(self.model, "training")
        self.threshold = None if threshold is None else require_nonnegative("threshold", threshold)
        self.min_rank = max(require_whole("min_rank", min_rank), 1 if budget else 0)
        self.full_pass, self.distill, self.ema = full_pass, distill, ema
        self.sampler = RankSampler(self.model, strategy=sampling, seed=seed)
        require_optimizer(self.model, optimizer)
        require_trainable(self.model)
        if ema is not None:
            require_averaged(ema)
        self.ledger = Ledger.of(self.model, example)
        self._penalty = RankPenalty(
            strength, self.model, optimizer, self.ledger, proximal=proximal, min_rank=self.min_rank
        )
        self.proximal = self._penalty.proximal
        self.epoch = 0
        self._layers = _require_ranks_to_train(self.model, self.min_rank)
        self._unmoved = unmoved_ranks(self.model)
        self._steps = SampledSteps(
            self.model, optimizer, self.sampler, note_example=example is None
        )

    @property
    def penalty(self) -> float:
        """λ as it is now."""
        return self._penalty.value

    @penalty.setter
    def penalty(self, value: float) -> None:
        self._penalty.value = require_nonnegative("penalty", value)

    @property
    def steering(self) -> Steering | None:
        """How a budget is approached, if there is one."""
        return self._penalty.steering

    @property
    def history(self) -> list[dict[str, int]]:
        """The ranks that were in force in each finished epoch."""
        return [epoch.ranks for epoch in self.ledger.epochs]

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        """Learn how long training lasts, where λ depends on it; `fit` calls this."""
        if self.optimizer is not optimizer or self.model is not unwrapped(model):
            raise OptionError("LoD was made for another model or optimizer than fit was given.")
        self._penalty.start(plan)

    # -- one step ------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[dict[str, int]]:
        """Draw the ranks of one step and keep them active inside the `with` block.

        The block must cover forward and backward: activation checkpointing runs the forward again.
        Yields what was drawn.
        """
        with self._steps.one(healing=self._healing(passes=1)) as drawn:
            yield drawn

    def begin_step(self) -> dict[str, int]:
        """Draw the ranks of one step, keep them active until `end_step()`, and return them.

        For trainers that call back at the beginning and end of a step.
        """
        return self._steps.begin(healing=self._healing(passes=1))

    def end_step(self) -> None:
        """Make all ranks active again, after forward and backward of a step that was begun."""
        self._steps.end()

    def _healing(self, passes: int) -> bool:
        """Say whether the model heals, or refuse a step that cannot be done in so many passes."""
        if self.full_pass and passes == 1:
            raise OptionError("full_pass=True needs two passes: use backward(forward, loss).")
        self._penalty.begin_step()
        return self._penalty.healing

    def penalty_loss(self) -> Tensor:
        """Return λ times the group lasso, to be added to the loss; zero in proximal mode."""
        return self._penalty.loss()

    def add_penalty_gradients(self) -> None:
        """Add the gradients of `penalty_loss()` to those that are there, in place of adding it.

        Once per optimizer step: after the last backward, whatever was accumulated, and before
        gradients are clipped.
        """
        self._penalty.add_gradients()

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

        With `full_pass` that is a pass at full rank and a sampled one, each with its own backward;
        otherwise the sampled one. The penalty is included. `weight` scales all of it: 1/k where
        the gradients of k batches are accumulated. `soft_loss(output, teacher)` is what `distill`
        trains the sampled pass on, given the output of the full one; without it that is the
        cross-entropy of scores (N, classes, …).
        """
        total: Tensor | float = 0.0
        if self.full_pass:
            output = forward()
            if self.distill and soft_loss is None:
                require_class_scores(output)
            full_loss = require_finite_loss(require_loss(loss(output)) * weight)
            full_loss.backward()  # type: ignore[no-untyped-call]
            total = full_loss.detach()
        with self._steps.one(healing=self._healing(passes=2)):
            sampled = forward()
            if self.distill:
                teacher = tree_map_only(Tensor, Tensor.detach, output)
                data_loss = (soft_loss or soft_cross_entropy)(sampled, teacher)
            else:
                data_loss = require_loss(loss(sampled))
            sampled_loss = require_finite_loss((data_loss + self.penalty_loss()) * weight)
            sampled_loss.backward()  # type: ignore[no-untyped-call]
        return sampled_loss.detach() + total

    # -- one epoch -----------------------------------------------------------------------------

    def end_epoch(self, *, last: bool = False) -> dict[str, int]:
        """Book the epoch's cost, remove useless ranks, and return how many each layer lost.

        If it is the last one, the model fits its budget afterwards, whatever was planned.
        """
        require_bool("last", last)
        self._steps.require_some(self.epoch)
        self._penalty.require_applied(self.epoch)
        require_optimizer(self.model, self.optimizer)
        require_finite_parameters(self.model)
        keep = self._ranks_to_keep(last)
        cost = self.ledger.epoch_cost(self.model, self._steps.chances(), full_pass=self.full_pass)
        lost = {} if self.threshold is None else cut(self.model, keep, self.optimizer, self.ema)
        self.ledger.epochs.append(cost)
        logger.info(
            "epoch %d: total rank %d, %d parameters; ranks removed: %s",
            self.epoch, sum(cost.ranks.values()), cost.params, lost or "none",
        )  # fmt: skip
        self.epoch += 1
        self._penalty.use = None
        self._steps.new_epoch()
        self._penalty.warn_of_floor(self.threshold, lost)
        return lost

    def _ranks_to_keep(self, last: bool) -> dict[str, int]:
        if self.threshold is not None:
            require_unwrapped(self.model)
        if last and self.steering is not None:
            self.land()
        keep = ranks_above(self.model, self.threshold or 0.0, self.min_rank)
        unmoved = self._still_unmoved()
        keep = {name: max(rank, unmoved.get(name, 0)) for name, rank in keep.items()}
        _require_ranks(keep, self.threshold, self.penalty)
        self._steps.measure(self.ledger)
        return keep if self.steering is None else self.steering.end_epoch(self.model, unmoved)

    def _still_unmoved(self) -> dict[str, int]:
        """Return what no layer is cut below: its ranks that had no chance to move yet.

        Those that were zero in one factor at the start have the first epoch to themselves, and more
        for as long as they are.
        """
        if self._unmoved and self.epoch:
            now = unmoved_ranks(self.model)
            self._unmoved = {n: min(r, now[n]) for n, r in self._unmoved.items() if n in now}
        return self._unmoved

    def land(self) -> None:
        """Fit the budget now, whatever the plan: ranks too many become zero until end_epoch().

        For a loop of your own: some epochs before its end, since from here on the weights heal.
        """
        self._penalty.land()

    def record(self) -> MethodRecord:
        """Say what the model is and would cost now, deployed."""
        deployed, dense_macs = self.ledger.deployed(self.model), self.ledger.dense_macs
        params, macs = deployed.params, deployed.macs
        return MethodRecord(
            params=params,
            macs=macs,
            relative_params=params / self.ledger.dense_params,
            relative_macs=None if macs is None or not dense_macs else macs / dense_macs,
            ranks={name: layer.rank for name, layer in self._layers.items()},
            penalty=self.penalty,
            budget=None if self.steering is None else self.steering.share,
            phase=None if self.steering is None else self.steering.phase,
        )

    def training_cost(self) -> dict[str, float | None]:
        """Return what training has cost so far, relative to training the dense model."""
        kinds = ("relative_params", "relative_macs", "relative_executed_macs")
        return {kind: getattr(self.ledger, kind) for kind in kinds}

    # -- resume --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state as numbers, strings, lists and tensors; save it beside the model's."""
        self._steps.measure(self.ledger)
        return {
            "epoch": self.epoch,
            "penalty": self.penalty,
            "ranks": {name: layer.rank for name, layer in self._layers.items()},
            **self._steps.counts(),
            "sampler": self.sampler.state_dict(),
            "ledger": self.ledger.state_dict(),
            "budget": None if self.steering is None else self.steering.state_dict(),
            "unmoved": dict(self._unmoved),
            "penalty_use": self._penalty.use,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state exactly; load the model's and the optimizer's state first."""
        here = {name: layer.rank for name, layer in self._layers.items()}
        _require_state(state, here, budget=self.steering is not None)
        require_optimizer(self.model, self.optimizer)
        before = self.state_dict()
        try:
            self._restore(state)
        except Exception as error:
            self._restore(before)
            if isinstance(error, MaestroError):
                raise
            raise TrainingError(
                f"this is no state of a LoD ({error!r}). Give what its state_dict() returned."
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.ledger.load_state_dict(state["ledger"])
        if self.steering is not None:
            self.steering.load_state_dict(state["budget"])
        self.epoch = require_whole("epoch", state["epoch"])
        self.penalty = state["penalty"]
        self._steps.load_counts(state)
        # which older states do not have
        unmoved = state.get("unmoved", {})
        self._unmoved = {name: require_whole(name, rank) for name, rank in unmoved.items()}
        if (use := state.get("penalty_use", "applied")) not in (None, "due", "applied"):
            raise ValueError(f"penalty_use is {use!r}")
        self._penalty.use = use


def _require_consistent(
    budget: bool, threshold: float | None, full_pass: bool, distill: bool
) -> None:
    if distill and not full_pass:
        raise OptionError("distill=True needs the full pass as its teacher: full_pass=True.")
    if budget and threshold is None:
        raise OptionError("a budget has to remove ranks: leave threshold=None out.")


def _require_ranks(keep: Mapping[str, int], threshold: float | None, penalty: float) -> None:
    if threshold is not None and not any(keep.values()):
        raise TrainingError(
            f"every rank of every layer is at or below threshold={threshold}: nothing would be "
            f"left. Lower penalty={penalty} or set min_rank=1."
        )


def _require_ranks_to_train(model: nn.Module, min_rank: int) -> dict[str, LowRank]:
    """Return the low-rank layers, or refuse what could not train or shrink any of them."""
    layers = require_low_rank(model)
    if not any(m.rank and (m.u.requires_grad or m.v.requires_grad) for m in layers.values()):
        raise OptionError(
            f"{type(model).__name__} has nothing for LoD to train: every low-rank layer is frozen "
            "or has rank 0. Call requires_grad_(True) on those to train."
        )
    if min_rank > (most := max(layer.rank for layer in layers.values())):
        raise OptionError(
            f"min_rank={min_rank} is above the rank of every layer: none could ever shrink. The "
            f"largest has {most}; give less, or threshold=None not to shrink."
        )
    return layers


def _require_inner_model(model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise LayerError(
            "LoD was given a DistributedDataParallel wrapper. Give it the inner model, "
            "LoD(ddp.module, …), and wrap anew after each end_epoch()."
        )


_STATE = (
    "epoch", "penalty", "ranks", "steps", "forwards", "whole", "sampler", "ledger", "budget",
)  # fmt: skip


def _require_state(state: Any, ranks: dict[str, int], *, budget: bool) -> None:
    """Refuse what is no state of a LoD, or one of other ranks or another choice of λ."""
    given = state if isinstance(state, Mapping) else {}
    if missing := [part for part in _STATE if part not in given]:
        raise TrainingError(
            f"this is no state of a LoD: it has no {listed(missing)}. Give what its "
            "state_dict() returned."
        )
    saved = state["ranks"]
    if not isinstance(saved, Mapping):
        raise TrainingError(f"the ranks of a state are {saved!r:.40}, not a mapping from names.")
    if saved != ranks:
        differing = [name for name in {**ranks, **saved} if ranks.get(name) != saved.get(name)]
        raise TrainingError(
            f"the saved state has other ranks than the model at {listed(differing)}. Load the "
            "model's state_dict, saved at the same moment, before this one."
        )
    if budget != (state["budget"] is not None):
        there, here = ("no", "a") if budget else ("a", "no")
        raise TrainingError(
            f"the saved state has {there} budget, this LoD {here} one. Create it as it was."
        )
