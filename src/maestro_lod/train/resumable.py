"""What of a LoD is saved, and how it is restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.distributed.ddp import renew, wrappers_of
from maestro_lod.errors import (
    MaestroError,
    TrainingError,
    listed,
    require_nonnegative,
    require_whole,
)
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.train.ledger import Ledger
from maestro_lod.train.rank_penalty import RankPenalty
from maestro_lod.train.sampling import RankSampler
from maestro_lod.train.shrink import require_optimizer
from maestro_lod.train.steps import SampledSteps
from maestro_lod.train.unfactored import Unfactored
from maestro_lod.train.zero_ranks import Grace


class Resumable:
    """The state of a LoD: all that a run needs, beside model and optimizer, to go on exactly."""

    model: nn.Module
    optimizer: Optimizer
    epoch: int
    sampler: RankSampler
    ledger: Ledger
    _layers: dict[str, LowRank]
    _steps: SampledSteps
    _penalty: RankPenalty
    _grace: Grace
    _unfactored: Unfactored

    def state_dict(self) -> dict[str, Any]:
        """Return all state as numbers, strings, lists and tensors; save it beside the model's."""
        self._steps.measure(self.ledger)
        return {
            "epoch": self.epoch,
            "penalty": self._penalty.value,
            "ranks": {name: layer.rank for name, layer in self._layers.items()},
            **self._steps.counts(),
            "sampler": self.sampler.state_dict(),
            "ledger": self.ledger.state_dict(),
            "budget": None if self._penalty.landing is None else self._penalty.landing.state_dict(),
            "unmoved": dict(self._grace.ranks),
            "penalty_use": self._penalty.use,
            "unfactored": self._unfactored.names,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state exactly; load the model's and the optimizer's state first."""
        here = {name: layer.rank for name, layer in self._layers.items()}
        _require_state(state, here, budget=self._penalty.landing is not None)
        require_optimizer(self.model, self.optimizer)
        before = self.state_dict()
        try:
            self._restore(state)
        except Exception as error:
            self._restore(before)
            if isinstance(error, MaestroError):
                raise
            raise TrainingError(
                f"this is no state of a LoD ({error!r}). Give what its state_dict() returned."
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.ledger.load_state_dict(state["ledger"])
        if self._penalty.landing is not None:
            self._penalty.landing.load_state_dict(state["budget"])
        self.epoch = require_whole("epoch", state["epoch"])
        self._penalty.value = require_nonnegative("penalty", state["penalty"])
        self._steps.load_counts(state)
        # which older states do not have
        spared = state.get("unmoved", {})
        self._grace.ranks = {name: require_whole(name, rank) for name, rank in spared.items()}
        if (use := state.get("penalty_use", "applied")) not in (None, "due", "applied"):
            raise ValueError(f"penalty_use is {use!r}")
        self._penalty.use = use
        self._unfactored.hold(state.get("unfactored", ()))
        for wrapper in wrappers_of(self.model):
            renew(wrapper)  # whose buckets are of other ranks if the model's state was


_STATE = (
    "epoch", "penalty", "ranks", "steps", "forwards", "whole", "sampler", "ledger", "budget",
)  # fmt: skip


def _require_state(state: Any, ranks: dict[str, int], *, budget: bool) -> None:
    """Refuse what is no state of a LoD, or one of other ranks or another choice of λ."""
    given = state if isinstance(state, Mapping) else {}
    if missing := [part for part in _STATE if part not in given]:
        raise TrainingError(
            f"this is no state of a LoD: it has no {listed(missing)}. Give what its "
            "state_dict() returned."
        )
    saved = state["ranks"]
    if not isinstance(saved, Mapping):
        raise TrainingError(f"the ranks of a state are {saved!r:.40}, not a mapping from names.")
    if saved != ranks:
        differing = [name for name in {**ranks, **saved} if ranks.get(name) != saved.get(name)]
        raise TrainingError(
            f"the saved state has other ranks than the model at {listed(differing)}. Load the "
            "model's state_dict, saved at the same moment, before this one."
        )
    if budget != (state["budget"] is not None):
        saved_with, made_with = ("without", "with") if budget else ("with", "without")
        raise TrainingError(
            f"the saved state is of a LoD {saved_with} a budget, but this LoD was created "
            f"{made_with} one. Create it with the same `penalty`."
        )
