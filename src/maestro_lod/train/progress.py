"""Progress of a run: one record per epoch, the place reached, and the random states there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from maestro_lod.train.evaluate import Score


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """What a method says of the model at the end of an epoch; None is what it does not know."""

    params: int | None = None
    """Of the model as it would be deployed, as all sizes here; of a sparse one, its non-zeros."""
    macs: int | None = None
    """Of the plain model: zeros are multiplied, and binary weights too."""
    relative_params: float | None = None
    """Relative to the dense model."""
    relative_macs: float | None = None
    bits: int | None = None
    """Of all values that are stored."""
    index_bits: int | None = None
    """What it takes beside them to say where the non-zeros of a sparse model are."""
    relative_bits: float | None = None
    """Bits relative to the dense model, indices left out: the size that methods are given."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of each low-rank layer; empty for a model without any."""
    penalty: float | None = None
    """λ at the end of the epoch."""
    budget: float | None = None
    """What the model may cost, relative to dense."""
    phase: str | None = None
    """Of a training that has several."""
    note: str | None = None
    """What its user should know, and what to do about it."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, by name."""

    @property
    def total_rank(self) -> int | None:
        """The sum of all ranks; None for a model without low-rank layers."""
        return sum(self.ranks.values()) if self.ranks else None

    def size(self) -> dict[str, float]:
        """Return what is known of the size, by name."""
        known = {name: getattr(self, name) for name in _SIZES}
        return {name: value for name, value in known.items() if value is not None}


_SIZES = (
    *("params", "macs", "relative_params", "relative_macs"),
    *("bits", "index_bits", "relative_bits"),
)


@dataclass(frozen=True, kw_only=True)
class EpochRecord(MethodRecord):
    """One finished epoch: where it ended, how well the model does, and what the method says."""

    epoch: int
    """The first is 1."""
    step: int | None = None
    """Optimizer steps so far."""
    seconds: float | None = None
    """Training time, evaluation left out."""
    lr: float | None = None
    """Learning rate of the first parameter group at the last step."""
    train: Mapping[str, float] = field(default_factory=dict)
    """Loss and other measures on the training batches, as they were trained on."""
    validation: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Return every number by the key that it has in files, ranks of layers left out."""
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
        """Read what `to_dict` gave; whatever is no number where one belongs is left out."""
        found: dict[str, Any] = {"train": {}, "validation": {}, "others": {}}
        for key, value in flat.items():
            split, _, measure = key.partition("_")
            if key in ("phase", "note"):
                found[key] = value if isinstance(value, str) else None
            elif key == "ranks":
                found[key] = _numbers(value)
            elif not _is_number(value):
                continue
            elif key in _FLAT:
                found[key] = value
            elif split in ("train", "validation"):
                found[split][measure] = value
            elif key != "total_rank":
                found["others"][key] = value
        return cls(**found)


_FLAT = [
    entry.name
    for entry in fields(EpochRecord)
    if entry.name not in ("ranks", "train", "validation", "others")
]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> dict[str, Any]:
    given = value if isinstance(value, Mapping) else {}
    return {name: entry for name, entry in given.items() if _is_number(entry)}


@dataclass
class Progress:
    """How far a run has come: what `fit` needs beside model, optimizer and method to go on."""

    epoch: int = 0
    batch: int = 0
    """Batches of the current epoch that are done."""
    step: int = 0
    """Optimizer steps so far."""
    seconds: float = 0.0
    """Training time of the current epoch so far, evaluation left out."""
    score: Score = field(default_factory=Score)
    """Of the current epoch's training batches, each at the ranks that were drawn for it."""
    history: list[EpochRecord] = field(default_factory=list)
    """One record per finished epoch."""
    random: list[Tensor] | None = None
    """torch's random states at this place, for an epoch that is resumed in its middle."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place reached, with torch's random states as they are now."""
        return {
            **vars(self),
            "score": asdict(self.score),
            "history": [record.to_dict() for record in self.history],
            "random": random_states(),
        }

    def next_epoch(self) -> None:
        """Begin another epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.seconds, self.score, self.random = 0.0, Score(), None

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Return the place that `state_dict` noted."""
        history = [EpochRecord.from_dict(record) for record in state["history"]]
        return cls(**{**state, "score": Score(**state["score"]), "history": history})


def random_states() -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, then one per accelerator in use."""
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])


def set_random_states(states: list[Tensor]) -> None:
    """Restore the states; those of accelerators that are not here are left out."""
    torch.set_rng_state(states[0])
    for device, state in zip(range(torch.cuda.device_count()), states[1:], strict=False):
        torch.cuda.set_rng_state(state, device)
