"""Add a kind of layer: nn.Bilinear becomes low-rank in one file.

    python examples/own_layer.py

The weight (out, in1, in2) is treated as a matrix with `out` rows, the product of u (out, r) and
v (r, in1 · in2): a bilinear map to r values, followed by a linear layer. Sampling, penalty,
shrinking, files, costs and export use this class; no other code changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod


class BilinearThenLinear(nn.Sequential):
    """The plain form of both factors: a Sequential whose first layer takes two inputs."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        first, second = self
        result: Tensor = second(first(input1, input2))
        return result


@lod.register(nn.Bilinear)
class LowRankBilinear(lod.LowRank):
    """Compute y = u·(x1ᵀ v x2) + bias at the active rank."""

    kind = "Bilinear"
    options = ("in1_features", "in2_features", "out_features")

    @classmethod
    def from_dense_shape(cls, dense: Any, rank: int | None = None) -> LowRankBilinear:
        out, in1, in2 = dense.weight.shape
        return cls.allocate(dense, rank, (out,), (in1, in2))

    @property
    def in1_features(self) -> int:
        return self.v.shape[1]

    @property
    def in2_features(self) -> int:
        return self.v.shape[2]

    @property
    def out_features(self) -> int:
        return self.u.shape[0]

    # -- computing -----------------------------------------------------------------------------

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return self.computed(input1, input2)

    def count_positions(self, *inputs: Tensor) -> int:
        return inputs[0].numel() // self.in1_features

    def apply_weight(self, weight: Tensor, *inputs: Tensor) -> Tensor:
        return F.bilinear(*inputs, weight, self.bias)

    def apply_factors(self, u: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        return F.linear(F.bilinear(*inputs, v), u, self.bias)  # (..., r), then (..., out)

    def to_weight(self, matrices: Tensor) -> Tensor:
        return matrices.view(self.out_features, self.in1_features, self.in2_features)

    def to_matrices(self, weight: Tensor) -> Tensor:
        return weight.reshape(1, self.out_features, -1)

    # -- plain forms ---------------------------------------------------------------------------

    def dense(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        return self._bilinear(self.out_features, self._compose(u, v), self.bias)

    def factored(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        first = self._bilinear(v.shape[0], v, None)
        second = nn.Linear(v.shape[0], self.out_features, bias=self.bias is not None)
        second.weight = nn.Parameter(u, self.trainable[0])
        if self.bias is not None:
            second.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return BilinearThenLinear(first, second).train(self.training)

    def _bilinear(self, out: int, weight: Tensor, bias: Tensor | None) -> nn.Bilinear:
        plain = nn.Bilinear(self.in1_features, self.in2_features, out, bias is not None, "meta")
        plain.weight = nn.Parameter(weight, self.trainable[0])
        if bias is not None:
            plain.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        return plain.train(self.training)


def main() -> None:
    torch.manual_seed(0)
    dense = nn.Bilinear(12, 10, 16)
    x1, x2 = torch.randn(5, 12), torch.randn(5, 10)
    expected = dense(x1, x2)
    layer = lod.decompose(dense)
    print(layer)
    print(f"largest difference at full rank: {(layer(x1, x2) - expected).abs().max():.1e}")
    small = lod.extract(layer, ranks=4)
    print(small)
    print(lod.summary(lod.decompose(nn.Bilinear(12, 10, 16), ranks=4), (x1, x2)))


if __name__ == "__main__":
    main()
