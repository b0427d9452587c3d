"""Callback for the Hugging Face Trainer and its subclasses.

    trainer = Trainer(lod.decompose(model), arguments, train_dataset=data)
    trainer.add_callback(LoDTrainerCallback(trainer, penalty=1e-5, proximal=True))
    trainer.train()

Optimizer, scheduler, accumulation, clipping and precision are the trainer's. Each batch is one step
with its own sampled ranks. The penalty is added once per optimizer step, before clipping; the
Trainer has no event there, so that the callback wraps `trainer.training_step`.
"""

from __future__ import annotations

import base64
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
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KEY = "maestro_lod"  # of this callback's state in trainer_state.json


class LoDTrainerCallback(TrainerCallback):
    """Trains the decomposed model of a Trainer by LoD.

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
        self._trainer = cast("Any", trainer)  # the types of its attributes include None
        require_low_rank(self._trainer.model)
        follow_loading(self._trainer.model)

    @property
    def lod(self) -> LoD:
        """The method of the training that has started."""
        return self._driver.lod

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
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
        self._driver.start(trainer.model, trainer.optimizer, _plan(state, trainer.lr_scheduler))
        require_unscaled(trainer.accelerator, self._driver)
        states[_KEY] = _WhenWritten(self._driver.state_dict)
        if self._untouched is None:
            self._untouched = trainer.training_step
            trainer.training_step = self._training_step

    def _training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Do forward and backward of one batch at sampled ranks."""
        assert self._untouched is not None
        with self._driver.step():
            loss = self._untouched(model, *args, **kwargs)
        if self._trainer.accelerator.sync_gradients:
            self._driver.add_penalty_gradients()
        return loss

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
        """Restore `trainer.training_step`; another train() starts from the beginning."""
        if self._untouched is not None:
            self._trainer.training_step = self._untouched
            self._untouched = None


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
