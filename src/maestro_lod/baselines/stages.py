"""What methods share that train by the plain loss: costs epoch by epoch, and layers exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.errors import LayerError, OptionError, TrainingError
from maestro_lod.layers.ranks import low_rank_layers, ranks, unwrapped
from maestro_lod.model.cost import Cost, count_bits, count_params
from maestro_lod.model.inputs import Example
from maestro_lod.model.macs import dense_macs
from maestro_lod.train.dense import Dense
from maestro_lod.train.ledger import EpochCost, Ledger
from maestro_lod.train.method import RunPlan
from maestro_lod.train.progress import MethodRecord


class Staged(Dense):
    """Trains by the plain loss, books what each epoch costs, and may change at its end."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, example: Example, dense: Cost
    ) -> None:
        self.model, self.optimizer = unwrapped(model), optimizer
        self.example, self.dense = example, dense
        self.ledger = Ledger(dense.params, dense.macs)
        self.plan = RunPlan(0, None)
        """As the run began; one that is given more epochs later goes on with its last stage."""
        self._macs = dense_macs(self.model, example).total  # as long as no layer is low-rank

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return len(self.ledger.epochs)

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        if self.optimizer is not optimizer or self.model is not unwrapped(model):
            kind = type(self).__name__
            raise OptionError(f"{kind} was made for another model or optimizer than fit was given.")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise OptionError(
                f"{type(self).__name__} trains in one process: what it exchanges, masks or adds to "
                "gradients, DistributedDataParallel would not see. Give the inner model."
            )
        epochs = self.plan.epochs or plan.epochs
        self.plan = RunPlan(epochs, plan.steps_per_epoch, plan.schedule, plan.loss_of)

    def end_epoch(self, *, last: bool) -> None:
        self.ledger.epochs.append(self._epoch_cost())
        self.turn(last=last)

    def turn(self, *, last: bool) -> None:
        """Do what comes between two epochs, or after the last; the one that ended is booked."""

    def _epoch_cost(self) -> EpochCost:
        if low_rank_layers(self.model):
            return self.ledger.epoch_cost(self.model, {})
        return EpochCost({}, count_params(self.model), self._macs, self._macs)

    @property
    def stage(self) -> str | None:
        """What the method does now, where it does several things one after the other."""
        return None

    def record(self) -> MethodRecord:
        if low_rank_layers(self.model):
            sizes = self.ledger.sizes(self.model)
            return MethodRecord(**sizes, ranks=ranks(self.model), phase=self.stage)
        params, macs = count_params(self.model), self._macs
        return MethodRecord(
            params=params,
            macs=macs,
            relative_params=params / self.dense.params,
            relative_macs=macs / self.dense.macs if self.dense.macs else None,
            bits=count_bits(self.model, params),
            relative_bits=params / self.dense.params,
            phase=self.stage,
        )

    def training_cost(self) -> dict[str, float | None]:
        return self.ledger.relative()

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.plan.epochs, "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plan = RunPlan(int(state["epochs"]), None)
        self.ledger.load_state_dict(state["ledger"])


def epochs_of(share: float, epochs: int) -> int:
    """Return the epochs of a share of a run: none of no share, and never all of them."""
    return max(min(round(share * epochs), epochs - 1), 1 if share else 0)


def exchange(model: nn.Module, optimizer: Optimizer, change: Callable[[], nn.Module]) -> None:
    """Change layers of a model in place; the optimizer gets the new parameters, and starts anew.

    Those that are new go to the group that held what was in their place: that of the same name, or
    else the one that is closest among matrices or among vectors.
    """
    groups = optimizer.param_groups
    place = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    held = {name: place[id(p)] for name, p in model.named_parameters() if id(p) in place}
    flat = {name for name, p in model.named_parameters() if p.ndim <= 1}
    left_out = {id(p) for p in model.parameters()} - {*place}
    channels_last = any(_is_channels_last(p) for p in model.parameters())
    if len(held) < len(place):
        raise TrainingError("the optimizer holds parameters that are not the model's.")
    if change() is not model:
        raise LayerError(
            f"a bare {type(model).__name__} cannot change while it trains. Put it into a module: "
            "nn.Sequential(layer)."
        )
    if channels_last:  # as a run that is resumed will have it
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        alike = [old for old in held if (old in flat) == (parameter.ndim <= 1)]
        if parameter.requires_grad and id(parameter) not in left_out and alike:
            found[name] = held[max(alike, key=lambda old: _closeness(old, name))]
    for i, group in enumerate(groups):
        group["params"][:] = [p for name, p in model.named_parameters() if found.get(name) == i]
    optimizer.state.clear()


def _is_channels_last(parameter: Tensor) -> bool:
    last = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return last and not parameter.is_contiguous()


def _closeness(old: str, new: str) -> tuple[bool, int]:
    """Say how much two names have in common: all, or so many leading parts."""
    pairs = zip(old.split("."), new.split("."), strict=False)
    shared = 0
    for one, other in pairs:
        if one != other:
            break
        shared += 1
    return old == new, shared
