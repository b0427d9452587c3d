"""A callback for the Hugging Face Trainer, and for its relatives.

    trainer = Trainer(lod.decompose(model), arguments, train_dataset=data)
    trainer.add_callback(LoDTrainerCallback(trainer, penalty=1e-5, proximal=True))
    trainer.train()

Optimizer, scheduler, accumulation, clipping and precision are the trainer's. Each batch is one step
at ranks of its own; the penalty is added once per optimizer step, before clipping, of which no
event of the Trainer tells: the callback therefore goes around `trainer.training_step`.
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
    require_single,
    schedule_of,
)
from maestro_lod.layers.ranks import require_low_rank
from maestro_lod.train.budget import BudgetTraining
from maestro_lod.train.lod import LoD
from maestro_lod.train.method import RunPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KEY = "maestro_lod"  # of our state among those of the callbacks, in trainer_state.json


class LoDTrainerCallback(TrainerCallback):
    """Trains the decomposed model of a Trainer by LoD; takes the trainer and LoD's options.

    Its state is part of the trainer's checkpoints. What is known of an epoch (lod/…: ranks, size,
    cost) goes through `trainer.log` to whatever the trainer reports to.
    """

    def __init__(self, trainer: Trainer, **options: Unpack[Options]) -> None:
        if not isinstance(trainer, Trainer):
            raise OptionError(
                f"LoDTrainerCallback was given a {type(trainer).__name__}: make the trainer first, "
                "then trainer.add_callback(LoDTrainerCallback(trainer, …))."
            )
        require_whole_parameters(trainer.accelerator)
        self._driver = Driver(**options)
        self._untouched: Callable[..., Tensor] | None = None
        self._trainer = cast("Any", trainer)  # its attributes may be None, by their types
        require_low_rank(self._trainer.model)
        follow_loading(self._trainer.model)

    @property
    def lod(self) -> LoD | BudgetTraining:
        """The method of the training that has started."""
        return self._driver.lod

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Make the method; weights and optimizer are restored by now, if there was a checkpoint."""
        trainer = self._trainer
        require_single(trainer.callback_handler.callbacks, LoDTrainerCallback)
        states: Any = state.stateful_callbacks  # a dict once the state is made
        saved = states.get(_KEY) if state.global_step else None
        if state.global_step and not saved:
            raise TrainingError(
                f"training goes on from step {state.global_step}, but the checkpoint holds no "
                "state of LoDTrainerCallback. Load the model from it and train without "
                "resume_from_checkpoint."
            )
        self._driver.load_state_dict(_with_tensors(saved or {}))
        self._driver.start(trainer.model, trainer.optimizer, _plan(state, trainer.lr_scheduler))
        require_unscaled(trainer.accelerator, self._driver)
        states[_KEY] = _WhenWritten(self._driver.state_dict)
        if self._untouched is None:
            self._untouched = trainer.training_step
            trainer.training_step = self._training_step

    def _training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Do forward and backward of one batch at drawn ranks."""
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
        """End an epoch that was cut short."""
        self._end_epoch(state, control)

    def _end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        last = control.should_training_stop or state.global_step >= state.max_steps
        numbers = self._driver.end_epoch(last=last)
        if numbers is not None:
            self._trainer.log(numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave the trainer as it was found; another train() starts anew."""
        if self._untouched is not None:
            self._trainer.training_step = self._untouched
            self._untouched = None


def _plan(state: TrainerState, scheduler: object) -> RunPlan:
    epochs = max(1, state.num_train_epochs)
    return RunPlan(
        epochs=epochs,
        steps_per_epoch=-(-state.max_steps // epochs),
        schedule=schedule_of(scheduler),
    )


class _WhenWritten:
    """Stands among the states of callbacks for one that is read when the trainer copies it.

    The trainer does so to write a checkpoint. Its own way for callbacks that have a state would
    make them anew from numbers and text when training goes on, which a method or a trainer is not.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def __deepcopy__(self, memo: Any) -> Any:
        return _without_tensors(self._read())


def _without_tensors(value: Any) -> Any:
    """Return the state as JSON can hold it: tensors become text."""
    if isinstance(value, Tensor):
        return {"tensor": base64.b64encode(safetensors.torch.save({"": value})).decode()}
    if isinstance(value, Mapping):
        return {key: _without_tensors(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(part) for part in value]
    return value


def _with_tensors(value: Any) -> Any:
    """Undo `_without_tensors`."""
    if isinstance(value, Mapping):
        if value.keys() == {"tensor"}:
            return safetensors.torch.load(base64.b64decode(value["tensor"]))[""]
        return {key: _with_tensors(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_tensors(part) for part in value]
    return value
