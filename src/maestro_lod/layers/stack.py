"""Low-rank stacks of matrices, one per expert; each row of the input is multiplied by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maestro_lod.layers.experts import Stack, StackedPivoted, StackedProduct, apply_stacked
from maestro_lod.layers.lowrank import LowRank, PlainForm, Rows, compose_is_cheaper
from maestro_lod.layers.registry import register

if TYPE_CHECKING:
    from typing_extensions import Self


@register(Stack)
class LowRankStack(LowRank):
    """A matrix u·v per expert; the experts are its groups, which share one rank.

    With one rank for all, the factors of all experts are two tensors, which train, shrink and are
    stored as those of any other layer.
    They have no pivoted form: its gather, of other rows for each expert, takes too long.
    """

    kind = "Experts"
    options = ()
    pivots = "u"
    transposed: bool

    @classmethod
    def from_dense_shape(cls, dense: Any, rank: int | None = None) -> Self:
        experts, m, n = (dense.weight.mT if dense.transposed else dense.weight).shape
        layer = cls.allocate(dense, rank, (experts * m,), (experts * n,), groups=experts)
        layer.transposed = dense.transposed
        return layer

    def to_weight(self, matrices: Tensor) -> Tensor:
        return matrices.mT if self.transposed else matrices

    def to_matrices(self, weight: Tensor) -> Tensor:
        return weight.mT if self.transposed else weight

    # -- computing -----------------------------------------------------------------------------

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:  # type: ignore[override]
        self.note_positions(len(rows))
        first, second = reversed(self._matrices(*self._active_factors()))
        if compose_is_cheaper(len(rows) // self.groups, *self.matrix_shape, first.shape[1]):
            return apply_stacked(rows, experts, second @ first)
        return apply_stacked(rows, experts, first, second)

    def count_positions(self, *inputs: Tensor) -> int:
        return len(inputs[0])

    def input_rows(self, *inputs: Any) -> Iterator[Rows]:
        rows, experts = inputs
        yield self._by_expert(rows, experts)

    def output_rows(self, output: Tensor, *inputs: Any) -> Rows:
        return self._by_expert(output, inputs[1])

    def _by_expert(self, rows: Tensor, experts: Tensor) -> Rows:
        return torch.split(rows, experts.bincount(minlength=self.groups).tolist())

    # every row is multiplied by the matrix of one expert

    def macs(self, positions: int, rank: int | None = None) -> int:
        return positions * self.weights(rank) // self.groups

    def dense_macs(self, positions: int) -> int:
        return positions * self.dense_weights // self.groups

    def plain_macs(self, form: PlainForm, positions: int, rank: int) -> int:
        if form == "pivoted":
            return positions * self.plain_weights(form, rank) // self.groups
        return super().plain_macs(form, positions, rank)

    def executed_macs(self, positions: int, rank: int) -> int:
        m, n = self.matrix_shape
        rank = max(rank, 1)
        if compose_is_cheaper(positions // self.groups, m, n, rank):
            return (positions + self.groups * rank) * m * n
        return self.macs(positions, rank)

    # -- plain forms ---------------------------------------------------------------------------

    def dense(self, rank: int | None = None) -> nn.Module:
        weight = self._compose(*self.truncated(rank)).contiguous()
        stack = Stack(nn.Parameter(weight, self.trainable[0]), transposed=self.transposed)
        return stack.train(self.training)

    def factored(self, rank: int | None = None) -> nn.Module:
        u, v = (
            nn.Parameter(f, t) for f, t in zip(self.truncated(rank), self.trainable, strict=True)
        )
        return StackedProduct(u, v, self.groups).train(self.training)

    def pivoted(self, rank: int | None = None) -> nn.Module:
        kept, others, rows = self._pivoted_matrices(rank)
        trainable = self.trainable[0]
        return StackedPivoted(
            nn.Parameter(kept, trainable), nn.Parameter(others, trainable), rows.argsort(1)
        ).train(self.training)

    def extra_repr(self) -> str:
        m, n = self.matrix_shape
        return f"{self.groups} experts, {m}×{n}, {self._repr_rank()}"
