"""How far a run has come, and the random states that belong to that place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from maestro_lod.train.evaluate import Score
from maestro_lod.train.record import EpochRecord


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
