"""Low-rank `nn.Linear`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.layers.lowrank import LowRank, Rows, with_parameters
from maestro_lod.layers.pivoted import PivotedInputs
from maestro_lod.layers.registry import register, registered_base

if TYPE_CHECKING:
    from typing_extensions import Self


@register(nn.Linear)
@register("transformers.models.falcon.modeling_falcon.FalconLinear")
@register("torch_geometric.nn.dense.linear.Linear")
class LowRankLinear(LowRank):
    """y = u·(v·x) + bias, at the active rank."""

    kind = "Linear"
    options = ("in_features", "out_features")
    positionwise = True
    pivots = "v"

    @property
    def in_features(self) -> int:
        return self.v.shape[1]

    @property
    def out_features(self) -> int:
        return self.u.shape[0]

    def count_positions(self, *inputs: Tensor) -> int:
        return inputs[0].numel() // self.in_features

    def input_rows(self, *inputs: Any) -> Iterator[Rows]:
        yield [inputs[0].reshape(-1, self.in_features)]

    def output_rows(self, output: Tensor, *inputs: Any) -> Rows:
        return [output.reshape(-1, self.out_features)]

    def apply_weight(self, weight: Tensor, *inputs: Tensor) -> Tensor:
        return F.linear(inputs[0], weight, self.bias)

    def apply_factors(self, u: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        return F.linear(F.linear(inputs[0], v), u, self.bias)  # (..., rank), then (..., out)

    def dense(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        has_bias = self.bias is not None
        plain = nn.Linear(self.in_features, self.out_features, bias=has_bias, device="meta")
        return with_parameters(plain, self, u @ v, bias=True)

    def factored(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        has_bias, rank = self.bias is not None, v.shape[0]
        first = nn.Linear(self.in_features, rank, bias=False, device="meta")
        second = nn.Linear(rank, self.out_features, bias=has_bias, device="meta")
        return nn.Sequential(
            with_parameters(first, self, v, bias=False), with_parameters(second, self, u, bias=True)
        ).train(self.training)

    def pivoted(self, rank: int | None = None) -> nn.Module:
        (kept,), (others,), (columns,) = self._pivoted_matrices(rank)
        r, has_bias = len(kept), self.bias is not None
        first = nn.Linear(len(others), r, bias=False, device="meta")
        second = nn.Linear(r, self.out_features, bias=has_bias, device="meta")
        return PivotedInputs(
            with_parameters(first, self, others.mT, bias=False),
            with_parameters(second, self, kept.mT, bias=True),
            columns[:r],
            columns[r:],
        ).train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, " + (
            self._repr_rank()
        )


@register("transformers.pytorch_utils.Conv1D")
class LowRankTransposedLinear(LowRankLinear):
    """A linear layer whose dense weight is stored as (in, out), as Hugging Face's `Conv1D` does."""

    kind = "Conv1D"
    _dense_type: type[nn.Module]

    @classmethod
    def from_dense_shape(cls, dense: Any, rank: int | None = None) -> Self:
        into, out = dense.weight.shape
        layer = cls.allocate(dense, rank, (out,), (into,))
        layer._dense_type = registered_base(type(dense)) or type(dense)
        return layer

    @property
    def weight(self) -> Tensor:
        return super().weight.mT

    def to_weight(self, matrices: Tensor) -> Tensor:
        return matrices[0].mT

    def _as_applied(self, matrices: Tensor) -> Tensor:
        return matrices[0]

    def to_matrices(self, weight: Tensor) -> Tensor:
        return weight.mT[None]

    def dense(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        with torch.device("meta"):
            layer = self._dense_type(self.out_features, self.in_features)
        return with_parameters(layer, self, (u @ v).mT, bias=True)

    def plain_dense(self, rank: int | None = None) -> nn.Module:
        return super().dense(rank)
