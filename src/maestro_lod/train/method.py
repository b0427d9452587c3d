"""The interface between methods of training and `fit`, recipes and resuming.

A method is two things. Its `Settings` are what a user chooses: a frozen dataclass whose fields are
keys of a recipe; it prepares the model and, once there is an optimizer, makes the `Method`, which
does the steps, ends the epochs, and says what it is about. A `LoD` is a `Method`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Batch, Example, Loss
from maestro_lod.train.progress import MethodRecord

Schedule = Callable[[int], float]
"""The share of its initial learning rate that each parameter group has at optimizer step s."""


@dataclass(frozen=True)
class RunPlan:
    """How long a training will last."""

    epochs: int
    steps_per_epoch: int | None
    """Optimizer steps; None where nobody knows, as for data without a length."""
    schedule: Schedule | None = None
    loss_of: Callable[[nn.Module], float] | None = dataclasses.field(default=None, compare=False)
    """The loss of a model on some training samples, the same ones each time."""
    batches: Iterable[Batch] | None = dataclasses.field(default=None, compare=False)
    """The training batches, to be iterated again."""
    loss: Loss | None = dataclasses.field(default=None, compare=False)
    """The loss of an output and a target."""


class Method(Protocol):
    """One training of one model by one optimizer."""

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        """Begin the run, or go on with it if a state was loaded."""

    def backward(
        self,
        forward: Callable[..., Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> object:
        """Do the passes over one batch, its gradients multiplied by `weight`.

        `forward()` runs the model that is trained, `forward(other)` another one on the same batch.

        `loss` is to be asked for the loss of an output at least once: what it says last is shown.
        `soft_loss(output, teacher)`, where there is one, compares two outputs.
        """

    def end_epoch(self, *, last: bool) -> object:
        """Do what ends an epoch; parameters may be replaced, in the optimizer too."""

    def record(self) -> MethodRecord:
        """Say what the model is and costs now, for the record of the epoch that has ended."""

    def training_cost(self) -> dict[str, float | None] | None:
        """Return what training has cost relative to dense, by kind; None where nobody counted."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state as numbers, strings, lists, mappings and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; those of model and optimizer are restored already."""


@runtime_checkable
class Reshaping(Protocol):
    """A method that exchanges layers while it trains, so that a resumed run has to do it again."""

    def reshape(self, state: dict[str, Any]) -> None:
        """Give model and optimizer the parameters that they had when the state was taken.

        Comes before all states are loaded: only shapes, and their order, have to be right.
        """


@runtime_checkable
class Extending(Protocol):
    """A method that adds epochs of its own to those that a user asks for."""

    def total_epochs(self, epochs: int) -> int:
        """Return how many epochs the run has in all."""


def total_epochs(method: Method | None, epochs: int) -> int:
    """Return the epochs of a run: those that a user asks for, and those that its method adds."""
    return method.total_epochs(epochs) if isinstance(method, Extending) else epochs


class Builder(Protocol):
    """Builds the dense model of a run, each time with the same initial weights."""

    @property
    def width(self) -> int | None:
        """The width that the model has; None if it cannot be built with another one."""

    def __call__(self, width: int | None = None) -> nn.Module:
        """Return a new model, of another width if one is given."""


class Settings(ABC):
    """What a user chooses of a method: a frozen dataclass, made of `setting`s, that makes it."""

    alternatives: ClassVar[tuple[str, ...]] = ()
    """Settings of which one is chosen: what is asked for later takes the place of the others."""
    least_epochs: ClassVar[int] = 1
    """Epochs that its stages need."""

    @classmethod
    def at_size(cls, size: float) -> dict[str, Any]:
        """Return the settings that make a model of this share of the dense parameters."""
        raise OptionError("the method finds its size itself. Leave the size out.")

    def build(self, builder: Builder, example: Example) -> nn.Module:
        """Return the model to train; what needs no other width is done by `prepare`."""
        return self.prepare(builder())

    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepare the model for this method; it may return a new module.

        Called before the optimizer is created.
        """
        return model

    def require_optimizer(self, kind: type[Optimizer]) -> None:
        """Refuse a kind of optimizer that the method cannot work with; by default none."""
        return

    def reshape(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Give a built model the shapes of a saved one; for those that make layers narrower."""
        return

    @abstractmethod
    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Method:
        """Return the method for a prepared model; `example` is an input of it.

        `dense` is what the dense model costs: all that is relative is relative to that.
        """


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    choices: Iterable[str] | None = None,
    check: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the dataclass field of one setting; `check` returns a value or raises ValueError."""
    metadata = {"meaning": meaning, "least": least, "choices": choices, "check": check}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: [*default], metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
