"""LoD with Accelerate: `AcceleratedLoD` replaces `accumulate` and `backward` of the accelerator.

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

Each block is one step with its own sampled ranks. The penalty is added once per optimizer step, by
the backward that completes the gradients, and therefore before clipping. `Elastic` needs a plan:

    plan = RunPlan(epochs, steps_per_epoch, batches=loader, loss=F.cross_entropy)
    train = AcceleratedLoD(accelerator, model, optimizer, plan, method=Elastic, smallest=0.1)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.integrations.driver import Driver, Options, follow_loading
from maestro_lod.integrations.trainer_steps import FixedBatches, Seen, TrainerSteps
from maestro_lod.layers.ranks import unwrapped
from maestro_lod.model.inputs import ModelInputs, model_device, on_device, split_batch
from maestro_lod.sizes.outputs import SoftLoss
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.evaluate import CrossEntropy
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AcceleratedLoD:
    """Trains a prepared model by LoD or Elastic.

    Its state is part of what `accelerator.save_state` writes. `end_epoch` logs lod/… (ranks, size,
    cost) to the accelerator's trackers.

    Args:
        accelerator: The accelerator that prepared the model.
        model: The prepared model.
        optimizer: The prepared optimizer.
        plan: The epochs and optimizer steps of the training and, for `Elastic`, its data loader and
            loss; without a loss the model's own.
        **options: `method` and its options.

    Raises:
        LayerError: The model has no low-rank layers.
        OptionError: An option is not usable, or the accelerator shards parameters or scales
            gradients.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        plan: RunPlan | None = None,
        **options: Unpack[Options],
    ) -> None:
        require_whole_parameters(accelerator)
        self._accelerator, self._model = accelerator, model
        inner = accelerator.unwrap_model(model)
        _require_single(accelerator, inner)
        self._driver = Driver(**options)
        steps = functools.partial(_steps, accelerator, inner, plan)
        self._driver.start(inner, optimizer, plan, steps)
        require_unscaled(accelerator, self._driver)
        self._step: ExitStack | None = None
        self._seen: Seen = []
        self.steps = 0
        """Optimizer steps so far."""
        follow_loading(inner)
        accelerator.register_for_checkpointing(self)

    @property
    def lod(self) -> LoD | Elastic:
        """The training method."""
        return self._driver.lod

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Do one step inside the `with` block, like `accelerator.accumulate(model)`."""
        with self._accelerator.accumulate(self._model), ExitStack() as step:
            self._seen = step.enter_context(self._driver.step(self._model))
            self._step = step
            try:
                yield
            finally:
                self._step = None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Do the backward of a step, and add the penalty once the gradients are complete.

        Args:
            loss: The loss of the batch.
            **options: Options of `accelerator.backward`.

        Raises:
            TrainingError: It is called twice in a step, or outside of one.
        """
        if self._step is None:
            raise TrainingError(
                "backward(loss) was called twice or outside of a step. Call it once inside each "
                "`with train.accumulate():`, with the sum of the losses."
            )
        self._accelerator.backward(self._driver.mixed_loss(loss, self._seen), **options)
        self._step.close()
        self._step = None
        if self._accelerator.sync_gradients:
            self.steps += 1
            self._driver.add_penalty_gradients()

    def end_epoch(self, *, last: bool = False) -> dict[str, float]:
        """Record the cost of the epoch, remove useless ranks, and log the metrics.

        Args:
            last: Whether this epoch is the last one of the training.

        Returns:
            The metrics by name: lod/params, lod/rank/…, and so on.

        Raises:
            TrainingError: The epoch had no step.
        """
        numbers = self._driver.end_epoch(last=last)
        if numbers is None:
            raise TrainingError("the epoch had no step. Train inside `with train.accumulate():`.")
        if self._accelerator.trackers:
            self._accelerator.log(numbers, step=self.steps)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the accelerator's checkpoint."""
        return self._driver.state_dict() | {"optimizer_steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, after the accelerator has restored model and optimizer."""
        self._driver.load_state_dict(state)
        self.steps = int(state["optimizer_steps"])


def _steps(
    accelerator: Accelerator, model: nn.Module, plan: RunPlan | None, soft_loss: SoftLoss | None
) -> TrainerSteps:
    """Return steps of the loop: the model on a batch of the plan, and the loss of the plan."""
    if plan is None or plan.batches is None:
        raise OptionError(
            "Elastic orders ranks by training batches, and the plan has none. Give "
            "plan=lod.RunPlan(epochs, steps_per_epoch, batches=loader, loss=loss)."
        )
    loss = plan.loss or CrossEntropy()

    def run(model: nn.Module, batch: Any) -> Tensor:
        device = model_device(model)
        inputs, target = split_batch(batch)
        output = ModelInputs.wrap(inputs).to(device).call(model)
        return loss(output, on_device(target, device))

    data = plan.batches
    batches: Any = FixedBatches(data) if isinstance(data, DataLoader) else data
    return TrainerSteps(unwrapped(model), run, batches, soft_loss, precision=accelerator.autocast)


def require_whole_parameters(accelerator: Accelerator) -> None:
    """Raise OptionError for sharded parameters, which Accelerate loads by their old shapes."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise OptionError(
            f"Accelerate's {kind.value} saves and loads shards by shapes that a shrink changes. "
            "Use DDP, which torchrun uses by default, or fully_shard in your own loop or in "
            "Lightning's ModelParallelStrategy."
        )


def require_unscaled(accelerator: Accelerator, driver: Driver) -> None:
    """Raise OptionError if penalty gradients would be added to scaled gradients, as in float16."""
    if accelerator.scaler is not None and driver.by_gradients:
        raise OptionError(
            f"mixed_precision={accelerator.mixed_precision!r} scales gradients until they are "
            "clipped, so that the penalty's cannot be added before. Use proximal=True, or bf16."
        )


def _require_single(accelerator: Accelerator, model: nn.Module) -> None:
    others = [o for o in accelerator._custom_objects if isinstance(o, AcceleratedLoD)]
    if any(other.lod.model is model for other in others):
        raise OptionError(
            "the model already has an AcceleratedLoD: ranks would be sampled twice. Use that one."
        )
