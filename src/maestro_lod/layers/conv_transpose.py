"""Low-rank transposed convolutions in one, two and three dimensions.

The layer becomes a 1×1 convolution to `rank` channels and a k×k transposed convolution, so that
both factors run at the same positions. With groups, every group has its own factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvTransposeNd

from maestro_lod.layers.conv import CONV, CONV_TYPE, AnyConv
from maestro_lod.layers.lowrank import Rows, with_parameters
from maestro_lod.layers.pivoted import PivotedInputs
from maestro_lod.layers.registry import register

if TYPE_CHECKING:
    from typing_extensions import Self

_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_CONV_TRANSPOSE_TYPE: dict[int, type[_ConvTransposeNd]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}


@register(nn.ConvTranspose1d)
@register(nn.ConvTranspose2d)
@register(nn.ConvTranspose3d)
class LowRankConvTranspose(AnyConv):
    """`nn.ConvTranspose1d/2d/3d` as v (1×1, to the active rank), then u (k×k, transposed)."""

    pivots = "v"

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"ConvTranspose{self.dimensions}d"

    @classmethod
    def from_dense_shape(cls, dense: Any, rank: int | None = None) -> Self:
        out = dense.out_channels, *dense.kernel_size
        layer = cls.allocate(dense, rank, out, (dense.in_channels,), dense.groups)
        return layer._take_options(dense)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if output_size is None:
            return super().forward(input)
        self.dense_only = True  # two plain layers have no output_size
        configured = self.output_padding
        torch_rule: Any = _ConvTransposeNd._output_padding  # which checks the output size
        self.output_padding = tuple(
            torch_rule(
                self, input, output_size, self.stride, self.padding, self.kernel_size,
                self.dimensions, self.dilation,
            )
        )  # fmt: skip
        try:
            return super().forward(input)
        finally:
            self.output_padding = configured

    def count_positions(self, *inputs: Tensor) -> int:
        return inputs[0].numel() // self.in_channels

    def input_rows(self, *inputs: Any) -> Iterator[Rows]:
        yield self._by_group(self._batched(inputs[0]))

    def output_rows(self, output: Tensor, *inputs: Any) -> Rows:
        amounts = [(amount, amount) for amount in self.padding]
        # each input position adds a patch to the outputs
        return self._by_group(self._patches(self._batched(output), amounts))

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        conv: Any = _CONV_TRANSPOSE[self.dimensions]
        y: Tensor = conv(
            x, weight, self.bias, self.stride, self.padding, self.output_padding, self.groups,
            self.dilation,
        )  # fmt: skip
        return y

    def apply_weight(self, weight: Tensor, *inputs: Tensor) -> Tensor:
        return self._convolve(inputs[0], weight)

    def apply_factors(self, u: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        u, v = self._padded(u, v)
        z = CONV[self.dimensions](inputs[0], self._pointwise(self._first(v)), groups=self.groups)
        return self._convolve(z, self._second(u))  # z is (N, groups · rank, *positions)

    def _second(self, u: Tensor) -> Tensor:
        """Reshape (out, r, *k) to (groups · r, out/groups, *k)."""
        if self.groups == 1:
            return u.transpose(0, 1)
        grouped = u.view(self.groups, -1, *u.shape[1:])  # (groups, out/groups, r, *k)
        return grouped.transpose(1, 2).flatten(0, 1)

    def to_weight(self, matrices: Tensor) -> Tensor:
        out = self.out_channels // self.groups
        return matrices.mT.reshape(self.in_channels, out, *self.kernel_size)

    def to_matrices(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, self.in_channels // self.groups, -1).mT

    def dense(self, rank: int | None = None) -> nn.Module:
        weight = self._compose(*self.truncated(rank))
        return self._plain_transposed(self.in_channels, weight)

    def factored(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        conv: Any = CONV_TYPE[self.dimensions]
        middle = self.groups * v.shape[0]
        first = conv(self.in_channels, middle, 1, groups=self.groups, bias=False, device="meta")
        return nn.Sequential(
            with_parameters(first, self, self._pointwise(self._first(v)), bias=False),
            self._plain_transposed(middle, self._second(u)),
        ).train(self.training)

    def pivoted(self, rank: int | None = None) -> nn.Module:
        kept, others, columns = self._pivoted_matrices(rank)
        (groups, r, _), others_count = kept.shape, others.shape[1]
        columns = columns + torch.arange(groups, device=columns.device)[:, None] * (
            r + others_count
        )
        conv: Any = CONV_TYPE[self.dimensions]
        middle = groups * r
        first = conv(groups * others_count, middle, 1, groups=groups, bias=False, device="meta")
        out = self.out_channels // groups
        return PivotedInputs(
            with_parameters(first, self, self._pointwise(others.mT.flatten(0, 1)), bias=False),
            self._plain_transposed(middle, kept.reshape(middle, out, *self.kernel_size)),
            columns[:, :r],
            columns[:, r:],
            dim=-1 - self.dimensions,
        ).train(self.training)

    def _plain_transposed(self, into: int, weight: Tensor) -> nn.Module:
        conv: Any = _CONV_TRANSPOSE_TYPE[self.dimensions]
        bias, more = self.bias is not None, {"output_padding": self.output_padding}
        plain = conv(into, self.out_channels, bias=bias, **more, **self._options())
        return with_parameters(plain, self, weight, bias=True)
