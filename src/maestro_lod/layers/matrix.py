"""Low-rank weight matrices that another module multiplies by, such as a recurrent layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from maestro_lod.layers.lowrank import LowRank, PlainForm, Rows
from maestro_lod.layers.recurrent import Matrix, PivotedProduct, Product
from maestro_lod.layers.registry import register


@register(Matrix)
class LowRankMatrix(LowRank):
    """A weight matrix u·v that another module multiplies by; it has no forward."""

    kind = "Matrix"
    options = ()
    pivots = "u"

    def output_rows(self, output: Tensor, *inputs: Any) -> Rows:
        return [output.reshape(-1, self.matrix_shape[0])]

    # torch's recurrent kernels take dense weights, so factors save parameters and no MACs

    @property
    def slow(self) -> str:
        return "not faster, since the factors are multiplied in every step"

    def plain_macs(self, form: PlainForm, positions: int, rank: int) -> int:
        return self.dense_macs(positions)

    def executed_macs(self, positions: int, rank: int) -> int:
        return (positions + rank) * self.dense_weights

    def dense(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        return Matrix(nn.Parameter(u @ v, self.trainable[0])).train(self.training)

    def factored(self, rank: int | None = None) -> nn.Module:
        u, v = (
            nn.Parameter(f, t) for f, t in zip(self.truncated(rank), self.trainable, strict=True)
        )
        return Product(u, v).train(self.training)

    def pivoted(self, rank: int | None = None) -> nn.Module:
        (kept,), (others,), (rows,) = self._pivoted_matrices(rank)
        trainable = self.trainable[0]
        return PivotedProduct(
            nn.Parameter(kept, trainable), nn.Parameter(others, trainable), rows.argsort()
        ).train(self.training)

    def extra_repr(self) -> str:
        return f"{self.u.shape[0]}, {self.v.shape[1]}, {self._repr_rank()}"
