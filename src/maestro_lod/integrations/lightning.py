"""A callback for Lightning: `Trainer(callbacks=[LoDCallback(penalty=…)])` trains by LoD.

    model = lod.decompose(MyLightningModule())
    trainer = Trainer(callbacks=[LoDCallback(penalty=1e-4)], …)
    trainer.fit(model, loader)

Optimizer, schedulers, accumulation, clipping and precision are the trainer's. Each batch is one
step at ranks of its own; the penalty is added once per optimizer step, before clipping. Useless
ranks are removed after the last batch of an epoch, so that what is validated is what is saved.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from maestro_lod.errors import OptionError
from maestro_lod.integrations.driver import (
    Driver,
    Options,
    follow_loading,
    require_single,
    schedule_of,
)
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.train.budget import BudgetTraining
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LoDCallback(Callback):
    """Trains a decomposed LightningModule by LoD; takes LoD's options.

    Its state is part of the trainer's checkpoints. The metrics lod/… (ranks, size, cost) go to the
    trainer's loggers and can be monitored.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self._driver = Driver(**options)
        self._step = ExitStack()
        self._following: RemovableHandle | None = None
        self._numbers: dict[str, float] | None = None

    @property
    def lod(self) -> LoD | BudgetTraining:
        """The method of the training that has started."""
        return self._driver.lod

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what could not be trained, before anything is."""
        require_single(trainer.callbacks, LoDCallback)  # type: ignore[attr-defined]
        if stage == "fit":
            require_low_rank(pl_module)
            if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
                raise OptionError(
                    f"{type(trainer.strategy).__name__} flattens parameters, which cannot follow a "
                    "shrink. Use strategy='ddp', or fully_shard in a ModelParallelStrategy."
                )
            if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.ckpt_path:
                raise OptionError(
                    "a ModelParallelStrategy loads shards by the shapes they are made with, not "
                    "those after a shrink. Leave ckpt_path out, and load what lod.save wrote."
                )
            if not pl_module.automatic_optimization:
                raise OptionError(
                    f"{type(pl_module).__name__} has automatic_optimization=False: only it knows "
                    "what a step is. Use LoD itself in its training_step."
                )
        self._following = follow_loading(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was found."""
        if self._following is not None:
            self._following.remove()
            self._following = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the method; weights and optimizer are restored by now, if there was a checkpoint."""
        if len(trainer.optimizers) != 1:
            raise OptionError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers, LoD works "
                "with one. Return one from configure_optimizers, with parameter groups."
            )
        self._step, self._numbers = ExitStack(), None
        self._driver.start(pl_module, trainer.optimizers[0], _plan(trainer))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Draw ranks for forward and backward of the batch."""
        self._step.enter_context(self._driver.step())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make all ranks active again."""
        self._step.close()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the penalty's gradients to what was accumulated; clipping comes after."""
        self._driver.add_penalty_gradients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remove useless ranks after the last batch, before validation and checkpoints."""
        self._step.close()  # of a batch that the module skipped
        if trainer.is_last_batch:
            self._end_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End an epoch that was cut short, and log what is known of it."""
        self._step.close()
        self._end_epoch(trainer)
        if self._numbers is not None:
            pl_module.log_dict(dict[str, Any](self._numbers))
            self._numbers = None

    def _end_epoch(self, trainer: Trainer) -> None:
        last = trainer.current_epoch + 1 == trainer.max_epochs
        last = last or trainer.global_step == trainer.max_steps
        self._numbers = self._driver.end_epoch(last=last) or self._numbers

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Make all ranks active again; the step does not count."""
        self._step.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into the trainer's checkpoint."""
        return self._driver.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for when training starts."""
        self._driver.load_state_dict(state_dict)


def _plan(trainer: Trainer) -> RunPlan:
    """Say how long training lasts, as far as the trainer knows."""
    total, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    known = isinstance(total, int) and total > 0 and epochs is not None and epochs > 0
    configs = trainer.lr_scheduler_configs
    by_step = len(configs) == 1 and configs[0].interval == "step"
    return RunPlan(
        epochs=epochs if epochs is not None and epochs > 0 else 1,
        steps_per_epoch=-(-int(total) // epochs) if known and epochs else None,
        schedule=schedule_of(configs[0].scheduler) if by_step else None,
    )
