"""XNOR-Net (Rastegari et al., ECCV 2016): one bit per weight and per input.

Every linear layer and convolution except the first and the last becomes BatchNorm, sign and a
product with binary weights. The method determines the size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.baselines.binary import Binary, center_and_clamp
from maestro_lod.baselines.stages import Staged
from maestro_lod.errors import LayerError, OptionError, suggest
from maestro_lod.layers.plain import is_linear_or_conv
from maestro_lod.layers.ranks import matches
from maestro_lod.model.cost import Cost, count_bits, count_params
from maestro_lod.model.macs import dense_macs
from maestro_lod.train.method import Settings, setting
from maestro_lod.train.progress import MethodRecord


@dataclass(frozen=True)
class XNORSettings(Settings):
    """Layers that stay real, and scaling of inputs."""

    real: list[str] = setting([], "patterns of further layers that stay real")
    input_scale: bool = setting(False, "scale outputs by the mean absolute input, as in the paper")

    def prepare(self, model: nn.Module) -> nn.Module:
        layers = {name: m for name, m in model.named_modules() if is_linear_or_conv(m)}
        for pattern in self.real:
            if not any(matches(name, pattern) for name in layers):
                raise LayerError(f"real={pattern!r} matches no layer.{suggest(pattern, layers)}")
        chosen = [
            name
            for name in [*layers][1:-1]
            if layers[name].weight.shape[1] > 1  # centring would set a single input to zero
            and not any(matches(name, pattern) for pattern in self.real)
        ]
        if not chosen:
            raise OptionError(
                f"{type(model).__name__} has no layer between the first and the last one that can "
                "be binary."
            )
        for name in chosen:
            model.set_submodule(name, Binary(layers[name], input_scale=self.input_scale))
        return model

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> XNOR:
        return XNOR(model, optimizer, example=example, dense=dense)


class XNOR(Staged):
    """Trains the real weights of binary layers, centred and within [−1, 1]."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **common: Any) -> None:
        super().__init__(model, optimizer, **common)
        modules = self.model.named_modules()
        self.layers = {name: m for name, m in modules if isinstance(m, Binary)}
        counted = dense_macs(self.model, self.example).layers
        self._binary_macs = sum(counted.get(name, 0) for name in self.layers)
        optimizer.register_step_post_hook(lambda *_: self._keep_centred())

    def _keep_centred(self) -> None:
        for layer in self.layers.values():
            center_and_clamp(layer.weight)

    def record(self) -> MethodRecord:
        """Return the record, with one bit per binary weight and one scale per row."""
        weights = sum(layer.weight.numel() for layer in self.layers.values())
        rows = sum(layer.weight.shape[0] for layer in self.layers.values())
        real_bits = sum(8 * layer.weight.nbytes for layer in self.layers.values())
        bits = count_bits(self.model) - real_bits + weights + 32 * rows
        params = count_params(self.model) + rows
        return dataclasses.replace(
            super().record(),
            params=params,
            relative_params=params / self.dense.params,
            bits=bits,
            relative_bits=bits / (32 * self.dense.params),
            others={"binary_macs": self._binary_macs},
        )
