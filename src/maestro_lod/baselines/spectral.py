"""Spectral initialization and Frobenius decay of factors (Khodak et al., ICLR 2021).

Before training, every chosen layer is replaced by the leading singular directions of its initial
weight; a k×k convolution by a 1×k and a k×1 one. Weight decay applies to the product of factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maestro_lod.baselines.factorized import Factorizing
from maestro_lod.baselines.frobenius import FrobeniusDecay, Pair
from maestro_lod.baselines.stages import Staged
from maestro_lod.errors import OptionError
from maestro_lod.layers.plain import is_linear_or_conv
from maestro_lod.layers.svd import svd_factors
from maestro_lod.model.cost import Cost, count_params
from maestro_lod.model.survey import Plan
from maestro_lod.train.method import setting
from maestro_lod.train.size_settings import (
    MORE_LAYERS,
    RANK_1,
    SizedSettings,
    largest_share,
    require_reachable,
)


@dataclass(frozen=True)
class SpectralSettings(Factorizing, SizedSettings):
    """Size, from which one share ρ of all full ranks follows, and decay."""

    frobenius_decay: float | None = setting(
        None, "decay of the products of factors; null: the weight decay", least=0.0
    )

    def __post_init__(self) -> None:
        if self.decompose.ranks is not None:
            raise OptionError(
                "decompose.ranks is not used by spectral, whose size determines the ranks. Remove "
                "it."
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        return factorized(model, self.ranks(model))

    def ranks(self, model: nn.Module) -> dict[str, int]:
        """Return the rank within the size of each layer of a dense model to factorize."""
        found = Plan(model, **self.choice(model)).planned()
        modules = dict(model.named_modules())
        layers = {name: modules[name] for name in found if _can_be_pair(modules.get(name))}
        if not layers:
            raise OptionError(
                f"{type(model).__name__} has no linear layer or convolution that can be "
                "factorized. "
                "Choose another method."
            )
        shapes = {name: _matrix(layer.weight).shape for name, layer in layers.items()}
        dense = count_params(model)

        def at(share: float) -> dict[str, int]:
            return {name: _rank(share, layers[name], *shape) for name, shape in shapes.items()}

        def params(ranks: Mapping[str, int]) -> int:
            return dense + sum(r * sum(shapes[n]) - shapes[n].numel() for n, r in ranks.items())

        least = params(at(0.0)) / dense
        require_reachable(self.size, least, RANK_1, MORE_LAYERS)
        return at(largest_share(lambda share: params(at(share)) <= self.size * dense))

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Spectral:
        return Spectral(
            model, optimizer, decay=self.frobenius_decay, example=example, dense=dense
        )  # fmt: skip


class FactorPair(nn.Sequential):
    """Two layers in place of one; the rank is the number of channels between them."""


def _can_be_pair(layer: nn.Module | None) -> bool:
    named = isinstance(getattr(layer, "padding", 0), str)  # such as "same"
    return is_linear_or_conv(layer) and not named and getattr(layer, "groups", 1) == 1


def _rank(share: float, layer: Any, m: int, n: int) -> int:
    """Return the rank at a share ρ of m for convolutions, as in the paper's code, else of min."""
    of = m if layer.weight.ndim == 4 else min(m, n)
    return max(1, min(round(share * of), m, n))


def _matrix(weight: Any) -> Tensor:
    """Return a weight as a matrix: (out·k, in·k) for convolutions."""
    matrix: Tensor = weight.detach()
    return matrix.permute(0, 2, 1, 3).flatten(2).flatten(0, 1) if weight.ndim == 4 else matrix


def factorized(model: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """Replace layers, in place, by pairs with their leading singular directions."""
    for name, rank in ranks.items():
        layer: Any = model.get_submodule(name)
        make: Callable[[Any, int], FactorPair] = _conv if layer.weight.ndim == 4 else _linear
        model.set_submodule(name, make(layer, rank))
    return model


@torch.no_grad()
def _linear(dense: nn.Linear, rank: int) -> FactorPair:
    left, right = (f[0] for f in svd_factors(_matrix(dense.weight)[None], rank))
    first = nn.Linear(dense.in_features, rank, bias=False)
    second = nn.Linear(rank, dense.out_features, bias=dense.bias is not None)
    return _filled(dense, first, right, second, left)


@torch.no_grad()
def _conv(dense: nn.Conv2d, rank: int) -> FactorPair:
    left, right = (f[0] for f in svd_factors(_matrix(dense.weight)[None], rank))
    into, out, (k1, k2) = dense.in_channels, dense.out_channels, dense.kernel_size
    bias, options = dense.bias is not None, ("stride", "padding", "dilation")
    none = {"stride": 1, "padding": 0, "dilation": 1}
    across: dict[str, Any] = {key: (none[key], getattr(dense, key)[1]) for key in options}
    down: dict[str, Any] = {key: (getattr(dense, key)[0], none[key]) for key in options}
    first = nn.Conv2d(into, rank, (1, k2), bias=False, **across)
    second = nn.Conv2d(rank, out, (k1, 1), bias=bias, **down)
    u = left.reshape(out, k1, rank).transpose(1, 2)
    return _filled(dense, first, right.reshape(rank, into, 1, k2), second, u[..., None])


def _filled(dense: Any, first: Any, v: Tensor, second: Any, u: Tensor) -> FactorPair:
    first.weight.copy_(v)
    second.weight.copy_(u)
    if dense.bias is not None:
        second.bias.copy_(dense.bias)
    pair = FactorPair(first, second)
    return pair.to(dense.weight.device, dense.weight.dtype).train(dense.training)


class Spectral(Staged):
    """Trains factors with Frobenius decay."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, decay: float | None, **common: Any
    ) -> None:
        super().__init__(model, optimizer, **common)
        pairs: list[Any] = [m for m in self.model.modules() if isinstance(m, FactorPair)]
        factors = [Pair(second.weight, first.weight) for first, second in pairs]
        self.decay = FrobeniusDecay(optimizer, factors, decay)

    def after_backward(self, weight: float) -> None:
        self.decay.add_gradients(weight)
