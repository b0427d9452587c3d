"""Agreement of the processes that train one model: options, ranks and sampler are compared.

Each process samples ranks with its own generator. The samples are equal as long as seeds, options
and steps are. Otherwise torch would silently average the gradients of different submodels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from maestro_lod.distributed.collectives import (
    Group,
    broadcast_object,
    gather_objects,
    require_agreement,
)
from maestro_lod.distributed.ddp import find_wrappers, is_joining
from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.errors import TrainingError

if TYPE_CHECKING:
    from torch.optim import Optimizer

EVERY = 64
"""Processes are compared every 64 steps, at the first step of an epoch and at its end."""

Facts = Mapping[str, object]
"""Properties of a training that all processes must share; the keys appear in errors."""


class Training(Protocol):
    """The part of a training method that `Agreement` compares and copies between processes."""

    @property
    def optimizer(self) -> Optimizer: ...
    def facts(self) -> Facts:
        """Return what must be the same in all processes that train a model."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Agreement:
    """Compares the facts of all processes that train a model, every few steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.new_epoch()

    def new_epoch(self) -> None:
        """Reset the counts, and look for the wrappers of the model again."""
        self._wrappers: list[DistributedDataParallel] | None = None
        self._steps = 0
        self._joined = False
        self._at_first: Facts | None = None

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        """The wrappers of the model, looked up once per epoch.

        They are referenced until the epoch ends, so that all processes see the same ones.
        """
        if self._wrappers is None:
            self._wrappers = find_wrappers(self._model)
        return self._wrappers

    @property
    def group(self) -> Group | None:
        """The process group that trains this model; None if it has one process."""
        group = self.wrappers[0].process_group if self.wrappers else shard_group(self._model)
        return group if group is not None and group.size() > 1 else None

    def before_step(self, train: Training) -> None:
        """Compare the processes in the first and in every 64th step."""
        if (group := self.group) is None:
            return
        if self._at_first is None:
            self._at_first = train.facts()
        if any(map(is_joining, self.wrappers)):
            self._joined = True  # processes that have stopped would not answer
        elif self._steps % EVERY == 0:
            require_agreement(train.facts(), group)
        self._steps += 1

    def end_epoch(self, train: Training) -> None:
        """Raise TrainingError if the processes differ at the end of an epoch.

        Inside `join()` some processes stop before others. All of them then copy the state of the
        method and the optimizer from the process that stopped last; DDP copies the model.
        """
        if (group := self.group) is None:
            return
        require_agreement(self._at_first or train.facts(), group)
        steps = gather_objects((self._steps, self._joined), group)
        counts = [count for count, _ in steps]
        if min(counts) == max(counts):
            require_agreement(train.facts(), group)
            return
        if not any(joined for _, joined in steps):
            raise TrainingError(
                f"the processes have different numbers of steps in this epoch: {min(counts)} to "
                f"{max(counts)}. Give each process the same number of batches, or train inside "
                "`with ddp.join():`."
            )
        state = (train.optimizer.state_dict(), train.state_dict())
        optimizer_state, train_state = broadcast_object(counts.index(max(counts)), state, group)
        train.optimizer.load_state_dict(optimizer_state)
        train.load_state_dict(train_state)
