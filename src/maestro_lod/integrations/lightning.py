"""Callback for Lightning: `Trainer(callbacks=[LoDCallback(…)])` trains by LoD or Elastic.

    model = lod.decompose(MyLightningModule())
    trainer = Trainer(callbacks=[LoDCallback(penalty=1e-4)], …)
    trainer.fit(model, loader)

Optimizer, schedulers, accumulation, clipping and precision are the trainer's. Each batch is one
step with its own sampled ranks. The penalty is added once per optimizer step, before clipping.
Useless ranks are removed after the last batch of an epoch, before validation and checkpoints.
`Elastic` compares the output of a size with the whole model's: `training_step` is wrapped while the
model is trained.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from maestro_lod.errors import OptionError
from maestro_lod.integrations.driver import (
    Driver,
    Options,
    follow_loading,
    read_schedule,
    require_single,
)
from maestro_lod.integrations.trainer_steps import FixedBatches, TrainerSteps
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.sizes.outputs import SoftLoss
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LoDCallback(Callback):
    """Trains a decomposed LightningModule by LoD or Elastic.

    Its state is part of the trainer's checkpoints. The metrics lod/… (ranks, size, cost) are logged
    and can be monitored.

    Args:
        **options: `method` and its options.

    Raises:
        OptionError: An option is not usable.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self._driver = Driver(**options)
        self._step = ExitStack()
        self._following: RemovableHandle | None = None
        self._unwrap = ExitStack()
        self._numbers: dict[str, float] | None = None

    @property
    def lod(self) -> LoD | Elastic:
        """The method of the training that has started."""
        return self._driver.lod

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check trainer and module, before anything is trained."""
        require_single(trainer.callbacks, LoDCallback)  # type: ignore[attr-defined]
        if stage == "fit":
            require_low_rank(pl_module)
            if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
                raise OptionError(
                    f"{type(trainer.strategy).__name__} flattens parameters, which cannot be "
                    "shrunk. Use strategy='ddp', or fully_shard in a ModelParallelStrategy."
                )
            if isinstance(trainer.strategy, ModelParallelStrategy) and self._driver.needs_batches:
                raise OptionError(
                    "Elastic runs training_step on copies of the module, which a "
                    "ModelParallelStrategy does not allow. Use strategy='ddp', or Elastic in a "
                    "loop of your own with fully_shard."
                )
            if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.ckpt_path:
                raise OptionError(
                    "a ModelParallelStrategy cannot load shards with the shapes after a shrink. "
                    "Leave ckpt_path out, and load a file of lod.save."
                )
            if not pl_module.automatic_optimization:
                raise OptionError(
                    f"{type(pl_module).__name__} has automatic_optimization=False, so that the "
                    "callback cannot find its steps. Use LoD itself in its training_step."
                )
        self._following = follow_loading(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hook from the module."""
        if self._following is not None:
            self._following.remove()
            self._following = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the method, after weights and optimizer were restored from any checkpoint."""
        if len(trainer.optimizers) != 1:
            raise OptionError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers, but LoD "
                "needs one. Return one with parameter groups from configure_optimizers."
            )
        if self._driver.needs_batches and getattr(pl_module, "_compiler_ctx", None) is not None:
            raise OptionError(
                f"Elastic runs training_step on copies of {type(pl_module).__name__}, which is "
                "compiled as a whole. Compile a part of it: module.net = torch.compile(module.net)."
            )
        self._step, self._numbers = ExitStack(), None
        steps = functools.partial(_steps, trainer, pl_module)
        self._driver.start(pl_module, trainer.optimizers[0], _plan(trainer), steps)
        self._unwrap.close()
        if self._driver.needs_batches:
            self._wrap(pl_module)

    def _wrap(self, pl_module: LightningModule) -> None:
        """Let `training_step` return the loss of the method."""
        step: Any = pl_module.training_step

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self._driver.watching(pl_module) as seen:
                outputs = step(*args, **kwargs)
                if isinstance(outputs, Tensor):
                    return self._driver.mixed_loss(outputs, seen)
                if isinstance(outputs, dict) and outputs.get("loss") is not None:
                    return {**outputs, "loss": self._driver.mixed_loss(outputs["loss"], seen)}
                return outputs

        own = vars(pl_module).get("training_step")  # usually that of its class
        vars(pl_module)["training_step"] = training_step
        if own is None:
            self._unwrap.callback(vars(pl_module).pop, "training_step", None)
        else:
            self._unwrap.callback(vars(pl_module).update, training_step=own)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Activate the sampled ranks for forward and backward of the batch."""
        self._step.enter_context(self._driver.step())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make all ranks active again."""
        self._step.close()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the penalty's gradients to the accumulated ones, before clipping."""
        self._driver.add_penalty_gradients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the epoch after its last batch, before validation and checkpoints."""
        self._step.close()  # in case the module skipped the batch
        if trainer.is_last_batch:
            self._end_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End an epoch that was stopped early, and log the metrics."""
        self._step.close()
        self._end_epoch(trainer)
        if self._numbers is not None:
            pl_module.log_dict(dict[str, Any](self._numbers))
            self._numbers = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the module's `training_step`."""
        self._unwrap.close()

    def _end_epoch(self, trainer: Trainer) -> None:
        last = trainer.current_epoch + 1 == trainer.max_epochs
        last = last or trainer.global_step == trainer.max_steps
        self._numbers = self._driver.end_epoch(last=last) or self._numbers

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Make all ranks active again; the step does not count."""
        self._unwrap.close()
        self._step.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the trainer's checkpoint."""
        return self._driver.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state of a checkpoint until training starts."""
        self._driver.load_state_dict(state_dict)


def _steps(
    trainer: Trainer, pl_module: LightningModule, soft_loss: SoftLoss | None
) -> TrainerSteps:
    """Return the steps of a trainer, as Lightning runs them."""
    step, data = type(pl_module).training_step, trainer.train_dataloader

    def run(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, LightningModule)
        for module in model.modules():
            if isinstance(module, LightningModule):
                module.trainer = trainer
                vars(module).update(log=_ignore, log_dict=_ignore)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = model._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        numbered = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        outputs: Any = step(model, batch, *([0] if numbered else []))
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            raise OptionError(
                f"{type(pl_module).__name__}.training_step returned {loss!r:.60} for a batch, so "
                "that ranks cannot be put into order. Return a loss for every batch."
            )
        return loss

    precision = trainer.precision_plugin.train_step_context
    return TrainerSteps(
        pl_module, run, FixedBatches(data), soft_loss, isolated=True, precision=precision
    )


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""


def _plan(trainer: Trainer) -> RunPlan:
    """Return the length of the training, as far as the trainer knows it."""
    total, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    is_known = isinstance(total, int) and total > 0 and epochs is not None and epochs > 0
    configs = trainer.lr_scheduler_configs
    by_step = len(configs) == 1 and configs[0].interval == "step"
    return RunPlan(
        epochs=epochs if epochs is not None and epochs > 0 else 1,
        steps_per_epoch=-(-int(total) // epochs) if is_known and epochs else None,
        schedule=read_schedule(configs[0].scheduler) if by_step else None,
    )
