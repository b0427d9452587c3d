"""Types of datasets: splits of batches that can be iterated repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maestro_lod.errors import OptionError, require_whole

USUAL_SHARE = 0.1


class Batches(Protocol):
    """Iterable of (inputs, target); inputs are a tensor or a tuple of tensors."""

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Data:
    """A loaded dataset."""

    train: Batches
    validation: Batches | None
    test: Batches | None
    example: Any
    """The inputs of one sample, for counting MACs."""
    classes: int
    """Number of classes, or size of the vocabulary."""
    note: str
    """One line for reports: name, sizes, checksum, and peculiarities of this copy."""
    score: Callable[[nn.Module], dict[str, float]] | None = None
    """Function that returns further test metrics by name."""


@dataclass(frozen=True)
class Request:
    """Checked options of `load_data` that every dataset has."""

    name: str
    batch: int
    seed: int
    directory: Path | None
    validation: float
    limit: int | None

    def __post_init__(self) -> None:
        require_whole("seed", self.seed)
        if require_whole("batch", self.batch) == 0:
            raise OptionError("batch=0 makes no batches; use 1 or more.")
        if self.limit is not None and require_whole("limit", self.limit) == 0:
            raise OptionError("limit=0 leaves nothing to train on; use 1 or more.")
        if not 0 <= self.validation < 1:
            raise OptionError(
                f"validation={self.validation!r} must be a share of the training set: 0 (none) or "
                "more, less than 1."
            )

    def first(self, samples: int) -> int:
        """Return the number of samples to use out of `samples`."""
        return samples if self.limit is None else min(self.limit, samples)

    def split(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return the rows of the training and of the validation set, the same for every seed."""
        count = self.first(samples)
        apart = max(1, round(self.validation * count)) if self.validation else 0
        if apart >= count:
            raise OptionError(
                f"validation={self.validation!r} of {count} training samples leaves none to train "
                "on; use a smaller share or a larger limit."
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        return order[apart:].sort().values, order[:apart].sort().values


def epoch_generator(seed: int) -> torch.Generator:
    """Return the generator of one epoch, from `seed` and one draw of torch's global generator."""
    draw = int(torch.empty((), dtype=torch.int64).random_())
    return torch.Generator().manual_seed((draw ^ seed) % 2**63)
