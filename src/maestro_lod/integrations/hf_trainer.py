"""Callback for the Hugging Face Trainer and its subclasses.

    trainer = Trainer(lod.decompose(model), arguments, train_dataset=data)
    trainer.add_callback(LoDTrainerCallback(trainer, penalty=1e-5, proximal=True))
    trainer.train()

Optimizer, scheduler, accumulation, clipping and precision are the trainer's. Each batch is one step
with its own sampled ranks. The penalty is added once per optimizer step, before clipping; the
Trainer has no event there, so that the callback wraps `trainer.training_step`. For `Elastic`, which
compares outputs with the whole model's, it wraps `trainer.compute_loss` too.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import safetensors.torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.integrations.accelerate import require_unscaled, require_whole_parameters
from maestro_lod.integrations.driver import (
    Driver,
    Options,
    follow_loading,
    read_schedule,
    require_single,
)
from maestro_lod.integrations.trainer_steps import FixedBatches, Seen, TrainerSteps
from maestro_lod.layers.ranks import require_low_rank, unwrapped
from maestro_lod.sizes.outputs import SoftLoss
from maestro_lod.train.elastic import Elastic
from maestro_lod.train.evaluate import IGNORED
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KEY = "maestro_lod"  # of this callback's state in trainer_state.json


class LoDTrainerCallback(TrainerCallback):
    """Trains the decomposed model of a Trainer by LoD or Elastic.

    Its state is part of the trainer's checkpoints. The metrics lod/… (ranks, size, cost) of each
    epoch are reported by `trainer.log`.

    Args:
        trainer: The trainer, whose model is low-rank.
        **options: `method` and its options.

    Raises:
        LayerError: The model has no low-rank layers.
        OptionError: An option is not usable, or the trainer shards parameters.
    """

    def __init__(self, trainer: Trainer, **options: Unpack[Options]) -> None:
        if not isinstance(trainer, Trainer):
            raise OptionError(
                f"LoDTrainerCallback needs a Trainer, not a {type(trainer).__name__}. Create the "
                "trainer first, then call trainer.add_callback(LoDTrainerCallback(trainer, …))."
            )
        require_whole_parameters(trainer.accelerator)
        self._driver = Driver(**options)
        self._untouched: Callable[..., Tensor] | None = None
        self._compute_loss: Callable[..., Any] | None = None
        self._seen: Seen | None = None  # in a step
        self._trainer = cast("Any", trainer)  # the types of its attributes include None
        require_low_rank(self._trainer.model)
        follow_loading(self._trainer.model)

    @property
    def lod(self) -> LoD | Elastic:
        """The method of the training that has started."""
        return self._driver.lod

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Create the method, after weights and optimizer were restored from any checkpoint."""
        trainer = self._trainer
        require_single(trainer.callback_handler.callbacks, LoDTrainerCallback)
        states: Any = state.stateful_callbacks  # a dict once the state is made
        saved = states.get(_KEY) if state.global_step else None
        if state.global_step and not saved:
            raise TrainingError(
                f"the checkpoint to resume from at step {state.global_step} has no state of "
                "LoDTrainerCallback. Load its model, and train without resume_from_checkpoint."
            )
        self._driver.load_state_dict(_with_tensors(saved or {}))
        self._restore()  # after an error in an earlier training
        self._driver.start(
            trainer.model,
            trainer.optimizer,
            _plan(state, trainer.lr_scheduler),
            functools.partial(_steps, trainer, given.get("train_dataloader")),
        )
        require_unscaled(trainer.accelerator, self._driver)
        states[_KEY] = _WhenWritten(self._driver.state_dict)
        self._untouched, self._compute_loss = trainer.training_step, trainer.compute_loss
        trainer.training_step = self._training_step
        if self._driver.needs_batches:
            trainer.compute_loss = self._mixed_loss

    def _training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Do forward and backward of one batch at sampled ranks."""
        assert self._untouched is not None
        with self._driver.step(model) as self._seen:
            loss = self._untouched(model, *args, **kwargs)
        self._seen = None
        if self._trainer.accelerator.sync_gradients:
            self._driver.add_penalty_gradients()
        return loss

    def _mixed_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch, with the distance to the whole model in a training step."""
        assert self._compute_loss is not None
        seen, self._seen = self._seen, None
        if seen is None:
            return self._compute_loss(model, inputs, *args, **kwargs)
        scale = _share_of_items(self._trainer, inputs, kwargs.get("num_items_in_batch"))
        found = self._compute_loss(model, inputs, *args, **kwargs)
        if isinstance(found, tuple):
            return self._driver.mixed_loss(found[0], seen, scale), *found[1:]
        return self._driver.mixed_loss(found, seen, scale)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Remove useless ranks after the last step of an epoch, before it is saved or evaluated."""
        if state.epoch is not None and float(state.epoch).is_integer():
            self._end_epoch(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End an epoch that was stopped early."""
        self._end_epoch(state, control)

    def _end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        last = control.should_training_stop or state.global_step >= state.max_steps
        numbers = self._driver.end_epoch(last=last)
        if numbers is not None:
            self._trainer.log(numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Restore the trainer's methods; another train() starts from the beginning."""
        self._restore()

    def _restore(self) -> None:
        if self._untouched is not None:
            self._trainer.training_step = self._untouched
            self._trainer.compute_loss = self._compute_loss
            self._untouched = self._compute_loss = None


def _steps(trainer: Any, loader: Any, soft_loss: SoftLoss | None) -> TrainerSteps:
    """Return the steps of a trainer."""
    compute_loss = trainer.compute_loss

    def run(model: nn.Module, batch: Any) -> Tensor:
        inputs, options = trainer._prepare_inputs(dict(batch)), {}
        if trainer.compute_loss_func is not None:
            options["num_items_in_batch"] = _share_of_items(trainer, inputs, 1)
        found = compute_loss(model, inputs, **options)
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    batches, precision = FixedBatches(loader), trainer.compute_loss_context_manager
    return TrainerSteps(unwrapped(trainer.model), run, batches, soft_loss, precision=precision)


def _share_of_items(trainer: Any, inputs: Any, total: Tensor | int | None) -> Tensor | float:
    """Return the share of a batch in a loss that is a sum over accumulated batches, else 1."""
    scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if total is None or not scaled or labels is None:
        return 1.0
    if getattr(trainer, "_loss_shifts_labels", False) and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    share: Tensor = labels.ne(IGNORED).sum() / total
    if trainer.args.average_tokens_across_devices:
        share = share * trainer.accelerator.num_processes
    return share


def _plan(state: TrainerState, scheduler: object) -> RunPlan:
    epochs = max(1, state.num_train_epochs)
    return RunPlan(
        epochs=epochs,
        steps_per_epoch=-(-state.max_steps // epochs),
        schedule=read_schedule(scheduler),
    )


class _WhenWritten:
    """Placeholder of a callback's state that is read when the trainer copies it for a checkpoint.

    The trainer's own mechanism for callbacks with a state creates them from JSON when training is
    resumed, which is not possible with a trainer as an argument.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def __deepcopy__(self, memo: Any) -> Any:
        return _without_tensors(self._read())


def _without_tensors(value: Any) -> Any:
    """Return the state for JSON: tensors become text."""
    if isinstance(value, Tensor):
        return {"tensor": base64.b64encode(safetensors.torch.save({"": value})).decode()}
    if isinstance(value, Mapping):
        return {key: _without_tensors(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(part) for part in value]
    return value


def _with_tensors(value: Any) -> Any:
    """Return the state with the tensors that `_without_tensors` replaced."""
    if isinstance(value, Mapping):
        if value.keys() == {"tensor"}:
            return safetensors.torch.load(base64.b64decode(value["tensor"]))[""]
        return {key: _with_tensors(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_tensors(part) for part in value]
    return value
