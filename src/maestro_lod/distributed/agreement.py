"""That all processes of a training go the same way: compared, not assumed.

Each process draws ranks from a generator of its own. They stay alike as long as seeds, options and
steps are; where they are not, torch itself would average gradients of different submodels, or let
models drift apart, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from maestro_lod.distributed.collectives import (
    Group,
    require_agreement,
    told_by,
    told_by_all,
)
from maestro_lod.distributed.ddp import joining, wrappers_of
from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.errors import TrainingError

if TYPE_CHECKING:
    from torch.optim import Optimizer

EVERY = 64
"""Steps after which processes are compared, beside the first one of an epoch and its end."""

Facts = Mapping[str, object]
"""What a process says of itself, each by what it is called in an error."""


class Training(Protocol):
    """What processes compare of a training, and take over from each other."""

    @property
    def optimizer(self) -> Optimizer: ...
    def facts(self) -> Facts:
        """Say what must be the same in all processes that train a model."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Agreement:
    """Compares what the processes that train a model say of themselves, from time to time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.new_epoch()

    def new_epoch(self) -> None:
        """Begin to count again; the model may be wrapped anew meanwhile."""
        self._wrappers: list[DistributedDataParallel] | None = None
        self._steps = 0
        self._joined = False
        self._at_first: Facts | None = None

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        """The wrappers of the model, as they were when the epoch began.

        They are held until it ends, so that all processes see the same ones.
        """
        if self._wrappers is None:
            self._wrappers = wrappers_of(self._model)
        return self._wrappers

    @property
    def group(self) -> Group | None:
        """The processes that train this model; None if this one is alone."""
        group = self.wrappers[0].process_group if self.wrappers else shard_group(self._model)
        return group if group is not None and group.size() > 1 else None

    def before_step(self, train: Training) -> None:
        """Compare processes if it is time."""
        if (group := self.group) is None:
            return
        if self._at_first is None:
            self._at_first = train.facts()
        if any(map(joining, self.wrappers)):
            self._joined = True  # some may have stopped, and would not answer
        elif self._steps % EVERY == 0:
            require_agreement(train.facts(), group)
        self._steps += 1

    def end_epoch(self, train: Training) -> None:
        """Refuse an epoch in which processes have gone different ways.

        Inside `join()` some stop before others. All then take over what the last one has: the
        model is the same by DDP's own doing, and so become LoD and optimizer.
        """
        if (group := self.group) is None:
            return
        require_agreement(self._at_first or train.facts(), group)
        steps = told_by_all((self._steps, self._joined), group)
        counts = [count for count, _ in steps]
        if min(counts) == max(counts):
            require_agreement(train.facts(), group)
            return
        if not any(joined for _, joined in steps):
            raise TrainingError(
                f"processes have begun {min(counts)} to {max(counts)} steps in this epoch. Give "
                "each as many batches, or train inside `with ddp.join():`."
            )
        state = (train.optimizer.state_dict(), train.state_dict())
        of_optimizer, of_train = told_by(counts.index(max(counts)), state, group)
        train.optimizer.load_state_dict(of_optimizer)
        train.load_state_dict(of_train)
