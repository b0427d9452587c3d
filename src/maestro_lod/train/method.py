"""The interface between methods of training and `fit`, recipes and resuming.

A method has two parts. Its `Settings` are a frozen dataclass whose fields are keys of a recipe.
They prepare the model and, given the optimizer, create the `Method`. The `Method`, such as `LoD`,
does the steps, ends the epochs, and reports size and cost.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.errors import CheckpointError, OptionError, TrainingError
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Batch, Example, Loss
from maestro_lod.train.progress import MethodRecord

Schedule = Callable[[int], float]
"""Returns the share of the initial learning rate at an optimizer step."""


@dataclass(frozen=True)
class RunPlan:
    """The length of a training, its schedule, and its loss on fixed samples."""

    epochs: int
    steps_per_epoch: int | None
    """Optimizer steps; None for data without a length."""
    schedule: Schedule | None = None
    loss_of: Callable[[nn.Module], float] | None = dataclasses.field(default=None, compare=False)
    """Returns the loss of a model on a fixed set of training samples."""
    batches: Iterable[Batch] | None = dataclasses.field(default=None, compare=False)
    """The training batches, to be iterated again."""
    loss: Loss | None = dataclasses.field(default=None, compare=False)
    """The loss of an output and a target."""


class Method(Protocol):
    """The training of one model by one optimizer."""

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        """Start a run, or resume it after a state was loaded."""

    def backward(
        self,
        forward: Callable[..., Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> object:
        """Do the passes over one batch, with gradients multiplied by `weight`.

        `forward()` runs the model that is trained, `forward(other)` another one on the same batch.

        It calls `loss` at least once, with an output; the last value is reported.
        `soft_loss(output, teacher)`, if given, compares two outputs.
        """

    def end_epoch(self, *, last: bool) -> object:
        """End an epoch; parameters may be replaced in the model and in the optimizer."""

    def record(self) -> MethodRecord:
        """Return the size and cost of the model for the record of the finished epoch."""

    def training_cost(self) -> dict[str, float | None] | None:
        """Return the cost of training relative to dense, by kind; None if it was not counted."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state as numbers, strings, lists, mappings and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, after those of model and optimizer."""


@runtime_checkable
class Reshaping(Protocol):
    """A method that replaces layers while it trains, so that a resumed run must do so too."""

    def reshape(self, state: dict[str, Any]) -> None:
        """Replace layers as they were replaced when the state was saved.

        It is called before all states are loaded: only shapes and their order have to be equal.
        """


@runtime_checkable
class Extending(Protocol):
    """A method that adds epochs of its own to those that a user asks for."""

    def total_epochs(self, epochs: int) -> int:
        """Return how many epochs the run has in all."""


def total_epochs(method: Method | None, epochs: int) -> int:
    """Return the epochs of a run: those that a user asks for, and those that its method adds."""
    return method.total_epochs(epochs) if isinstance(method, Extending) else epochs


def require_saved_by(kind: str, state: Any) -> None:
    """Raise TrainingError for a state that another method has saved, by its content."""
    entries = state if isinstance(state, Mapping) else {}
    sampler = entries.get("sampler")
    if "rungs" in entries:
        saved_by = "Elastic"
    elif entries.get("budget") is not None:
        saved_by = "BudgetTraining"
    elif isinstance(sampler, Mapping):
        saved_by = "ElasticTraining" if sampler.get("strategy") == "elastic" else "LoD"
    else:
        return  # what is missing is an error of its own
    if saved_by in ("BudgetTraining", "ElasticTraining"):
        raise CheckpointError(
            f"the state was saved by {saved_by}, which Elastic has replaced: the training cannot "
            "be resumed. Finish it with the version that began it, or train again."
        )
    if saved_by != kind:
        raise TrainingError(
            f"the state was saved by {saved_by}, but this is {kind}. Create {saved_by} with the "
            "same options."
        )


class Builder(Protocol):
    """Builds the dense model of a run, each time with the same initial weights."""

    @property
    def width(self) -> int | None:
        """The width of the model; None if it cannot be built with another one."""

    def __call__(self, width: int | None = None) -> nn.Module:
        """Return a new model, with another width if one is given."""


class Settings(ABC):
    """Options of a method in recipes: a frozen dataclass of `setting`s that creates it."""

    alternatives: ClassVar[tuple[str, ...]] = ()
    """Settings of which only one is used: a later one replaces the others."""
    least_epochs: ClassVar[int] = 1
    """The smallest number of epochs that the method needs."""

    def epochs_within(self, total: int) -> int:
        """Return the epochs to ask for, so that with those that the method adds a run has `total`.

        Args:
            total: The epochs of the run in all.
        """
        return total

    @classmethod
    def at_size(cls, size: float) -> dict[str, Any]:
        """Return the settings for a model with this share of the dense parameters."""
        raise OptionError("this method chooses the size itself. Leave the size out.")

    def build(self, builder: Builder, example: Example) -> nn.Module:
        """Return the model to train: a built one, after `prepare`."""
        return self.prepare(builder())

    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepare the model for this method; it may return a new module.

        Called before the optimizer is created.
        """
        return model

    def require_optimizer(self, kind: type[Optimizer]) -> None:
        """Raise OptionError for an optimizer that the method cannot use; by default for none."""
        return

    def reshape(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Give a built model the shapes of a saved one, if the method makes layers narrower."""
        return

    @abstractmethod
    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Method:
        """Return the method for a prepared model.

        Args:
            model: The prepared model.
            optimizer: The optimizer of the run.
            example: An input of the model.
            seed: Seed of sampled ranks.
            dense: The cost of the dense model, which relative costs refer to.
        """


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    choices: Iterable[str] | None = None,
    check: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the dataclass field of one setting.

    Args:
        default: The default value.
        meaning: The description in the reference of recipes.
        least: The smallest value.
        choices: The allowed values.
        check: Returns the value to use, or raises ValueError.
    """
    metadata = {"meaning": meaning, "least": least, "choices": choices, "check": check}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: [*default], metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
