"""Iterative magnitude pruning with rewinding (Frankle et al.): train, prune, rewind, train again.

The epochs of a run are divided among several trainings: one of the dense model, and one after each
pruning. A pruning removes a share of the remaining weights, the smallest of all layers; then the
other weights and the schedule return to their state early in the first training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.baselines.sparse import Masked, largest_kept
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost
from maestro_lod.train.method import RunPlan, setting
from maestro_lod.train.size_settings import SizedSettings


@dataclass(frozen=True)
class IMPSettings(SizedSettings):
    """Size, share removed by each pruning, and state that weights are rewound to."""

    least_epochs = 2

    prune: float = setting(0.2, "least share of the weights left that a round removes", least=0.0)
    rewind: float = setting(0.02, "share of the first training to rewind to", least=0.0)

    def __post_init__(self) -> None:
        if not 0.0 < self.prune < 1.0:
            raise OptionError(f"prune={self.prune:g} must be between 0 and 1.")
        if self.rewind >= 1.0:
            raise OptionError(
                f"rewind={self.rewind:g} must be below 1, so that some training is left."
            )

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> IMP:
        return IMP(
            model, optimizer, size=self.size, prune=self.prune, rewind=self.rewind,
            example=example, dense=dense,
        )  # fmt: skip


def kept_by_round(weights: int, target: int, prune: float, most_rounds: int) -> list[int]:
    """Return the number of weights after each pruning; the last is the target.

    Each pruning removes the share `prune`, rounded up, or a larger one if that would need more than
    `most_rounds`.
    """
    left = [weights]
    while left[-1] > target:
        left.append(max(left[-1] - math.ceil(prune * left[-1]), target))
    rounds = min(len(left) - 1, most_rounds)
    if rounds == len(left) - 1:
        return left[1:]
    share = (target / weights) ** (1 / rounds)
    return [round(weights * share**i) for i in range(1, rounds)] + [target]


class IMP(Masked):
    """Prunes between trainings, and rewinds the remaining weights exactly."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, prune: float, rewind: float, **common: Any
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.prune, self.rewind = prune, rewind
        self.round = 0
        self.early: dict[str, Tensor] = {}
        """State of the model to rewind to."""

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        super().start(model, optimizer, plan)
        most = self.plan.epochs - 1
        self.kept = kept_by_round(self.prunable, self.target, self.prune, most)
        trainings = len(self.kept) + 1
        self.ends = [round(self.plan.epochs * (i + 1) / trainings) for i in range(trainings)]
        self._remember()

    def _steps_in(self, training: int) -> int:
        began = self.ends[training - 1] if training else 0
        return (self.ends[training] - began) * self.steps_per_epoch

    @property
    def _rewound_to(self) -> int:
        return round(self.rewind * self._steps_in(0))

    def position(self) -> float:
        done = self.step / self._steps_in(self.round)
        first = self._rewound_to / self._steps_in(0) if self.round else 0.0
        return first + (1 - first) * done

    def after_step(self) -> None:
        super().after_step()
        self._remember()

    def _remember(self) -> None:
        if not self.early and self.step == self._rewound_to:
            state = self.model.state_dict()
            self.early = {name: value.detach().clone() for name, value in state.items()}

    def on_epoch_end(self, *, last: bool) -> None:
        if self.round == len(self.kept) or (self.epoch < self.ends[self.round] and not last):
            return
        keep = self.target if last else self.kept[self.round]
        self.masks = largest_kept(self.weights, self.masks, keep)
        self.round = len(self.kept) if last else self.round + 1
        if not last:
            self.model.load_state_dict(self.early)
            self.new_stage()
        self.apply_masks()

    @property
    def stage(self) -> str:
        return f"round {self.round} of {len(self.kept)}"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "round": self.round, "early": self.early}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.round = int(state["round"])
        self.early = {name: torch.as_tensor(value) for name, value in state["early"].items()}
