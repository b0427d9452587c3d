"""Shared driver of the trainers' callbacks: creates the method when training starts.

A trainer creates its optimizer late. A callback therefore stores the options of a method until
there is an optimizer, and its saved state until model and optimizer have been restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from maestro_lod.errors import OptionError, TrainingError, listed, suggest
from maestro_lod.layers.ranks import match_ranks, require_low_rank
from maestro_lod.model.inputs import Example
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan, Schedule
from maestro_lod.train.shrink import unwrapped_optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """The options of `LoD`, except those that need two passes."""

    method: type[LoD]
    penalty: float
    threshold: float | None
    seed: int
    sampling: str
    proximal: bool
    min_rank: int
    ema: AveragedModel
    example: Example


class Driver:
    """Runs one method from the events of a trainer."""

    def __init__(self, **options: Unpack[Options]) -> None:
        self._method, self._options = _require_options(options)
        self._lod: LoD | None = None
        self._saved: Mapping[str, Any] | None = None
        self._epoch_open = False

    @property
    def lod(self) -> LoD:
        """The method of the training that has started."""
        if self._lod is None:
            raise TrainingError("the method does not exist before training has started.")
        return self._lod

    @property
    def by_gradients(self) -> bool:
        """Whether the penalty is added to gradients, which must not be scaled then."""
        return isinstance(self.lod, LoD) and self.lod.penalty != 0.0 and not self.lod.proximal

    def add_penalty_gradients(self) -> None:
        """Add the gradients of the penalty, if the method has one; once per optimizer step."""
        if isinstance(self.lod, LoD):
            self.lod.add_penalty_gradients()

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan | None = None) -> None:
        """Create the method, and restore the state that was loaded before, if any."""
        self._lod = None  # the hooks of an earlier method must not run
        require_low_rank(model)
        _require_matching_state(optimizer)
        lod = self._method(model, optimizer, **self._options)
        saved, self._saved, self._epoch_open = self._saved, None, False
        if saved is not None:
            lod.load_state_dict(saved["lod"])
            self._epoch_open = bool(saved["epoch_open"])
        if plan is not None:
            lod.start(lod.model, lod.optimizer, plan)
        self._lod = lod

    @contextmanager
    def step(self) -> Iterator[None]:
        """Activate the sampled ranks inside the `with` block: one forward and backward."""
        with self.lod.step():
            self._epoch_open = True
            yield

    def end_epoch(self, *, last: bool) -> dict[str, float] | None:
        """End the epoch and return its metrics; None if it has ended already."""
        if not self._epoch_open:
            return None
        self._epoch_open = False
        self.lod.end_epoch(last=last)
        return epoch_metrics(self.lod)

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


def epoch_metrics(lod: LoD) -> dict[str, float]:
    """Return the metrics of a finished epoch for a logger: size, cost, λ, and all ranks."""
    record = lod.record()
    numbers: dict[str, float | None] = {
        "total_rank": record.total_rank,
        "params": record.params,
        "relative_params": record.relative_params,
        "relative_macs": record.relative_macs,
        "penalty": record.penalty,
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


def require_single(callbacks: list[Any], kind: type) -> None:
    """Raise OptionError if a trainer has two of these callbacks, which would sample twice."""
    if (count := sum(isinstance(callback, kind) for callback in callbacks)) > 1:
        raise OptionError(f"the trainer has {count} callbacks {kind.__name__}. Add only one.")


def _require_options(
    options: Options,
) -> tuple[type[LoD], dict[str, Any]]:
    """Return the method and its options; raise OptionError if a trainer cannot keep them."""
    method_options: dict[str, Any] = dict(options)
    method = method_options.pop("method", LoD)
    if method is not LoD:
        raise OptionError(f"method={method!r} is not possible in a trainer. Leave it LoD.")
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
