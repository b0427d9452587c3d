"""Train the dense model, with which every other method is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.layers.ranks import low_rank_layers, unwrapped
from maestro_lod.model.cost import Cost, count_bits, count_params
from maestro_lod.train.method import RunPlan, Settings
from maestro_lod.train.progress import MethodRecord


@dataclass(frozen=True)
class DenseSettings(Settings):
    """Settings of dense training, which has no options."""

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Dense:
        return Dense(dense)


class Dense:
    """Trains the dense model."""

    def __init__(self, dense: Cost | None = None) -> None:
        self._cost = dense

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        if low_rank_layers(model):
            raise OptionError(
                f"{type(model).__name__} is low-rank, but fit has no method for it. "
                "Give method=LoD(model, optimizer, …) or another one."
            )
        self._model = unwrapped(model)

    def backward(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Tensor:
        value = loss(forward())
        if not bool(value.detach().isfinite()):
            raise TrainingError(
                f"the loss is {value.item()}. Lower the learning rate or clip gradients."
            )
        (value * weight).backward()  # type: ignore[no-untyped-call]
        self.after_backward(weight)
        return value.detach() * weight

    def after_backward(self, weight: float) -> None:
        """Change the gradients of a batch, which were multiplied by the weight."""

    def end_epoch(self, *, last: bool) -> None:
        pass

    def record(self) -> MethodRecord:
        macs = None if self._cost is None else self._cost.macs
        return MethodRecord(
            params=count_params(self._model),
            macs=macs,
            relative_params=1.0,
            relative_macs=None if macs is None else 1.0,
            bits=count_bits(self._model),
            relative_bits=1.0,
        )

    def training_cost(self) -> dict[str, float | None] | None:
        return {"relative_params": 1.0, "relative_macs": 1.0, "relative_executed_macs": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
