"""Base class of methods that train by the plain loss and may replace layers between epochs."""

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
    """Trains by the plain loss, records epoch costs, and may change the model after an epoch."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, example: Example, dense: Cost
    ) -> None:
        self.model, self.optimizer = unwrapped(model), optimizer
        self.example, self.dense = example, dense
        self.ledger = Ledger(dense.params, dense.macs)
        self.plan = RunPlan(0, None)
        """Plan at the start of the run; a run that is extended later continues its last stage."""
        self._macs = dense_macs(self.model, example).total  # valid while no layer is low-rank

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return len(self.ledger.epochs)

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        if self.optimizer is not optimizer or self.model is not unwrapped(model):
            kind = type(self).__name__
            raise OptionError(
                f"{kind} was created for a model or optimizer other than the one that fit was "
                "given."
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise OptionError(
                f"{type(self).__name__} does not support DistributedDataParallel. Train in one "
                "process, with the unwrapped module."
            )
        epochs = self.plan.epochs or plan.epochs
        self.plan = RunPlan(epochs, plan.steps_per_epoch, plan.schedule, plan.loss_of)

    def end_epoch(self, *, last: bool) -> None:
        self.ledger.epochs.append(self._epoch_cost())
        self.on_epoch_end(last=last)

    def on_epoch_end(self, *, last: bool) -> None:
        """Change the model after an epoch whose cost is recorded; by default not at all."""

    def _epoch_cost(self) -> EpochCost:
        if low_rank_layers(self.model):
            return self.ledger.epoch_cost(self.model, {})
        return EpochCost({}, count_params(self.model), self._macs, self._macs)

    @property
    def stage(self) -> str | None:
        """Name of the current stage; None for methods with a single one."""
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
    """Return a share of a run in epochs: at least 1 unless the share is 0, and never all."""
    return max(min(round(share * epochs), epochs - 1), 1 if share else 0)


def exchange(model: nn.Module, optimizer: Optimizer, change: Callable[[], nn.Module]) -> None:
    """Replace layers of a model in place; give the optimizer their parameters and reset it.

    New parameters join the group of the parameter with the same name, or else of the one with the
    closest name among those of the same kind (matrices, or vectors).
    """
    groups = optimizer.param_groups
    place = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    held = {name: place[id(p)] for name, p in model.named_parameters() if id(p) in place}
    flat = {name for name, p in model.named_parameters() if p.ndim <= 1}
    left_out = {id(p) for p in model.parameters()} - {*place}
    channels_last = any(_is_channels_last(p) for p in model.parameters())
    if len(held) < len(place):
        raise TrainingError(
            "the optimizer has parameters that the model does not have. Create it for this model."
        )
    if change() is not model:
        raise LayerError(
            f"a single {type(model).__name__} cannot be replaced during training. Wrap it: "
            "nn.Sequential(layer)."
        )
    if channels_last:  # so that resumed runs have the same layout
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
    """Return whether two names are equal, and the number of leading parts that they share."""
    pairs = zip(old.split("."), new.split("."), strict=False)
    shared = 0
    for one, other in pairs:
        if one != other:
            break
        shared += 1
    return old == new, shared
