"""Fine-tuning: train an extracted model, which has only torch's own layers, for a few epochs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sized

from torch import nn
from torch.optim import Optimizer

from maestro_lod.errors import OptionError, require_at_least_one
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.model.inputs import Batch, Loss
from maestro_lod.train.fit import FitOptions, Watch, fit
from maestro_lod.train.progress import Progress

_STAGE = "finetuning"
_RATE = 0.3  # of a training's initial learning rate; better than 1 and 0.1 for an MLP


def finetune(
    plain: nn.Module,
    train_data: Iterable[Batch],
    *,
    optimizer: Optimizer,
    epochs: int = 1,
    loss: Loss | None = None,
    seed: int = 0,
    options: FitOptions | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> Progress:
    """Train an extracted model for some epochs, in place, at a learning rate that falls to zero.

    >>> small = extract(model, ranks)
    >>> finetune(small, loader, optimizer=SGD(small.parameters(), lr=0.01, momentum=0.9))

    Args:
        plain: The extracted model, which is changed.
        train_data: Batches (inputs, target) with a length.
        optimizer: An optimizer with a learning rate at which the model would be trained from
            scratch: fine-tuning begins at three tenths of it.
        epochs: The number of epochs.
        loss: `loss(output, target)`, as for `fit`.
        seed: The seed of the order of samples, as for `fit`.
        options: Further options of `fit`.
        resume: A directory that is written after every epoch: after an interruption, the same call
            resumes there. It needs the same training data, which is compared by length alone.

    Returns:
        The progress of the training, with its history.

    Raises:
        OptionError: The data has no length, an option is not usable, or `resume` belongs to another
            call.
    """
    require_at_least_one("epochs", epochs, "the number of epochs")
    if not isinstance(train_data, Sized):
        raise OptionError(
            f"the training data has no length, which fine-tuning needs to plan its learning rate: "
            f"{type(train_data).__name__}. Give a list or a DataLoader."
        )
    steps = epochs * -(-len(train_data) // (options or FitOptions()).accumulate)
    call = {
        "model": plain, "optimizer": [type(optimizer), optimizer.state_dict()], "epochs": epochs,
        "loss": loss, "seed": seed, "options": options, "batches": len(train_data),
    }  # fmt: skip
    cache = StageCache(resume, call)
    progress = Progress()
    if (saved := cache.load(_STAGE)) is not None:
        model_state, optimizer_state, reached = saved
        plain.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        progress = Progress.from_state(reached)

    def save(reached: Progress) -> None:
        cache.save(_STAGE, [part.state_dict() for part in (plain, optimizer, reached)])

    return fit(
        plain, train_data, optimizer=optimizer, epochs=epochs, loss=loss, seed=seed,
        schedule=lambda step: _RATE * (1 - step / max(1, steps)),
        options=options, progress=progress, watch=Watch(epoch=save),
    )  # fmt: skip
