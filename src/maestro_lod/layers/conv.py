"""Low-rank convolutions in one, two and three dimensions.

A convolution becomes a k×k convolution to `rank` channels, which carries stride, padding and
dilation, and a 1×1 convolution. Both factors thus run at the same positions, and the
cheaper form is the same by parameters and by MACs. With groups, every group has its own factors and
all share one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from maestro_lod.layers.lowrank import (
    INTERMEDIATE_COST,
    LowRank,
    Rows,
    plain_bias,
    with_parameters,
)
from maestro_lod.layers.pivoted import PivotedOutputs
from maestro_lod.layers.registry import register

if TYPE_CHECKING:
    from typing_extensions import Self

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TYPE: dict[int, type[_ConvNd]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

_SCALARS_AT_ONCE = 2**24  # the largest number of scalars of patches in memory

# Torch's kernels for groups on a CPU want 8, or a multiple of 16, channels in each. For any other
# number they are up to three times slower, so that ranks of zeros pay; and moving a value costs
# more. Fitted by `benchmarks/switch.py --groups`.
_MOVING_ONE_VALUE_OF_A_GROUP = 192


def _has_channels_last(weight: Tensor) -> bool:
    """Return whether a kernel's memory format is channels last."""
    return weight.stride(1) == 1 and not weight.is_contiguous()


def _taps(weight: Tensor) -> Tensor:
    """View (out, in, *kernel) as (out, kernel, in)."""
    if _has_channels_last(weight):
        return weight.movedim(1, -1).flatten(1, -2)
    return weight.flatten(2).mT


class AnyConv(LowRank):
    """Base of plain and transposed convolutions: the options of torch's layers."""

    options = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups",
        "padding_mode", "output_padding",
    )  # fmt: skip

    def _take_options(self, dense: _ConvNd) -> Self:
        self.in_channels, self.out_channels = dense.in_channels, dense.out_channels
        self.kernel_size, self.padding_mode = dense.kernel_size, dense.padding_mode
        # a user may have set them to a number afterwards
        self.stride, self.dilation = self._each(dense.stride), self._each(dense.dilation)
        self.padding, self.output_padding = self._each(dense.padding), dense.output_padding
        return self

    def _each(self, option: Any) -> Any:
        """Expand an option that is one number to one number per dimension."""
        return (option,) * self.dimensions if isinstance(option, int) else option

    @property
    def dimensions(self) -> int:
        return len(self.kernel_size)

    def _options(self) -> dict[str, Any]:
        return {
            "kernel_size": self.kernel_size,
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "padding_mode": self.padding_mode,
            "device": "meta",
        }

    def _pointwise(self, weight: Tensor) -> Tensor:
        """Reshape (out, in) to the weight of a 1×1 convolution."""
        return weight.view(*weight.shape, *[1] * self.dimensions)

    def padded_rank(self, rank: int) -> int:
        if self.groups == 1 or self.u.device.type != "cpu" or torch.compiler.is_compiling():
            return rank
        return 8 if rank <= 8 else -(-rank // 16) * 16

    @property
    def slow(self) -> str:
        grouped = self.groups > 1 and self.u.device.type == "cpu"
        return "hardly faster, as groups of few channels are slow" if grouped else ""

    @property
    def intermediate_cost(self) -> int:
        return INTERMEDIATE_COST if self.groups == 1 else _MOVING_ONE_VALUE_OF_A_GROUP

    def _padded(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Pad factors with ranks of zeros to the rank that the kernel computes with."""
        missing = self.padded_rank(v.shape[0]) - v.shape[0]
        if missing == 0:
            return u, v
        behind_u, behind_v = [0, 0] * (u.ndim - 2), [0, 0] * (v.ndim - 1)
        return F.pad(u, [*behind_u, 0, missing]), F.pad(v, [*behind_v, 0, missing])

    def _first(self, v: Tensor) -> Tensor:
        """Reshape (r, in, *k) to a convolution's weight (groups · r, in/groups, *k)."""
        if self.groups == 1:
            return v
        grouped = v.view(v.shape[0], self.groups, -1, *v.shape[2:])
        return grouped.transpose(0, 1).flatten(0, 1)

    def _patches(self, x: Tensor, paddings: Sequence[tuple[int, int]]) -> Tensor:
        """Return the patches (N, channels, *positions, *kernel) under the kernel."""
        amounts = [amount for both in reversed(paddings) for amount in both]
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        x = F.pad(x, amounts, mode=mode)
        for i, (size, step) in enumerate(zip(self.kernel_size, self.stride, strict=True)):
            reach = self.dilation[i] * (size - 1) + 1
            x = x.unfold(2 + i, reach, step)[..., :: self.dilation[i]]
        return x

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.ndim == self.dimensions + 2 else x[None]

    def _by_group(self, x: Tensor) -> Rows:
        """Reshape (N, channels, *positions, *kernel) to rows for each group of channels."""
        grouped = x.reshape(len(x), self.groups, -1, *x.shape[2:])
        grouped = grouped.movedim(1, 0).movedim(2, 2 + self.dimensions)  # channels behind positions
        return tuple(grouped.flatten(1, 1 + self.dimensions).flatten(2).unbind())

    def extra_repr(self) -> str:
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
        )
        if any(self.output_padding):
            text += f"output_padding={self.output_padding}, "
        if self.padding_mode != "zeros":
            text += f"padding_mode={self.padding_mode}, "
        return f"{text}groups={self.groups}, {self._repr_rank()}"


@register(nn.Conv1d)
@register(nn.Conv2d)
@register(nn.Conv3d)
class LowRankConv(AnyConv):
    """`nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d` as v (k×k, to the active rank), then u (1×1)."""

    positionwise = True
    pivots = "u"

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"Conv{self.dimensions}d"

    @classmethod
    def from_dense_shape(cls, dense: Any, rank: int | None = None) -> Self:
        into = dense.in_channels, *dense.kernel_size
        layer = cls.allocate(dense, rank, (dense.out_channels,), into, dense.groups)
        layer._take_options(dense)
        if layer.padding_mode != "zeros" and not isinstance(layer.padding, str):
            # torch uses the padding of its construction, last dimension first
            layer.padding = tuple(dense._reversed_padding_repeated_twice[::-2])
        return layer

    def _paddings(self) -> list[tuple[int, int]]:
        """Return the padding before and behind each dimension."""
        if self.padding == "valid":
            return [(0, 0)] * self.dimensions
        if self.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [(total // 2, total - total // 2) for total in totals]
        return [(amount, amount) for amount in self.padding]

    def count_positions(self, *inputs: Tensor) -> int:
        (x,), dims = inputs, self.dimensions
        count = x.shape[0] if x.ndim == dims + 2 else 1
        for i, (before, behind) in enumerate(self._paddings()):
            reach = self.dilation[i] * (self.kernel_size[i] - 1)
            size = x.shape[i - dims] + before + behind
            count *= (size - reach - 1) // self.stride[i] + 1
        return count

    def input_rows(self, *inputs: Any) -> Iterator[Rows]:
        x = self._batched(inputs[0])
        size = max(1, self.count_positions(x[:1]) * self.groups * self.matrix_shape[1])
        for part in torch.split(x, max(1, _SCALARS_AT_ONCE // size)):
            yield self._by_group(self._patches(part, self._paddings()))

    def output_rows(self, output: Tensor, *inputs: Any) -> Rows:
        return self._by_group(self._batched(output))

    def input_key(self) -> tuple[Any, ...]:
        return (
            *super().input_key(), self.kernel_size, self.stride, self.padding, self.dilation,
            self.groups, self.padding_mode,
        )  # fmt: skip

    def computed(self, *inputs: Tensor) -> Tensor:
        tap = self._only_tap(inputs[0])
        if tap is None or self.identity_factor is not None:
            return super().computed(*inputs)
        # with one value per channel and kernel these are linear layers, which are faster
        x = inputs[0].flatten(1)
        self.note_positions(len(x))
        u, v = self._active_factors()
        y = F.linear(F.linear(x, _taps(v)[:, tap]), u, self.bias)
        return y.view(*y.shape, *[1] * self.dimensions)

    def _only_tap(self, x: Tensor) -> int | None:
        """Return the one kernel value that applies to images of one pixel, None if several do."""
        if x.shape[-1] != 1 or x.ndim != self.dimensions + 2 or set(x.shape[2:]) != {1}:
            return None
        if self.groups > 1 or self.padding_mode != "zeros":
            return None
        tap = 0
        for i, (before, behind) in enumerate(self._paddings()):
            at, between = divmod(before, self.dilation[i])
            reach = self.dilation[i] * (self.kernel_size[i] - 1)
            if between or at >= self.kernel_size[i] or before + behind - reach >= self.stride[i]:
                return None
            tap = tap * self.kernel_size[i] + at
        return tap

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            amounts = [amount for both in reversed(self._paddings()) for amount in both]
            x, padding = F.pad(x, amounts, mode=self.padding_mode), (0,) * self.dimensions
        elif isinstance(padding, str) and all(a == b for a, b in self._paddings()):
            padding = tuple(before for before, _ in self._paddings())
        conv = CONV[self.dimensions]
        return conv(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def apply_weight(self, weight: Tensor, *inputs: Tensor) -> Tensor:
        return self._convolve(inputs[0], weight, self.bias)

    def apply_factors(self, u: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        u, v = self._padded(u, v)
        z = self._convolve(inputs[0], self._first(v), None)  # (N, groups · rank, *positions)
        return CONV[self.dimensions](z, self._pointwise(u), self.bias, groups=self.groups)

    def _compose(self, u: Tensor, v: Tensor) -> Tensor:
        if self.groups > 1:
            return super()._compose(u, v)
        if _has_channels_last(v):  # multiplied in its memory layout, without a copy
            last = v.movedim(1, -1)
            return (u @ last.flatten(1)).view(-1, *last.shape[1:]).movedim(-1, 1)
        return (u @ v.flatten(1)).view(-1, *v.shape[1:])  # all in one product

    def to_weight(self, matrices: Tensor) -> Tensor:
        into = self.in_channels // self.groups
        return matrices.reshape(self.out_channels, into, *self.kernel_size)

    def to_matrices(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, self.out_channels // self.groups, -1)

    def dense(self, rank: int | None = None) -> nn.Module:
        weight = self._compose(*self.truncated(rank))
        conv: Any = CONV_TYPE[self.dimensions]
        bias = self.bias is not None
        plain = conv(self.in_channels, self.out_channels, bias=bias, **self._options())
        return with_parameters(plain, self, weight, bias=True)

    def factored(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        conv: Any = CONV_TYPE[self.dimensions]
        middle, bias = self.groups * v.shape[0], self.bias is not None
        first = conv(self.in_channels, middle, bias=False, **self._options())
        second = conv(middle, self.out_channels, 1, groups=self.groups, bias=bias, device="meta")
        return nn.Sequential(
            with_parameters(first, self, self._first(v), bias=False),
            with_parameters(second, self, self._pointwise(u), bias=True),
        ).train(self.training)

    def pivoted(self, rank: int | None = None) -> nn.Module:
        kept, others, rows = self._pivoted_matrices(rank)
        (groups, r, _), others_count = kept.shape, others.shape[1]
        order = rows.argsort(1)
        # in the outputs of both convolutions, one group follows the other
        group = torch.arange(groups, device=order.device)[:, None]
        behind = (groups - 1) * r + group * others_count
        order = order + torch.where(order < r, group * r, behind)
        conv: Any = CONV_TYPE[self.dimensions]
        first = conv(self.in_channels, groups * r, bias=False, **self._options())
        second = conv(
            groups * r, groups * others_count, 1, groups=groups, bias=False, device="meta"
        )
        into = self.in_channels // groups
        return PivotedOutputs(
            with_parameters(
                first, self, kept.reshape(groups * r, into, *self.kernel_size), bias=False
            ),
            with_parameters(second, self, self._pointwise(others.flatten(0, 1)), bias=False),
            order,
            plain_bias(self),
            dim=-1 - self.dimensions,
        ).train(self.training)
