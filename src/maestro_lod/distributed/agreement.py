"""That all processes of a training draw the same ranks: compared, not assumed.

Each process draws from a generator of its own. They stay alike as long as seeds, options and steps
are; where they are not, torch itself would average gradients of different submodels, or let the
models drift apart, without a word.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from maestro_lod.distributed.ddp import joining, wrapper_of
from maestro_lod.distributed.processes import (
    Group,
    has_others,
    require_agreement,
    told_by,
    told_by_all,
)
from maestro_lod.errors import TrainingError

EVERY = 64
"""Steps after which draws are compared, beside the first one of an epoch and its end."""


class Agreement:
    """What this process has drawn in an epoch, compared with the others' from time to time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ddp: DistributedDataParallel | None = None
        self._draws: list[int] = []  # a digest of all draws up to each one, so that any can be compared
        self._joined = False
        self._looked = False

    @property
    def group(self) -> Group:
        """The processes that train this model; None if this one is alone."""
        return None if self._ddp is None else self._ddp.process_group

    def note(self, drawn: Mapping[str, int], options: Callable[[], Mapping[str, object]]) -> None:
        """Remember a draw; compare it if it is time. `options` are compared with the first one."""
        if not self._looked:
            self._look()
        if self._ddp is None:
            return
        before = self._draws[-1] if self._draws else 0
        self._draws.append(zlib.crc32(repr(sorted(drawn.items())).encode(), before))
        if joining(self._ddp):  # some may have stopped, and would not answer
            self._joined = True
        elif len(self._draws) == 1:
            require_agreement({**options(), "the first draw of ranks": dict(drawn)}, self.group)
        elif len(self._draws) % EVERY == 0:
            said = {"the ranks drawn so far": f"{self._draws[-1]:08x} at step {len(self._draws)}"}
            require_agreement(said, self.group)

    def _look(self) -> None:
        self._looked = True
        self._ddp = wrapper_of(self._model) if has_others() else None

    def end_epoch(self, options: Mapping[str, object], method: Any, optimizer: Optimizer) -> None:
        """Refuse an epoch in which processes have gone different ways.

        Inside `join()` some stop before others. All then take over what the last one has: the
        model is the same by DDP's own doing, and so become method and optimizer.
        """
        if self._ddp is None:
            return
        counts = told_by_all((len(self._draws), self._joined), self.group)
        fewest, most = (pick(count for count, _ in counts) for pick in (min, max))
        if fewest != most and not any(joined for _, joined in counts):
            raise TrainingError(
                f"processes have done different numbers of steps in this epoch, {fewest} to {most}."
                " Give each as many batches, or train inside `with ddp.join():`."
            )
        drawn = self._draws[fewest - 1] if fewest else 0
        require_agreement({"the ranks drawn in this epoch": f"{drawn:08x}"}, self.group)
        if fewest != most:
            last = [count for count, _ in counts].index(most)
            state = (optimizer.state_dict(), method.state_dict())
            of_optimizer, of_method = told_by(last, state, self.group)
            optimizer.load_state_dict(of_optimizer)
            method.load_state_dict(of_method)
        else:
            require_agreement(options, self.group)

    def new_epoch(self) -> None:
        """Begin to count again; the model may have been wrapped anew meanwhile."""
        self._draws.clear()
        self._joined = self._looked = False
        self._ddp = None
