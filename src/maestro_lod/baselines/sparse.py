"""Base class of methods that set weights to zero by masks of an exact size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.baselines.stages import Staged
from maestro_lod.errors import OptionError
from maestro_lod.layers.plain import embedding_weights
from maestro_lod.model.macs import dense_macs
from maestro_lod.train.method import RunPlan
from maestro_lod.train.progress import MethodRecord
from maestro_lod.train.size_settings import require_reachable

INDEX_BITS = 32  # bits of a position, where a bitmap of all weights would be larger


def prunable_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that may become zero: matrices and kernels, except embeddings."""
    tables = embedding_weights(model)
    return {
        name: p
        for name, p in model.named_parameters()
        if p.ndim > 1 and p.requires_grad and p not in tables
    }


def largest_kept(
    scores: Mapping[str, Tensor], masks: Mapping[str, Tensor], keep: int
) -> dict[str, Tensor]:
    """Return masks that keep exactly `keep` of the remaining entries: the largest scores.

    All tensors are ranked together; of equal scores the first ones are kept.
    """
    left = torch.cat([scores[name][mask].abs().flatten() for name, mask in masks.items()])
    stays = torch.zeros(len(left), dtype=torch.bool, device=left.device)
    stays[torch.argsort(left, descending=True, stable=True)[:keep]] = True
    parts = torch.split(stays, [int(mask.sum()) for mask in masks.values()])
    kept = {name: mask.clone() for name, mask in masks.items()}
    for mask, part in zip(kept.values(), parts, strict=True):
        mask[mask.clone()] = part
    return kept


class Masked(Staged):
    """Trains a model with a growing share of zeros, down to a share of the dense parameters."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, size: float, **common: Any
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.weights = prunable_weights(self.model)
        self.masks = {
            name: torch.ones_like(p, dtype=torch.bool) for name, p in self.weights.items()
        }
        self.prunable = sum(p.numel() for p in self.weights.values())
        self._rest = sum(p.numel() for p in self.model.parameters()) - self.prunable
        self.target = int(size * self.dense.params) - self._rest
        """Number of weights that are kept at the end."""
        least = (self._rest + 1) / self.dense.params
        require_reachable(size, least, "biases, norms and embeddings are not pruned")
        self.step = 0
        """Optimizer steps in this stage."""
        self._layer_macs = dense_macs(self.model, self.example).layers
        optimizer.register_step_post_hook(lambda *_: self._count_step())

    @property
    def left(self) -> int:
        """Number of prunable weights that are not masked."""
        return sum(int(mask.sum()) for mask in self.masks.values())

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        super().start(model, optimizer, plan)
        if plan.epochs < 2 or plan.steps_per_epoch is None:
            raise OptionError(
                f"{type(self).__name__} trains in stages, so it needs at least 2 epochs and data "
                "with a length."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; `start` has made sure that they are known."""
        return self.plan.steps_per_epoch or 1

    def backward(self, *args: Any, **options: Any) -> Tensor:
        schedule, whole = self.plan.schedule, self.plan.epochs * self.steps_per_epoch
        if schedule is not None:
            share = schedule(min(int(self.position() * whole), whole - 1))
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
        return super().backward(*args, **options)

    def position(self) -> float:
        """Return the position in the schedule, from 0 to 1 in every stage."""
        raise NotImplementedError

    def _count_step(self) -> None:
        self.step += 1
        self.after_step()

    def after_step(self) -> None:
        """Set masked weights to zero again after an optimizer step."""
        self.apply_masks()

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Set masked weights to zero."""
        for name, mask in self.masks.items():
            self.weights[name].mul_(mask)

    def new_stage(self) -> None:
        """Start the next training, without momentum and from the start of the schedule."""
        self.optimizer.state.clear()
        self.step = 0

    def record(self) -> MethodRecord:
        counts = {name: int(mask.sum()) for name, mask in self.masks.items()}
        params = self._rest + sum(counts.values())
        macs = float(self._macs)
        for name, mask in self.masks.items():
            layer = self._layer_macs.get(name.rpartition(".")[0], 0)
            macs -= layer * (1 - counts[name] / mask.numel())
        return dataclasses.replace(
            super().record(),
            params=params,
            relative_params=params / self.dense.params,
            bits=32 * params,
            index_bits=sum(
                min(mask.numel(), INDEX_BITS * counts[name]) for name, mask in self.masks.items()
            ),
            relative_bits=params / self.dense.params,
            others={"sparse_macs": round(macs)},
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masks": self.masks, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.step = int(state["step"])
        for name, mask in self.masks.items():
            mask.copy_(state["masks"][name])
