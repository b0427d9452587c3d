"""Base class of the methods that train low-rank layers.

A method decides which ranks a step trains and which ranks remain after an epoch. The base class
checks model and optimizer, runs and counts the steps, records their cost, removes ranks from layers
and optimizer state, compares the processes of a distributed training, and saves state.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

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
    require_whole,
)
from maestro_lod.layers.ranks import ranks, require_all_active, unwrapped
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Example
from maestro_lod.train.diagnostics import (
    require_finite_parameters,
    require_ranks_to_train,
    require_trainable,
)
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.method import RunPlan
from maestro_lod.train.progress import MethodRecord
from maestro_lod.train.shrink import (
    cut,
    require_averaged,
    require_optimizer,
    unwrapped_optimizer,
)
from maestro_lod.train.steps import Draw, Steps, backward_pass
from maestro_lod.train.unfactored import Unfactored

logger = logging.getLogger(__name__)

WARMUP = 0.3
"""The share of a run that trains the whole model first, by default.

Better on held-out data than 0, 0.1 and 0.5.
"""


class RankTraining(ABC):
    """Base of the methods that train the ranks of a decomposed model.

    Args:
        model: A model with low-rank layers, wrapped or not.
        optimizer: One optimizer that holds all trainable factors.
        min_rank: The smallest rank of a layer.
        ema: An averaged copy of the model, which is cut to the same ranks.
        example: An input of the model, on which MACs are counted. Without it the first input of
            the training is used, unless the model is compiled or sharded.

    Raises:
        LayerError: The model has no low-rank layers, or parameters that cannot be trained.
        OptionError: An option is invalid, or no layer could lose a rank.
        TrainingError: The optimizer does not hold the factors, or does not support a shrink.
    """

    name: ClassVar[str]
    """The name of the method in errors, also for its subclasses."""
    required_state: ClassVar[tuple[str, ...]] = (
        *("epoch", "ranks", "steps", "forwards", "whole", "ledger"),
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        min_rank: int,
        ema: AveragedModel | None,
        example: Example | None,
    ) -> None:
        self.model = unwrapped(model)
        self.optimizer = unwrapped_optimizer(optimizer)
        require_all_active(self.model, "training")
        adopt_shards(self.model)
        self.min_rank = require_whole("min_rank", min_rank)
        require_optimizer(self.model, self.optimizer)
        require_trainable(self.model)
        self._layers = require_ranks_to_train(self.model, self.min_rank, self.name)
        self.ema = None if ema is None else require_averaged(ema)
        self.ledger = Ledger.open_for(self.model, example)
        self.epoch = 0
        """The number of finished epochs."""
        self._epochs: int | None = None  # planned, if `start` was called
        self._agreement = Agreement(self.model)

    def _begin(self, *, record_example: bool) -> None:
        """Register the hooks on model and optimizer, after all options were checked."""
        self._unfactored = Unfactored(self.model, self.optimizer, self.ema)
        self._steps = Steps(self.model, self.optimizer, record_example=record_example)

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
                f"{self.name} was created for another model or optimizer than fit has. Give both "
                "the same."
            )
        self._epochs = plan.epochs

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

    @abstractmethod
    def _prepare_step(self, passes: int) -> Draw | None:
        """Return the function that samples the next step's ranks; None to train the whole model."""

    def _compare_processes(self, *, unfactored: bool) -> None:
        """Compare the processes every few steps; with `unfactored`, train dense weights."""
        self._agreement.before_step(self)
        if unfactored:
            self._unfactored.begin()

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

    def backward(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Tensor:
        """Do all passes of one step, gradients included.

        >>> train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))

        Args:
            forward: Returns an output of the model.
            loss: Returns the loss of an output.
            weight: Scales all losses: 1/k where the gradients of k batches are accumulated.
            soft_loss: Compares an output with that of a teacher, `soft_loss(output, teacher)`,
                in methods that have a teacher.

        Returns:
            The sum of the weighted losses, detached.

        Raises:
            OptionError: The loss is not one number that gradients can come from.
            TrainingError: The loss is NaN or infinite; weights are as before the step.
        """
        with peer_failure_context():
            draw = self._prepare_step(passes=2)
            with self._steps.one(draw):
                return backward_pass(forward, loss, weight)

    # -- one epoch -----------------------------------------------------------------------------

    @abstractmethod
    def _ranks_to_keep(self, *, last: bool) -> dict[str, int] | None:
        """Return the rank that each layer keeps after this epoch; None if nothing is removed."""

    def _chances(self) -> dict[str, list[float]]:
        """Return the probability of each layer to be at rank 1, 2, … in a step; here the last."""
        live = self._steps.live_ranks()
        return self._steps.chances({name: [0.0] * rank for name, rank in live.items()})

    @property
    def _full_passes(self) -> float:
        """Passes at full rank per step, in addition to the one at the step's ranks."""
        return 0.0

    def _after_epoch(self, lost: Mapping[str, int]) -> None:
        """Prepare the next epoch; by default do nothing."""
        return

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
        keep = self._ranks_to_keep(last=last)
        self._steps.measure(self.ledger)
        cost = self.ledger.epoch_cost(self.model, self._chances(), full_pass=self._full_passes)
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
        self._after_epoch(lost)
        self._agreement.new_epoch()
        return lost

    # -- reports and state ---------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """Return what must be the same in all processes that train the model."""
        return {
            "the ranks of the model": ranks(self.model),
            f"the options of {self.name}": self._options(),
        }

    @abstractmethod
    def _options(self) -> str:
        """Return the options of the method as text."""

    def record(self) -> MethodRecord:
        """Return the ranks of the model, and its deployed size."""
        return MethodRecord(
            **self.ledger.sizes(self.model),
            ranks={name: layer.rank for name, layer in self._layers.items()},
        )

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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state exactly; load the states of model and optimizer first.

        Args:
            state: A state from `state_dict()` of the same method, also of older versions.

        Raises:
            TrainingError: It is not a state of this method, or has other ranks than the model.
                Nothing has changed then.
        """
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
                f"this is not a state of {self.name} ({error!r}). Give one from its state_dict()."
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self.epoch = require_whole("epoch", state["epoch"])
        self._steps.load_counts(state)
        self._unfactored.hold(state.get("unfactored", ()))  # older states do not have it
        for wrapper in find_wrappers(self.model):
            renew(wrapper)  # its buckets may have other ranks than the loaded model

    def _require_state(self, state: Any) -> None:
        """Raise TrainingError if it is not a state of this method at the model's ranks."""
        kind = self.name
        entries = state if isinstance(state, Mapping) else {}
        if entries and (saved_by := _saving_method(entries)) not in (None, kind):
            raise TrainingError(
                f"the state was saved by {saved_by}, but this is a {kind}. Create a {saved_by} "
                "with the same options."
            )
        if missing := [part for part in self.required_state if part not in entries]:
            raise TrainingError(
                f"this is not a state of {kind}: it has no {listed(missing)}. Give one from its "
                "state_dict()."
            )
        current = {name: layer.rank for name, layer in self._layers.items()}
        saved = state["ranks"]
        if not isinstance(saved, Mapping):
            raise TrainingError(
                f"the ranks of a state are {saved!r:.40}, not a mapping of names. Give one from "
                f"{kind}.state_dict()."
            )
        if saved != current:
            differing = [
                name for name in {**current, **saved} if current.get(name) != saved.get(name)
            ]
            raise TrainingError(
                f"the saved state has other ranks than the model: {listed(differing)}. Load the "
                "model's state_dict of the same moment before this one."
            )


def _saving_method(state: Mapping[str, Any]) -> str | None:
    """Return the name of the class that saved a state, by its content; None if unknown."""
    sampler = state.get("sampler")
    if state.get("budget") is not None:
        return "BudgetTraining"
    if not isinstance(sampler, Mapping):
        return None
    return "ElasticTraining" if sampler.get("strategy") == "elastic" else "LoD"
