"""Fine-tune a model that was cut and extracted."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from maestro_lod.errors import CheckpointError, OptionError, require_at_least_one
from maestro_lod.files.state import load_state, save_state
from maestro_lod.model.inputs import Batch, Loss
from maestro_lod.train.fit import FitOptions, Watch, fit
from maestro_lod.train.progress import Progress

_RATE = 0.3  # of the learning rate that a training begins with; for an MLP better than 1 and 0.1


def finetune(
    plain: nn.Module,
    train_data: Iterable[Batch],
    *,
    optimizer: Optimizer,
    epochs: int = 1,
    loss: Loss | None = None,
    seed: int = 0,
    options: FitOptions | None = None,
    checkpoint: Path | None = None,
) -> Progress:
    """Train an extracted model for some epochs, in place, at a learning rate that falls to zero.

    >>> small = extract(model, ranks)
    >>> finetune(small, loader, optimizer=SGD(small.parameters(), lr=0.01, momentum=0.9))

    Args:
        plain: The extracted model.
        train_data: As `fit` takes it, with a length.
        optimizer: As it would train the model from the beginning: fine-tuning starts at three
            tenths of its learning rate.
        epochs: How many epochs to train.
        loss: As `fit` takes it.
        seed: Seed of everything that is random.
        options: As `fit` takes them.
        checkpoint: A file that is written after every epoch; if it exists, training resumes there.

    Returns:
        The record of the run.

    Raises:
        CheckpointError: The checkpoint is of another model.
        OptionError: An option is invalid, or the data has no length.
    """
    require_at_least_one("heal", epochs, "the epochs to train on")
    if not isinstance(train_data, Sized):
        raise OptionError("healing needs training data with a length, to plan its learning rate.")
    steps = epochs * -(-len(train_data) // (options or FitOptions()).accumulate)
    progress = Progress()
    if checkpoint is not None and checkpoint.exists():
        progress = _resumed(plain, optimizer, checkpoint)

    def keep(reached: Progress) -> None:
        if checkpoint is not None:
            parts = (plain, optimizer, reached)
            save_state([part.state_dict() for part in parts], checkpoint)

    return fit(
        plain, train_data, optimizer=optimizer, epochs=epochs, loss=loss, seed=seed,
        schedule=lambda step: _RATE * (1 - step / max(1, steps)),
        options=options, progress=progress, watch=Watch(epoch=keep),
    )  # fmt: skip


def _resumed(plain: nn.Module, optimizer: Optimizer, checkpoint: Path) -> Progress:
    try:
        model_state, optimizer_state, place = load_state(checkpoint)
        plain.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        return Progress.from_state(place)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{checkpoint} is of another model than is to be healed ({reason}). Remove it."
        ) from None
