"""Torch-Pruning as a method: train, remove the channels with the smallest norms, train on.

Groups of dependent channels are removed together, so that the result consists of torch's own
layers. Channels are removed in small steps until the model is within the size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from maestro_lod.baselines.stages import Staged, epochs_of, exchange
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost, count_params
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.model.macs import dense_macs
from maestro_lod.train.method import setting
from maestro_lod.train.size_settings import SizedSettings

_STEPS = 200  # steps of pruning: the size is met to about a hundredth


@dataclass(frozen=True)
class TorchPruningSettings(SizedSettings):
    """Size, and the time of the pruning."""

    warmup: float = setting(0.5, "share of the run that trains the dense model", least=0.0)

    def __post_init__(self) -> None:
        if self.warmup >= 1.0:
            raise OptionError(
                f"warmup={self.warmup:g} leaves no epoch after the pruning. Set less than 1."
            )

    def reshape(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        narrow(model, {name: [*tensor.shape] for name, tensor in saved.items()})

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> TorchPruning:
        # raises for a size that cannot be reached
        prune(copy.deepcopy(model), example, int(self.size * dense.params))
        return TorchPruning(model, optimizer, settings=self, example=example, dense=dense)


class TorchPruning(Staged):
    """Trains a dense model, prunes it after the warm-up and trains the rest."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        settings: TorchPruningSettings,
        **common: Any,
    ) -> None:
        super().__init__(model, optimizer, **common)
        self.settings = settings
        self.pruned = False

    @property
    def stage(self) -> str:
        return "pruned" if self.pruned else "dense"

    def on_epoch_end(self, *, last: bool) -> None:
        if not self.pruned and self.epoch >= epochs_of(self.settings.warmup, self.plan.epochs):
            limit = int(self.settings.size * self.dense.params)
            self._exchanged(lambda: prune(self.model, self.example, limit))

    def reshape(self, state: dict[str, Any]) -> None:
        if state["pruned"]:
            self._exchanged(lambda: narrow(self.model, state["shapes"]))

    def _exchanged(self, change: Any) -> None:
        exchange(self.model, self.optimizer, change)
        self._macs = dense_macs(self.model, self.example).total
        self.pruned = True

    def state_dict(self) -> dict[str, Any]:
        shapes = {name: [*value.shape] for name, value in self.model.state_dict().items()}
        return {**super().state_dict(), "pruned": self.pruned, "shapes": shapes}


def prune(model: nn.Module, example: Any, limit: int) -> nn.Module:
    """Remove channels of the smallest norm, in place, until the model has at most `limit` params.

    The outputs of the last layer keep their number.
    """
    call = ModelInputs.from_example(example)
    if call.kwargs:
        raise OptionError(
            "torch-pruning does not support models with keyword inputs. Choose another method."
        )
    try:
        return _pruned(model, tuple(call.args), limit)
    except OptionError:
        raise
    except Exception as error:  # the package raises many types
        raise OptionError(
            f"torch-pruning cannot prune {type(model).__name__} ({type(error).__name__}: {error})."
        ) from error


def _pruned(model: nn.Module, inputs: tuple[Any, ...], limit: int) -> nn.Module:
    owners = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.ndim > 1}
    matrices = [m for name, m in model.named_modules() if name in owners]
    training = model.training
    pruner = torch_pruning.pruner.MagnitudePruner(
        model,
        inputs,
        importance=torch_pruning.importance.MagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=_STEPS,
        ignored_layers=matrices[-1:],
    )
    for _ in range(_STEPS):
        if count_params(model) <= limit:
            break
        pruner.step()
    model.train(training).zero_grad()
    if count_params(model) > limit:
        raise OptionError(
            f"torch-pruning cannot reduce {type(model).__name__} to {limit:,} params, only to "
            f"{count_params(model):,}. Choose a larger size."
        )
    return model


def narrow(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> nn.Module:
    """Change layers, in place, to the shapes of a pruned model whose values are loaded later."""
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            shape = shapes.get(f"{prefix}.{name}".lstrip("."))
            if tensor is None or shape is None or [*tensor.shape] == [*shape]:
                continue
            new = torch.zeros(*shape, dtype=tensor.dtype, device=tensor.device)
            if isinstance(tensor, nn.Parameter):
                setattr(module, name, nn.Parameter(new, requires_grad=tensor.requires_grad))
            else:
                module._buffers[name] = new
        _update_widths(module)
    return model


def _update_widths(module: nn.Module) -> None:
    """Set the numbers of channels of a layer to those of its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd) and not module.transposed:
        out, per_group = module.weight.shape[:2]
        if module.groups > 1 and per_group == 1:  # one kernel per channel
            module.groups = out
        module.out_channels, module.in_channels = out, per_group * module.groups
    elif isinstance(module, _NormBase) and module.running_mean is not None:
        module.num_features = len(module.running_mean)
