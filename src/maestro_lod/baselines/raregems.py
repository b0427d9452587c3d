"""Rare gems (Sreenivasan et al., NeurIPS 2022): Gem-Miner searches at initialization, then trains.

In the search, weights keep their signs and one magnitude per layer; a score is learned for each,
and a weight is active if its score is above ½. Every few epochs the lowest scores of all layers are
frozen at zero, until a target share is left. Then the remaining weights are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from maestro_lod.baselines.sparse import Masked, largest_kept
from maestro_lod.baselines.stages import epochs_of
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost
from maestro_lod.train.method import RunPlan, setting
from maestro_lod.train.size_settings import SizedSettings


@dataclass(frozen=True)
class RareGemsSettings(SizedSettings):
    """Size and schedule of the search."""

    least_epochs = 2

    search_share: float = setting(0.5, "share of the run that searches", least=0.0)
    search_lr: float = setting(0.01, "learning rate of Adam for the scores", least=0.0)
    search_decay: float = setting(1e-6, "decay of the scores towards zero", least=0.0)
    freeze_every: int | None = setting(
        None, "epochs between freezings; null: a tenth of the search", least=1
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.search_share < 1.0:
            raise OptionError(
                f"search_share={self.search_share:g} must be a share of the run, between 0 and 1."
            )

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> RareGems:
        return RareGems(
            model, optimizer, size=self.size, settings=self, seed=seed,
            example=example, dense=dense,
        )  # fmt: skip


def freezings(epochs: int, every: int) -> int:
    """Return the number of freezings in a search, one after `every` epochs."""
    return (epochs - 1) // every


def frozen_share(density: float, times: int) -> float:
    """Return the share of active weights that each of N freezings removes: 1 − s^(1/N)."""
    return float(1.0 - density ** (1.0 / times))


@torch.no_grad()
def signed_constants(weight: Tensor) -> Tensor:
    """Return the signs of a weight times √(2 / fan-in)."""
    size = math.sqrt(2.0 / weight[0].numel())
    return torch.where(weight < 0, -size, size).to(weight.dtype)


class RareGems(Masked):
    """Learns which weights to keep, then trains them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        settings: RareGemsSettings,
        seed: int,
        **common: Any,
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.settings, self.searching, self.search_epochs = settings, True, 0
        self.initial = {name: signed_constants(p.detach()) for name, p in self.weights.items()}
        """Weights of constant magnitude that are used while scores are learned."""
        draw = torch.Generator().manual_seed(seed)
        self.scores = {
            name: nn.Parameter(torch.rand(p.shape, generator=draw).to(p))
            for name, p in self.weights.items()
        }
        self.scorer = Adam(self.scores.values(), lr=settings.search_lr)

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        super().start(model, optimizer, plan)
        if self.searching:  # otherwise the saved state contains the end of the search
            self.search_epochs = epochs_of(self.settings.search_share, self.plan.epochs)
        self.every = self.settings.freeze_every or max(1, round(self.search_epochs / 10))
        if self.searching:
            self._show_scored()

    @property
    def stage(self) -> str:
        return "search" if self.searching else "fine-tuning"

    def position(self) -> float:
        began = 0 if self.searching else self.search_epochs
        epochs = self.search_epochs if self.searching else self.plan.epochs - began
        return self.step / (epochs * self.steps_per_epoch)

    @torch.no_grad()
    def after_backward(self, weight: float) -> None:
        """Move gradients of weights to their scores, straight through the rounding."""
        if not self.searching:
            return
        for name, score in self.scores.items():
            gradient = 2 * weight * self.settings.search_decay * score
            if (found := self.weights[name].grad) is not None:
                gradient += found * self.initial[name] * self.masks[name]
            score.grad = gradient if score.grad is None else score.grad + gradient
        self.optimizer.zero_grad()  # no other parameter is trained while scores are learned

    def after_step(self) -> None:
        if not self.searching:
            super().after_step()
            return
        done = min((self.step - 1) / (self.search_epochs * self.steps_per_epoch), 1.0)
        for group in self.scorer.param_groups:
            group["lr"] = self.settings.search_lr * 0.5 * (1 + math.cos(math.pi * done))
        self.scorer.step()
        self.scorer.zero_grad()
        with torch.no_grad():
            for score in self.scores.values():
                score.clamp_(0.0, 1.0)
        self._show_scored()

    @torch.no_grad()
    def _show_scored(self) -> None:
        """Set the model to the weights whose scores are above ½."""
        for name, p in self.weights.items():
            p.copy_(self.initial[name] * (self.scores[name] > 0.5) * self.masks[name])

    def _collapsed(self) -> bool:
        return not any(
            bool(((score > 0.5) & self.masks[name]).any()) for name, score in self.scores.items()
        )

    def on_epoch_end(self, *, last: bool) -> None:
        if not self.searching:
            return
        times = freezings(self.search_epochs, self.every)
        ends = last or self.epoch >= self.search_epochs or self._collapsed()
        if ends:
            self._keep(self.target)
            self._begin_training()
        elif self.epoch % self.every == 0:
            done, share = self.epoch // self.every, frozen_share(self.target / self.prunable, times)
            left = self.left - math.ceil(share * self.left)
            self._keep(self.target if done == times else max(left, self.target))
            self._show_scored()

    def _keep(self, count: int) -> None:
        scores = {name: score.detach() for name, score in self.scores.items()}
        self.masks = largest_kept(scores, self.masks, count)

    @torch.no_grad()
    def _begin_training(self) -> None:
        """Restore all weights that are not frozen at zero, and start to train them."""
        self.searching, self.search_epochs = False, self.epoch
        for name, p in self.weights.items():
            p.copy_(self.initial[name] * self.masks[name])
        self.new_stage()

    def state_dict(self) -> dict[str, Any]:
        searching = {"scores": self.scores, "initial": self.initial}
        return {
            **super().state_dict(),
            "searched": None if self.searching else self.search_epochs,
            **(searching if self.searching else {}),
            "scorer": self.scorer.state_dict() if self.searching else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.searching = state["searched"] is None
        if not self.searching:
            self.search_epochs = int(state["searched"])
            return
        with torch.no_grad():
            for name, score in self.scores.items():
                score.copy_(state["scores"][name])
                self.initial[name].copy_(state["initial"][name])
        self.scorer.load_state_dict(state["scorer"])
