"""LoD in a loop that Accelerate runs: one object that takes the place of two of its calls.

    model, optimizer, loader = accelerator.prepare(lod.decompose(model), optimizer, loader)
    train = AcceleratedLoD(accelerator, model, optimizer, penalty=1e-4)
    for epoch in range(epochs):
        for x, y in loader:
            with train.accumulate():                    # accelerator.accumulate(model)
                train.backward(F.cross_entropy(model(x), y))  # accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        train.end_epoch()

Each block is one step at ranks of its own; the penalty is added once per optimizer step, by the
backward that completes the gradients, so that clipping comes after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.integrations.driver import Driver, Options, follow_loading
from maestro_lod.train.budget import BudgetTraining
from maestro_lod.train.lod import LoD

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AcceleratedLoD:
    """Trains a prepared model by LoD; takes what `accelerator.prepare` returned and LoD's options.

    Its state is part of what `accelerator.save_state` writes. `end_epoch` logs lod/… (ranks, size,
    cost) to the accelerator's trackers.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        **options: Unpack[Options],
    ) -> None:
        require_whole_parameters(accelerator)
        self._accelerator, self._model = accelerator, model
        inner = accelerator.unwrap_model(model)
        _require_alone(accelerator, inner)
        self._driver = Driver(**options)
        self._driver.start(inner, optimizer)
        require_unscaled(accelerator, self._driver)
        self._step: ExitStack | None = None
        self.steps = 0
        """Optimizer steps so far."""
        follow_loading(inner)
        accelerator.register_for_checkpointing(self)

    @property
    def lod(self) -> LoD | BudgetTraining:
        """The method that does the work."""
        return self._driver.lod

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Do one step inside the `with` block, as `accelerator.accumulate(model)` does."""
        with self._accelerator.accumulate(self._model), ExitStack() as step:
            step.enter_context(self._driver.step())
            self._step = step
            try:
                yield
            finally:
                self._step = None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Do the backward of a step, and add the penalty's gradients if it completes them."""
        if self._step is None:
            raise TrainingError(
                "backward(loss) comes once per `with train.accumulate():`, inside it. Add losses "
                "up to one."
            )
        self._accelerator.backward(loss, **options)
        self._step.close()
        self._step = None
        if self._accelerator.sync_gradients:
            self.steps += 1
            self._driver.add_penalty_gradients()

    def end_epoch(self, *, last: bool = False) -> dict[str, float]:
        """Book the epoch, remove useless ranks, log what is known and return it."""
        numbers = self._driver.end_epoch(last=last)
        if numbers is None:
            raise TrainingError(
                "no step was done in this epoch: train inside `with train.accumulate():`."
            )
        if self._accelerator.trackers:
            self._accelerator.log(numbers, step=self.steps)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into the accelerator's checkpoint."""
        return self._driver.state_dict() | {"optimizer_steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the accelerator has restored model and optimizer before."""
        self._driver.load_state_dict(state)
        self.steps = int(state["optimizer_steps"])


def require_whole_parameters(accelerator: Accelerator) -> None:
    """Refuse parameters in parts, which Accelerate saves and loads by the shapes they had."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise OptionError(
            f"{kind.value} by Accelerate saves and loads parts of parameters by shapes that a "
            "shrink changes. Use DDP, which torchrun gives without its options, or fully_shard in "
            "a loop of your own or in Lightning's ModelParallelStrategy."
        )


def require_unscaled(accelerator: Accelerator, driver: Driver) -> None:
    """Refuse to add a penalty's gradients to gradients that are scaled, as those of float16 are."""
    if accelerator.scaler is not None and driver.by_gradients:
        raise OptionError(
            f"mixed_precision={accelerator.mixed_precision!r} scales gradients until they are "
            "clipped, too late for the penalty's. Use proximal=True, or bf16."
        )


def _require_alone(accelerator: Accelerator, model: nn.Module) -> None:
    others = [o for o in accelerator._custom_objects if isinstance(o, AcceleratedLoD)]
    if any(other.lod.model is model for other in others):
        raise OptionError("the model has an AcceleratedLoD already: ranks would be drawn twice.")
