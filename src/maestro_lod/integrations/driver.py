"""What the callbacks of all trainers share: a LoD that is made when training starts.

A trainer makes its optimizer late and calls back; so a callback holds the options of a LoD until
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
from maestro_lod.train.objective import Strength
from maestro_lod.train.shrink import unwrapped_optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """The options of `LoD` that trainers can keep; those of two passes need a loop of one's own."""

    penalty: Strength
    threshold: float | None
    seed: int
    sampling: str
    proximal: bool
    min_rank: int
    ema: AveragedModel
    example: Example


class Driver:
    """Does what a trainer's events ask for with one LoD, in the order that they come in."""

    def __init__(self, **options: Unpack[Options]) -> None:
        _require_options(options)
        self._options = options
        self._lod: LoD | None = None
        self._saved: Mapping[str, Any] | None = None
        self._epoch_open = False

    @property
    def lod(self) -> LoD:
        """The LoD of the training that has started."""
        if self._lod is None:
            raise TrainingError("there is no LoD before training has started.")
        return self._lod

    @property
    def by_gradients(self) -> bool:
        """Whether the penalty is added to gradients, where their scale matters."""
        return self.lod.penalty != 0.0 and not self.lod.proximal

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan | None = None) -> None:
        """Make the LoD, in the state that was loaded if there is one; training starts after it."""
        self._lod = None  # an earlier one must not act on the optimizer any more
        require_low_rank(model)
        _require_matching_state(optimizer)
        lod = LoD(model, optimizer, **self._options)
        saved, self._saved, self._epoch_open = self._saved, None, False
        if saved is not None:
            lod.load_state_dict(saved["lod"])
            self._epoch_open = bool(saved["epoch_open"])
        if plan is not None:
            lod.start(lod.model, lod.optimizer, plan)
        self._lod = lod

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep drawn ranks active inside the `with` block, which covers forward and backward."""
        with self.lod.step():
            self._epoch_open = True
            yield

    def end_epoch(self, *, last: bool) -> dict[str, float] | None:
        """End the epoch, unless that is done; return what a logger should know of it."""
        if not self._epoch_open:
            return None
        self._epoch_open = False
        self.lod.end_epoch(last=last)
        return numbers_of(self.lod)

    def state_dict(self) -> dict[str, Any]:
        """Return all state, as it belongs into the trainer's checkpoint; empty before training."""
        if self._lod is None:
            return dict(self._saved or {})
        return {"lod": self._lod.state_dict(), "epoch_open": self._epoch_open}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, at once or when training starts; the model's and optimizer's first."""
        if not state:
            return
        if self._lod is None:
            self._saved = state
        else:
            self._lod.load_state_dict(state["lod"])
            self._epoch_open = bool(state["epoch_open"])


def numbers_of(lod: LoD) -> dict[str, float]:
    """Return what a logger should know of a finished epoch: size, cost, λ, and all ranks."""
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
    """Let the model take over the ranks of every state that is loaded into it, without a warning.

    It is a trainer that loads: checkpoints to go on from, and the best one at the end.
    """
    handle: RemovableHandle = model.register_load_state_dict_pre_hook(_match)  # type: ignore[no-untyped-call]
    return handle


def _match(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    match_ranks(module, state, prefix)


def schedule_of(scheduler: object) -> Schedule | None:
    """Return the share of the learning rate at each step, where a scheduler says it in advance."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    lambdas = getattr(scheduler, "lr_lambdas", None)
    return lambdas[0] if lambdas else None


def require_single(callbacks: list[Any], kind: type) -> None:
    """Refuse a trainer that has the callback twice: ranks would be drawn and penalized twice."""
    if (count := sum(isinstance(callback, kind) for callback in callbacks)) > 1:
        raise OptionError(f"the trainer has {count} {kind.__name__}s. Give it one.")


def _require_options(options: Options) -> None:
    known = list(Options.__annotations__)
    for option in options:
        if option in known:
            continue
        if option in inspect.signature(LoD).parameters:
            raise OptionError(
                f"{option} needs two passes per step, which a trainer does not do. Write the loop "
                "with LoD.backward, or use fit."
            )
        raise OptionError(
            f"LoD has no option {option!r}.{suggest(option, known)} Options: {listed(known, 12)}."
        )


def _require_matching_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer that remembers other ranks, as after the best checkpoint was loaded."""
    optimizer = unwrapped_optimizer(optimizer)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.ndim != parameter.ndim:
                continue
            sizes = zip(value.shape, parameter.shape, strict=True)
            if any(size not in (1, whole) for size, whole in sizes):
                raise TrainingError(
                    f"the optimizer remembers {key} of shape {tuple(value.shape)} for a parameter "
                    f"of shape {tuple(parameter.shape)}: a state of other ranks was loaded into "
                    "the model since. Make a new trainer, or set its optimizer to None."
                )
