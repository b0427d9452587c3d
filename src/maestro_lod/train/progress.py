"""Progress of a run: one record per epoch, the position in the data, and random states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from maestro_lod.train.evaluate import Score


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """The size and cost of a model at the end of an epoch; None if unknown."""

    params: int | None = None
    """Of the deployed model, like all sizes here; of a sparse model its non-zeros."""
    macs: int | None = None
    """Of the extracted model; zeros and binary weights count like others."""
    relative_params: float | None = None
    """Relative to the dense model."""
    relative_macs: float | None = None
    bits: int | None = None
    """Of all stored values."""
    index_bits: int | None = None
    """Of the positions of the non-zeros of a sparse model."""
    relative_bits: float | None = None
    """Bits relative to the dense model, without indices: the size that methods reach."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of each low-rank layer."""
    penalty: float | None = None
    """λ at the end of the epoch."""
    budget: float | None = None
    """The budget, relative to dense."""
    phase: str | None = None
    """The phase, in methods with several."""
    note: str | None = None
    """A warning for the user, with a remedy."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, by name."""

    @property
    def total_rank(self) -> int | None:
        """The sum of all ranks; None for a model without low-rank layers."""
        return sum(self.ranks.values()) if self.ranks else None

    def size(self) -> dict[str, float]:
        """Return the known sizes by name."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        return {name: value for name, value in sizes.items() if value is not None}


_SIZES = (
    *("params", "macs", "relative_params", "relative_macs"),
    *("bits", "index_bits", "relative_bits"),
)


@dataclass(frozen=True, kw_only=True)
class EpochRecord(MethodRecord):
    """A finished epoch: its position, the measures of the model, and its size and cost."""

    epoch: int
    """The first is 1."""
    step: int | None = None
    """Optimizer steps so far."""
    seconds: float | None = None
    """Training time, evaluation left out."""
    lr: float | None = None
    """Learning rate of the first parameter group at the last step."""
    train: Mapping[str, float] = field(default_factory=dict)
    """Loss and other measures on the training batches, at the ranks of their steps."""
    validation: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Return all numbers by their keys in files, without the ranks of layers."""
        return {k: v for k, v in self.to_dict().items() if isinstance(v, int | float)}

    def to_dict(self) -> dict[str, Any]:
        """Return a flat mapping for JSON: measures are train_loss, validation_loss, …."""
        flat = {name: getattr(self, name) for name in _FLAT} | {"total_rank": self.total_rank}
        return {
            **{name: value for name, value in flat.items() if value is not None},
            **{f"train_{name}": value for name, value in self.train.items()},
            **{f"validation_{name}": value for name, value in self.validation.items()},
            **self.others,
            "ranks": dict(self.ranks),
        }

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> EpochRecord:
        """Return the record of a mapping from `to_dict`; values of other types are left out."""
        values: dict[str, Any] = {"train": {}, "validation": {}, "others": {}}
        for key, value in flat.items():
            split, _, measure = key.partition("_")
            if key in ("phase", "note"):
                values[key] = value if isinstance(value, str) else None
            elif key == "ranks":
                values[key] = _numbers(value)
            elif not _is_number(value):
                continue
            elif key in _FLAT:
                values[key] = value
            elif split in ("train", "validation"):
                values[split][measure] = value
            elif key != "total_rank":
                values["others"][key] = value
        return cls(**values)


_FLAT = [
    entry.name
    for entry in fields(EpochRecord)
    if entry.name not in ("ranks", "train", "validation", "others")
]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> dict[str, Any]:
    entries = value if isinstance(value, Mapping) else {}
    return {name: entry for name, entry in entries.items() if _is_number(entry)}


@dataclass
class Progress:
    """The position of a run: the state of `fit` besides model, optimizer and method."""

    epoch: int = 0
    batch: int = 0
    """Finished batches of the current epoch."""
    step: int = 0
    """Optimizer steps so far."""
    seconds: float = 0.0
    """Training time of the current epoch so far, evaluation left out."""
    score: Score = field(default_factory=Score)
    """Of the current epoch's training batches, at the ranks of their steps."""
    history: list[EpochRecord] = field(default_factory=list)
    """One record per finished epoch."""
    random: list[Tensor] | None = None
    """torch's random states, for an epoch that is resumed in its middle."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state, with the current random states of torch."""
        return {
            **vars(self),
            "score": asdict(self.score),
            "history": [record.to_dict() for record in self.history],
            "random": random_states(),
        }

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.seconds, self.score, self.random = 0.0, Score(), None

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Return the progress of a state from `state_dict`."""
        history = [EpochRecord.from_dict(record) for record in state["history"]]
        return cls(**{**state, "score": Score(**state["score"]), "history": history})


def random_states() -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, then one per accelerator in use."""
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])


def set_random_states(states: list[Tensor]) -> None:
    """Restore the states, except those of accelerators that do not exist here."""
    torch.set_rng_state(states[0])
    for device, state in zip(range(torch.cuda.device_count()), states[1:], strict=False):
        torch.cuda.set_rng_state(state, device)
