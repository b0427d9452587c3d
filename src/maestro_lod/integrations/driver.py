"""Shared driver of the trainers' callbacks: creates the method when training starts.

A trainer creates its optimizer late. A callback therefore stores the options of a method until
there is an optimizer, and its saved state until model and optimizer have been restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from maestro_lod.errors import OptionError, TrainingError, listed, suggest
from maestro_lod.integrations.trainer_steps import Seen, TrainerSteps
from maestro_lod.layers.ranks import match_ranks, require_low_rank
from maestro_lod.model.inputs import Example
from maestro_lod.sizes.measured_allocation import CostKind
from maestro_lod.sizes.outputs import SoftLoss
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.evaluate import recalibrate
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan, Schedule
from maestro_lod.train.shrink import unwrapped_optimizer
from maestro_lod.train.steps import call_before_steps

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """The method, `LoD` or `Elastic`, and its options except those that need two passes."""

    method: type[LoD] | type[Elastic]
    penalty: float
    threshold: float | None
    seed: int
    sampling: str
    proximal: bool
    min_rank: int
    ema: AveragedModel
    example: Example
    smallest: float
    sizes: Sequence[float | int]
    cost: CostKind
    trained: bool
    soft_loss: SoftLoss


FindSteps = Callable[[SoftLoss | None], TrainerSteps]
"""Returns the steps of a trainer, given the user's soft loss."""


class Driver:
    """Runs one method from the events of a trainer."""

    def __init__(self, **options: Unpack[Options]) -> None:
        self._method, self._options = _require_options(options)
        self._lod: LoD | Elastic | None = None
        self._plan: RunPlan | None = None
        self._steps: TrainerSteps | None = None
        self._saved: Mapping[str, Any] | None = None
        self._epoch_open = False

    @property
    def lod(self) -> LoD | Elastic:
        """The method of the training that has started."""
        if self._lod is None:
            raise TrainingError("the method does not exist before training has started.")
        return self._lod

    @property
    def needs_batches(self) -> bool:
        """Whether the method orders ranks by training batches."""
        return self._method is Elastic

    @property
    def by_gradients(self) -> bool:
        """Whether the penalty is added to gradients, which must not be scaled then."""
        return isinstance(self.lod, LoD) and self.lod.penalty != 0.0 and not self.lod.proximal

    def add_penalty_gradients(self) -> None:
        """Add the gradients of the penalty, if the method has one; once per optimizer step."""
        if isinstance(self.lod, LoD):
            self.lod.add_penalty_gradients()

    def start(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: RunPlan | None = None,
        find_steps: FindSteps | None = None,
    ) -> None:
        """Create the method, and restore the state that was loaded before, if any.

        Args:
            model: The model without wrappers.
            optimizer: The optimizer.
            plan: The length of the training.
            find_steps: Returns the trainer's steps, for methods that need batches.
        """
        self._lod = self._steps = None  # the hooks of an earlier method must not run
        require_low_rank(model)
        _require_matching_state(optimizer)
        options = dict(self._options)
        if self._method is Elastic:
            plan = _require_phases(plan, trained=bool(options.get("trained")))
            soft_loss: SoftLoss | None = options.pop("soft_loss", None)
            assert find_steps is not None
            self._steps = find_steps(soft_loss)
            plan = replace(plan, batches=self._steps, loss=self._steps.loss)
        lod = self._method(model, optimizer, **options)
        saved, self._saved, self._epoch_open = self._saved, None, False
        if saved is not None:
            lod.load_state_dict(saved["lod"])
            self._epoch_open = bool(saved["epoch_open"])
        if plan is not None:
            lod.start(lod.model, lod.optimizer, plan)
        self._lod, self._plan = lod, plan
        if isinstance(lod, Elastic) and plan is not None and plan.schedule is not None:
            call_before_steps(lod.optimizer, self._set_rate)
        self._forget()

    @contextmanager
    def step(self, module: nn.Module | None = None) -> Iterator[Seen]:
        """Activate the ranks of a step inside the `with` block: one forward and backward.

        Args:
            module: The model as the trainer calls it; its outputs are collected for `mixed_loss`.
        """
        with ExitStack() as entered:
            entered.enter_context(self.lod.step())
            self._epoch_open = True
            yield [] if module is None else entered.enter_context(self.watching(module))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[Seen]:
        """Collect outputs of the model and of the teacher inside the `with` block, if needed."""
        if not isinstance(self.lod, Elastic) or self.lod.teacher is None or self._steps is None:
            yield []
            return
        with self._steps.watching(module, self.lod.teacher) as seen:
            yield seen

    def mixed_loss(self, loss: Tensor, seen: Seen, scale: Tensor | float = 1.0) -> Tensor:
        """Return the loss of a step, with the distance of its output to the teacher's.

        Args:
            loss: The loss that the trainer has computed.
            seen: The outputs of the step.
            scale: The factor by which the trainer has multiplied the mean over the batch.
        """
        if not isinstance(self.lod, Elastic) or self.lod.phase == "whole" or self._steps is None:
            return loss
        soft_loss = self._steps.soft_loss(seen)
        return loss if soft_loss is None else self.lod.mixed_loss(loss, soft_loss * scale)

    def _set_rate(self) -> None:
        """Run through the trainer's schedule within the whole phase."""
        lod, plan = self._lod, self._plan
        if not isinstance(lod, Elastic) or lod.phase != "whole" or not lod.whole_epochs:
            return
        assert plan is not None and plan.schedule is not None and lod.epochs is not None
        share = plan.schedule(lod.steps * lod.epochs // lod.whole_epochs)
        for group in lod.optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"]) * share

    def end_epoch(self, *, last: bool) -> dict[str, float] | None:
        """End the epoch and return its metrics; None if it has ended already."""
        if not self._epoch_open:
            return None
        self._epoch_open = False
        self.lod.end_epoch(last=last)
        if isinstance(self.lod, Elastic) and self.lod.teacher is not None:
            assert self._plan is not None and self._plan.batches is not None
            recalibrate(self.lod.model, self._plan.batches)  # which were of many sizes
        self._forget()
        return epoch_metrics(self.lod)

    def _forget(self) -> None:
        if self._steps is not None:
            self._steps.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the trainer's checkpoint; empty before training."""
        if self._lod is None:
            return dict(self._saved or {})
        return {"lod": self._lod.state_dict(), "epoch_open": self._epoch_open}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state now or when training starts; model and optimizer come first."""
        if not state:
            return
        if self._lod is None:
            self._saved = state
        else:
            self._lod.load_state_dict(state["lod"])
            self._epoch_open = bool(state["epoch_open"])


def epoch_metrics(lod: LoD | Elastic) -> dict[str, float]:
    """Return the metrics of a finished epoch for a logger: size, cost, λ, and all ranks."""
    record = lod.record()
    numbers: dict[str, float | None] = {
        "total_rank": record.total_rank,
        "params": record.params,
        "relative_params": record.relative_params,
        "relative_macs": record.relative_macs,
        "penalty": record.penalty,
        "consolidation": float(record.phase == "consolidation")
        if isinstance(lod, Elastic)
        else None,
        **{f"training_{kind}": value for kind, value in lod.training_cost().items()},
        **{f"rank/{name or 'model'}": rank for name, rank in record.ranks.items()},
    }
    return {f"lod/{key}": float(value) for key, value in numbers.items() if value is not None}


def follow_loading(model: nn.Module) -> RemovableHandle:
    """Register a hook that cuts the model to the ranks of every state that is loaded into it.

    Trainers load a checkpoint to resume from, and the best one at the end.

    Args:
        model: A model with low-rank layers.

    Returns:
        The handle that removes the hook.
    """
    handle: RemovableHandle = model.register_load_state_dict_pre_hook(_match)  # type: ignore[no-untyped-call]
    return handle


def _match(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    match_ranks(module, state, prefix)


def read_schedule(scheduler: object) -> Schedule | None:
    """Return a scheduler's share of the learning rate by step; None if that is unknown."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    lambdas = getattr(scheduler, "lr_lambdas", None)
    return lambdas[0] if lambdas else None


def _require_phases(plan: RunPlan | None, *, trained: bool) -> RunPlan:
    """Return the plan; raise OptionError if it is too short for two phases."""
    if plan is None:
        raise OptionError(
            "Elastic needs to know how long training lasts. Give plan=lod.RunPlan(epochs, "
            "steps_per_epoch, batches=loader, loss=loss)."
        )
    if not trained and plan.epochs < 2:
        raise OptionError(
            f"Elastic trains the whole model and then its sizes, but the training has "
            f"{plan.epochs} epoch. Set at least 2 epochs (by epochs, not by steps), or "
            "trained=True for a model that is trained already."
        )
    return plan


def require_single(callbacks: list[Any], kind: type) -> None:
    """Raise OptionError if a trainer has two of these callbacks, which would sample twice."""
    if (count := sum(isinstance(callback, kind) for callback in callbacks)) > 1:
        raise OptionError(f"the trainer has {count} callbacks {kind.__name__}. Add only one.")


def _require_options(
    options: Options,
) -> tuple[type[LoD] | type[Elastic], dict[str, Any]]:
    """Return the method and its options; raise OptionError if a trainer cannot keep them."""
    method_options: dict[str, Any] = dict(options)
    method = method_options.pop("method", LoD)
    if method not in (LoD, Elastic):
        raise OptionError(f"method={method!r} is not a method of trainers. Choose LoD or Elastic.")
    available = [o for o in Options.__annotations__ if o in inspect.signature(method).parameters]
    for option in method_options:
        if option in available:
            continue
        if option in inspect.signature(method).parameters:
            raise OptionError(
                f"{option} needs two passes per step, which a trainer does not do. Use fit, or "
                "your own loop with LoD.backward."
            )
        raise OptionError(
            f"{method.__name__} has no option {option!r}.{suggest(option, available)} Options: "
            f"{listed(available, 12)}."
        )
    return method, method_options


def _require_matching_state(optimizer: Optimizer) -> None:
    """Raise TrainingError if the optimizer's state has other ranks than the model.

    That happens when a trainer has loaded the best checkpoint and trains again.
    """
    optimizer = unwrapped_optimizer(optimizer)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.ndim != parameter.ndim:
                continue
            sizes = zip(value.shape, parameter.shape, strict=True)
            if any(size not in (1, whole) for size, whole in sizes):
                raise TrainingError(
                    f"the optimizer has {key} of shape {tuple(value.shape)} for a parameter of "
                    f"shape {tuple(parameter.shape)}: a state with other ranks was loaded into the "
                    "model. Create a new trainer, or set its optimizer to None."
                )
