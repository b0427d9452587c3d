"""Low-rank layer: a weight stored as two factors, whose ranks are ordered by importance.

A dense weight is viewed as `groups` matrices of shape (m, n), each the product U·V of its factors.
`v` is applied first, `u` second; the kernel of a convolution sits in one of them:

    layer             u                   v                   m              n
    Linear            (out, r)            (r, in)             out            in
    Conv              (out, r)            (r, in, *kernel)    out/groups     in/groups · kernel
    ConvTranspose     (out, r, *kernel)   (r, in)             out/groups · kernel   in/groups

so the rank is always dimension 1 of `u` and dimension 0 of `v`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from maestro_lod.layers.composed import usable_cache
from maestro_lod.layers.factors import Factors
from maestro_lod.layers.pivoted import INDEX_TYPE, pivoted_matrices
from maestro_lod.layers.svd import svd_factors

if TYPE_CHECKING:
    from typing_extensions import Self

Split: TypeAlias = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Splits matrices (groups, m, n) into (groups, m, rank) and (groups, rank, n)."""

Rows: TypeAlias = Sequence[Tensor]
"""For each group of a layer the rows (positions, n) that its matrix multiplies, or its products."""

PlainForm: TypeAlias = Literal["dense", "factored", "pivoted"]
"""The deployed form of a low-rank layer: one plain layer, one per factor, or two
with fewer weights than factors; see `pivoted.py`."""

# Applying the factors one by one writes and reads a value per rank and position in between. Moving
# it costs about as much as this many multiplications. Fitted by benchmarks/switch.py.
INTERMEDIATE_COST = 64


def compose_is_cheaper(
    positions: int, m: int, n: int, rank: int, moving: int = INTERMEDIATE_COST
) -> bool:
    """Return whether composing the factors first is faster than applying them one by one."""
    factored = positions * rank * (m + n + moving)
    composed = (positions + rank) * m * n
    return composed < factored


class LowRank(Factors):
    """A layer whose weight is the product of `u` (out, rank, ...) and `v` (rank, in, ...)."""

    kind: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    """The dense layer's attributes other than its weight; code of a model may read them."""
    dense_only = False
    """Whether only a dense plain layer can replace this one, because of how it is called."""
    positionwise: ClassVar[bool] = False
    """Whether each output is the weight times one of the `input_rows`, plus the bias; such layers
    can be fitted to outputs."""
    pivots: ClassVar[Literal["u", "v"] | None] = None
    """Whether the pivoted form keeps rows of the matrices ("u") or columns ("v"); None for layers
    without this form. It is the side without a kernel."""
    user_attributes: tuple[str, ...] = ()
    """The names of attributes that a user added to the dense layer."""

    # -- what a kind of layer defines ----------------------------------------------------------

    @classmethod
    def from_dense_shape(cls, dense: Any, rank: int | None = None) -> Self:
        """Create a layer with the options of `dense` and uninitialized factors, here of a matrix.

        Args:
            dense: The dense layer.
            rank: The stored rank; by default the full one.

        Returns:
            The layer.
        """
        out, into = dense.weight.shape
        return cls.allocate(dense, rank, (out,), (into,))

    @classmethod
    def blocker(cls, dense: Any) -> str:
        """Return why this dense layer cannot be replaced, '' if it can."""
        return ""

    def count_positions(self, *inputs: Any) -> int:
        """Count the positions at which the weight is applied to the inputs."""
        raise NotImplementedError

    def apply_weight(self, weight: Tensor, *inputs: Tensor) -> Tensor:
        """Compute the layer with its composed weight."""
        raise NotImplementedError

    def apply_factors(self, u: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        """Compute the layer with its factors, one after the other."""
        raise NotImplementedError

    def input_rows(self, *inputs: Any) -> Iterator[Rows]:
        """Yield the rows that the weight multiplies, in parts; nothing if they are not known."""
        return iter(())

    def output_rows(self, output: Tensor, *inputs: Any) -> Rows | None:
        """Return outputs, or their gradients, as rows; None if they are not known."""
        return None

    def input_key(self) -> tuple[Any, ...]:
        """Return the options that determine `input_rows`, as a cache key."""
        return (type(self),)

    def lookups(self, *inputs: Any) -> Tensor | None:
        """Count how often each row of the weight is looked up; None for layers that multiply."""
        return None

    @property
    def intermediate_cost(self) -> int:
        """The cost of one intermediate value, per rank and position, in multiplications."""
        return INTERMEDIATE_COST

    def padded_rank(self, rank: int) -> int:
        """Round a rank up to the number that `apply_factors` computes with (default: unchanged)."""
        return rank

    def to_weight(self, matrices: Tensor) -> Tensor:
        """Reshape (groups, m, n) matrices to the dense layer's weight (default: one matrix)."""
        return matrices[0]

    def to_matrices(self, weight: Tensor) -> Tensor:
        """Reshape a dense weight to (groups, m, n) matrices (default: one matrix)."""
        return weight[None]

    def dense(self, rank: int | None = None) -> nn.Module:
        """Return an equivalent layer of the replaced type at a rank."""
        raise NotImplementedError

    def plain_dense(self, rank: int | None = None) -> nn.Module:
        """Return `dense` as a layer of torch, also if the replaced type is another library's."""
        return self.dense(rank)

    def factored(self, rank: int | None = None) -> nn.Module:
        """Return equivalent plain layers at a rank, one per factor."""
        raise NotImplementedError

    def pivoted(self, rank: int | None = None) -> nn.Module:
        """Return an equivalent plain layer at a rank, in the pivoted form."""
        raise NotImplementedError

    def _pivoted_matrices(self, rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kept rows or columns, the coefficients of the others, and all their numbers.

        Columns are returned as rows; the numbers of the kept ones come first.
        """
        left, right = self._matrices(*self.truncated(rank))
        if self.pivots == "v":
            left, right = right.mT, left.mT
        return pivoted_matrices(left, right)

    def forms(self, rank: int) -> tuple[PlainForm, ...]:
        """Return the plain forms that the layer can have at a rank."""
        if self.dense_only:
            return ("dense",)
        if max(rank, 1) < self._pivoted_side:
            return "dense", "factored", "pivoted"
        return "dense", "factored"

    def to_torch(self, form: PlainForm, rank: int | None = None) -> nn.Module:
        """Return plain layers in a form, with the options as attributes for the model's code."""
        if form == "dense":
            return self.plain_dense(rank)
        layers = self.factored(rank) if form == "factored" else self.pivoted(rank)
        for key in self.options:
            setattr(layers, key, copy.deepcopy(getattr(self, key)))
        return layers

    # -- shapes and costs ----------------------------------------------------------------------

    @property
    def weight_shape(self) -> torch.Size:
        """The shape of the dense weight, in the dense layer's layout."""
        matrices = torch.empty(self.groups, *self.matrix_shape, device="meta")
        return self.to_weight(matrices).shape

    def weights(self, rank: int | None = None) -> int:
        """Count the scalars in the factors at a rank."""
        return self.groups * (self.rank if rank is None else rank) * sum(self.matrix_shape)

    @property
    def dense_weights(self) -> int:
        """Count the scalars in the dense weight."""
        return self.groups * math.prod(self.matrix_shape)

    def macs(self, positions: int, rank: int | None = None) -> int:
        """Count the MACs of the factors applied one by one at a number of positions."""
        return positions * self.weights(rank)

    def dense_macs(self, positions: int) -> int:
        """Count the MACs of the dense form at a number of positions."""
        return positions * self.dense_weights

    def plain_weights(self, form: PlainForm, rank: int) -> int:
        """Count the scalars of a plain form; rank 0 becomes one rank of zeros."""
        rank = max(rank, 1)
        if form == "pivoted":
            return self.weights(rank) - self.groups * rank * rank
        return self.dense_weights if form == "dense" else self.weights(rank)

    def plain_bytes(self, form: PlainForm, rank: int) -> int:
        """Count the bytes of a plain form, with the order of its rows."""
        order = self.groups * self._pivoted_side if form == "pivoted" else 0
        size = self.plain_weights(form, rank) * self.u.element_size()
        return size + order * INDEX_TYPE.itemsize

    @property
    def _pivoted_side(self) -> int:
        """The number of rows that the pivoted form puts in order, in each group."""
        return 0 if self.pivots is None else self.matrix_shape["uv".index(self.pivots)]

    def plain_macs(self, form: PlainForm, positions: int, rank: int) -> int:
        """Count the MACs of a plain form at a number of positions."""
        if form == "dense":
            return self.dense_macs(positions)
        rank = max(rank, 1)
        saved = positions * self.groups * rank * rank if form == "pivoted" else 0
        return self.macs(positions, rank) - saved

    @property
    def break_even(self) -> int:
        """The largest rank at which the factors have no more scalars than the dense weight."""
        return self.dense_weights // max(self.weights(1), 1)

    @property
    def slow(self) -> str:
        """Why a training step is not faster than dense even at low rank; '' if it is."""
        return ""

    def executed_macs(self, positions: int, rank: int) -> int:
        """Count the MACs that the forward executes, composed or with the factors."""
        m, n = self.matrix_shape
        rank = max(rank, 1)  # one rank of zeros stands in for none
        if self.identity_factor is not None:
            return self.dense_macs(positions)
        if self._compose_is_cheaper(positions, rank):
            return self.groups * (positions + rank) * m * n
        return self.macs(positions, self.padded_rank(rank))

    # -- the factors ---------------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls, dense: nn.Module, rank: int | None = None, *, split: Split = svd_factors
    ) -> Self:
        """Return a layer with the leading directions of `dense`, which is unchanged.

        `split` determines the directions; by default they are the singular ones.
        """
        layer = cls.from_dense_shape(dense, rank)
        weight, bias = dense.weight, dense._parameters.get("bias")
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            layer._set_matrices(*split(layer.to_matrices(weight), layer.rank))
            if bias is not None and layer.bias is not None:
                layer.bias.copy_(bias).requires_grad_(bias.requires_grad)
        layer.freeze_if_empty()
        return layer

    def _set_matrices(self, left: Tensor, right: Tensor) -> None:
        """Copy (groups, m, r) and (groups, r, n) matrices into `u` and `v`."""
        u, v = self.to_factors(left, right)
        self.u.copy_(u)
        self.v.copy_(v)

    def to_factors(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Reshape (groups, m, r) and (groups, r, n) matrices to `u` and `v`."""
        r, groups = self.rank, self.groups
        out, kernel = self.u.shape[0] // groups, math.prod(self.u.shape[2:])
        left = left.reshape(groups, out, kernel, r).transpose(2, 3)  # (groups, out, r, kernel)
        return left.reshape(self.u.shape), right.transpose(0, 1).reshape(self.v.shape)

    def _matrices(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """View factors as (groups, m, r) and (groups, r, n) matrices."""
        r, groups = v.shape[0], self.groups
        if groups == 1 and u.ndim == 2:
            return u[None], v.reshape(1, r, -1)
        kernel = math.prod(u.shape[2:])
        left = u.reshape(groups, -1, r, kernel).transpose(2, 3).reshape(groups, -1, r)
        return left, v.reshape(r, groups, -1).transpose(0, 1)

    def _compose(self, u: Tensor, v: Tensor) -> Tensor:
        """Multiply factors to the weight that the layer applies."""
        if u.ndim == v.ndim == 2 and self.groups == 1:
            return u @ v
        left, right = self._matrices(u, v)
        return self.to_weight(left @ right)

    @property
    def weight(self) -> Tensor:
        """The dense weight at the active rank, for code that expects a dense layer."""
        return self._composed(*self._active_factors())

    def _composed(self, u: Tensor, v: Tensor) -> Tensor:
        """Multiply active factors to the weight; where one is the identity, return the other."""
        if (cache := usable_cache(self, u, v)) is not None:
            return cache.get(u, v, self._compose)
        if self.identity_factor is None:
            return self._compose(u, v)
        left, right = self._matrices(u, v)
        trained, still = (right, left) if self.identity_factor == "u" else (left, right)
        whole_v = self.identity_factor == "u" and self.groups == 1 and u.ndim == 2
        weight = v if whole_v else self._as_applied(trained)
        return weight + still[:, :0].sum() if still.requires_grad else weight

    def _as_applied(self, matrices: Tensor) -> Tensor:
        """Reshape (groups, m, n) matrices to the weight that the layer applies."""
        return self.to_weight(matrices)

    def forward(self, input: Tensor) -> Tensor:
        return self.computed(input)

    def computed(self, *inputs: Tensor) -> Tensor:
        """Apply the active factors to the inputs, composed or one by one, whichever is faster."""
        positions = self.count_positions(*inputs)
        self.note_positions(positions)
        u, v = self._active_factors()
        passes = 1 if (cache := usable_cache(self, u, v)) is None else cache.passes
        if self.identity_factor is not None or self._compose_is_cheaper(
            passes * positions, v.shape[0]
        ):
            return self.apply_weight(self._composed(u, v), *inputs)
        return self.apply_factors(u, v, *inputs)

    def _compose_is_cheaper(self, positions: int, rank: int) -> bool:
        m, n = self.matrix_shape
        return compose_is_cheaper(positions, m, n, self.padded_rank(rank), self.intermediate_cost)

    def _repr_rank(self) -> str:
        return f"rank={self.rank}/{self.full_rank}, bias={self.bias is not None}"


def with_parameters(layer: nn.Module, source: LowRank, weight: Tensor, *, bias: bool) -> nn.Module:
    """Fill a plain layer made on the meta device; trainability and mode follow the source."""
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=source.trainable[0])
    if bias and source.bias is not None:
        layer.register_parameter("bias", plain_bias(source))
    return layer.train(source.training)


def plain_bias(source: LowRank) -> nn.Parameter | None:
    """Return a copy of a layer's bias, as trainable as the original."""
    if source.bias is None:
        return None
    value = source.bias.detach().clone()
    return nn.Parameter(value, requires_grad=source.bias.requires_grad)
