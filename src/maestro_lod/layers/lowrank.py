"""The one idea: a weight held as two factors, whose ranks are ordered by importance.

A dense weight is seen as `groups` matrices of shape (m, n), each the product U·V of its factors.
`v` is applied first, `u` second; the kernel of a convolution sits in one of them:

    layer             u                   v                   m              n
    Linear            (out, r)            (r, in)             out            in
    Conv              (out, r)            (r, in, *kernel)    out/groups     in/groups · kernel
    ConvTranspose     (out, r, *kernel)   (r, in)             out/groups · kernel   in/groups

so the rank is always dimension 1 of `u` and dimension 0 of `v`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from maestro_lod.errors import RankError

if TYPE_CHECKING:
    from typing_extensions import Self

# Applying the factors one by one writes and reads a value per rank and position in between. Moving
# it costs about as much as this many multiplications. Fitted by benchmarks/switch.py.
MOVING_ONE_VALUE = 64

_NO_LIMIT = 2**31 - 1  # the compiled form of "no active rank": every rank counts


def composing_pays(positions: int, m: int, n: int, rank: int) -> bool:
    """Say whether multiplying the factors out first is the faster way to apply them."""
    factored = positions * rank * (m + n + MOVING_ONE_VALUE)
    composed = (positions + rank) * m * n
    return composed < factored


def svd_factors(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Split (groups, m, n) into (groups, m, rank) and (groups, rank, n), √S to each side."""
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    left, scale, right = torch.linalg.svd(wide, full_matrices=False)
    root = scale[:, :rank].sqrt()
    return left[:, :, :rank] * root[:, None, :], root[:, :, None] * right[:, :rank]


def _changeable(number: int, device: torch.device) -> Tensor:
    """Return a number as a tensor that can be changed later, wherever it was made."""
    with torch.inference_mode(False):
        return torch.tensor(number, device=device)


class LowRank(nn.Module):
    """A layer whose weight is the product of `u` (out, rank, ...) and `v` (rank, in, ...)."""

    kind: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    """What the dense layer's attributes say beside its weight; code of a model may read them."""
    u: nn.Parameter
    v: nn.Parameter
    bias: nn.Parameter | None
    groups: int
    matrix_shape: tuple[int, int]
    """The shape (m, n) of the matrix that each group factors."""
    positions: int | None
    """Where the last forward applied the weight (batch included); None if there was none."""
    handed_over: tuple[str, ...] = ()
    """The names of what a user had put on the dense layer."""
    _limit: Tensor

    def __init__(
        self, u: Tensor, v: Tensor, bias: Tensor | None, *, groups: int = 1, trainable: bool = True
    ) -> None:
        super().__init__()
        self.u = nn.Parameter(u, requires_grad=trainable)
        self.v = nn.Parameter(v, requires_grad=trainable)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(bias, requires_grad=trainable)
        self.groups = groups
        u_kernel, v_kernel = math.prod(u.shape[2:]), math.prod(v.shape[2:])
        self.matrix_shape = (u.shape[0] // groups * u_kernel, v.shape[1] // groups * v_kernel)
        self.positions = None
        self._active: int | None = None
        self._trainable: tuple[bool, bool] | None = None  # of factors that are frozen while empty
        # The same number for compiled graphs: as a tensor it can change without a new graph. No
        # buffer, which averaged copies would take over and `to_empty` would leave undefined.
        self._limit = _changeable(_NO_LIMIT, u.device)

    # -- what a kind of layer defines ----------------------------------------------------------

    @classmethod
    def like(cls, dense: nn.Module, rank: int | None = None) -> Self:
        """Make a layer with the options of `dense` and uninitialized factors."""
        raise NotImplementedError

    def positions_of(self, x: Tensor) -> int:
        """Count the positions at which the weight is applied to an input."""
        raise NotImplementedError

    def _apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def _apply_factors(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def _to_weight(self, matrices: Tensor) -> Tensor:
        """Give (groups, m, n) matrices the dense layer's layout; here that of one matrix."""
        return matrices[0]

    def _to_matrices(self, weight: Tensor) -> Tensor:
        """Give a dense weight the layout (groups, m, n); here it is one matrix."""
        return weight[None]

    def dense(self, rank: int | None = None) -> nn.Module:
        """Return a plain dense layer that computes what this one does at the rank."""
        raise NotImplementedError

    def plain_dense(self, rank: int | None = None) -> nn.Module:
        """Return the same as a layer of torch itself, where `dense` is one of another library."""
        return self.dense(rank)

    def factored(self, rank: int | None = None) -> nn.Module:
        """Return plain layers, one per factor, that compute what this one does at the rank."""
        raise NotImplementedError

    # -- shapes and costs ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of ranks that are stored."""
        return self.v.shape[0]

    @property
    def weight_shape(self) -> torch.Size:
        """The shape of the dense weight, in the dense layer's layout."""
        matrices = torch.empty(self.groups, *self.matrix_shape, device="meta")
        return self._to_weight(matrices).shape

    @property
    def full_rank(self) -> int:
        """The rank at which any dense weight can be represented."""
        return min(self.matrix_shape)

    def weights(self, rank: int | None = None) -> int:
        """Count the scalars in the factors at a rank."""
        return self.groups * (self.rank if rank is None else rank) * sum(self.matrix_shape)

    @property
    def dense_weights(self) -> int:
        """Count the scalars in the dense weight."""
        return self.groups * math.prod(self.matrix_shape)

    def macs(self, positions: int, rank: int | None = None) -> int:
        """Count the MACs of the factors applied one by one at so many positions."""
        return positions * self.weights(rank)

    def dense_macs(self, positions: int) -> int:
        """Count the MACs of the dense form at so many positions."""
        return positions * self.dense_weights

    def dense_is_cheaper(self, rank: int | None = None, *, by: str = "params") -> bool:
        """Say whether the dense form has fewer "params" or "macs" than the factors (tie: no).

        Both factors work at the same positions, so the answer is the same for both.
        """
        return (self.rank if rank is None else rank) > self.break_even

    @property
    def has_factored_form(self) -> bool:
        """Whether plain layers can apply the factors one by one."""
        return True

    @property
    def break_even(self) -> int:
        """The largest rank at which the factors have no more scalars than the dense weight."""
        return self.dense_weights // max(self.weights(1), 1)

    def fused_form(self, rank: int | None = None) -> Literal["dense", "factored"]:
        """Return the form in which `fuse` leaves the layer."""
        return "dense" if self.dense_is_cheaper(rank) else "factored"

    def fused_weights(self, rank: int | None = None) -> int:
        """Count the scalars of the form in which `fuse` leaves the layer."""
        return self.dense_weights if self.dense_is_cheaper(rank) else self.weights(rank)

    def fused_macs(self, positions: int, rank: int | None = None) -> int:
        """Count the MACs of the form in which `fuse` leaves the layer."""
        if self.dense_is_cheaper(rank) or not self.has_factored_form:
            return self.dense_macs(positions)
        return self.macs(positions, rank)

    def executed_macs(self, positions: int, rank: int) -> int:
        """Count the MACs that this layer really does, by whichever way it chooses."""
        m, n = self.matrix_shape
        rank = max(rank, 1)  # one rank of zeros stands in for none
        if composing_pays(positions, m, n, rank):
            return self.groups * (positions + rank) * m * n
        return self.macs(positions, rank)

    # -- the factors ---------------------------------------------------------------------------

    @classmethod
    def from_dense(cls, dense: nn.Module, rank: int | None = None) -> Self:
        """Return a layer with the leading singular directions of `dense`; `dense` is untouched."""
        layer = cls.like(dense, rank)
        weight, bias = dense.weight, dense._parameters.get("bias")
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            layer._set_matrices(*svd_factors(layer._to_matrices(weight), layer.rank))
            if bias is not None and layer.bias is not None:
                layer.bias.copy_(bias).requires_grad_(bias.requires_grad)
        layer.freeze_if_empty()
        return layer

    def _set_matrices(self, left: Tensor, right: Tensor) -> None:
        """Copy (groups, m, r) and (groups, r, n) matrices into `u` and `v`."""
        r, groups = self.rank, self.groups
        out, kernel = self.u.shape[0] // groups, math.prod(self.u.shape[2:])
        left = left.reshape(groups, out, kernel, r).transpose(2, 3)  # (groups, out, r, kernel)
        self.u.copy_(left.reshape(self.u.shape))
        self.v.copy_(right.transpose(0, 1).reshape(self.v.shape))

    def _matrices(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """View factors as (groups, m, r) and (groups, r, n) matrices."""
        r, groups = v.shape[0], self.groups
        if groups == 1 and u.ndim == 2:
            return u[None], v.reshape(1, r, -1)
        kernel = math.prod(u.shape[2:])
        left = u.reshape(groups, -1, r, kernel).transpose(2, 3).reshape(groups, -1, r)
        return left, v.reshape(r, groups, -1).transpose(0, 1)

    def _compose(self, u: Tensor, v: Tensor) -> Tensor:
        """Multiply factors out to a weight as the layer applies it."""
        if u.ndim == v.ndim == 2 and self.groups == 1:
            return u @ v
        left, right = self._matrices(u, v)
        return self._to_weight(left @ right)

    @property
    def weight(self) -> Tensor:
        """The dense weight at the active rank; read by code that expects a dense layer."""
        return self._compose(*self._active_factors())

    def truncated(self, rank: int | None) -> tuple[Tensor, Tensor]:
        """Return detached copies of the first ranks of `u` and `v`; rank 0 gives one zero rank."""
        rank = self.rank if rank is None else rank
        if rank == 0:
            u, v = self._zero_rank()
        else:
            u, v = self.u[:, :rank], self.v[:rank]
        return u.detach().clone(), v.detach().clone()

    def _zero_rank(self) -> tuple[Tensor, Tensor]:
        """Return one rank of zeros, which keeps shapes right where no rank is left.

        The empty sums tie the zeros to the parameters, which therefore get (empty) gradients.
        """
        u, v = self.u, self.v
        return (
            u.new_zeros(u.shape[0], 1, *u.shape[2:]) + u[:, :0].sum(),
            v.new_zeros(1, *v.shape[1:]) + v[:0].sum(),
        )

    # -- the active rank -----------------------------------------------------------------------

    @property
    def active_rank(self) -> int:
        """How many of the stored ranks the forward uses."""
        return self.rank if self._active is None else min(self._active, self.rank)

    def activate(self, rank: int | None) -> None:
        """Use only the first `rank` ranks from now on; None uses all. See `at_ranks`."""
        if rank is not None and not 0 <= rank <= self.rank:
            raise RankError(f"active rank {rank} is not between 0 and the stored rank {self.rank}.")
        self.__dict__["_active"] = rank  # past nn.Module's slow setattr
        self._limit.fill_(_NO_LIMIT if rank is None else rank)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place_limit()
        return self

    def _place_limit(self) -> None:
        """Keep the active rank that compiled graphs read beside the factors."""
        if self._limit.device != self.u.device:
            rank = _NO_LIMIT if self._active is None else self._active
            self._limit = _changeable(rank, self.u.device)

    def _active_factors(self) -> tuple[Tensor, Tensor]:
        u, v = self.u, self.v  # once each: nn.Module looks parameters up slowly
        stored = v.shape[0]
        if stored == 0:
            return self._zero_rank()
        if torch.compiler.is_compiling():
            # A slice would make a new graph for every rank, a mask on the smaller side does not.
            mask = (torch.arange(stored, device=u.device) < self._limit).to(u.dtype)
            return u * mask.view(-1, *[1] * (u.ndim - 2)), v
        if self._active is None or self._active >= stored:
            return u, v
        if self._active == 0:
            return self._zero_rank()
        return u[:, : self._active], v[: self._active]

    def _note_positions(self, x: Tensor) -> int:
        """Remember where the weight is applied; also says that the layer has run."""
        positions = self.positions_of(x)
        if torch.compiler.is_compiling():
            self.positions = positions
        else:  # past nn.Module's slow setattr
            self.__dict__["positions"] = positions
        return positions

    def forward(self, input: Tensor) -> Tensor:
        positions = self._note_positions(input)
        u, v = self._active_factors()
        if composing_pays(positions, *self.matrix_shape, v.shape[0]):
            return self._apply_weight(input, self._compose(u, v))
        return self._apply_factors(input, u, v)

    # -- ranks that change shape ---------------------------------------------------------------

    def resize(self, rank: int) -> None:
        """Give the factors room for `rank` ranks, contents undefined; Parameters keep identity.

        Keeping the Parameter objects lets an optimizer that already holds them go on.
        """
        for factor, dim in ((self.u, 1), (self.v, 0)):
            shape = [*factor.shape]
            shape[dim] = rank
            # in the memory layout it had, which fused optimizers expect of their state too
            layout = sorted(range(factor.ndim), key=factor.stride, reverse=True)
            factor.grad = None
            factor.data = torch.empty_permuted(
                shape, layout, dtype=factor.dtype, device=factor.device
            )
        self.freeze_if_empty()

    def freeze_if_empty(self) -> None:
        """Give factors without ranks no gradients, which some optimizers cannot take.

        Factors that get ranks again become trainable as they were.
        """
        if self.rank == 0 and (self.u.requires_grad or self.v.requires_grad):
            self._trainable = self.u.requires_grad, self.v.requires_grad
            self._train_factors(False, False)
        elif self.rank > 0 and self._trainable is not None:
            self._train_factors(*self._trainable)
            self._trainable = None

    @property
    def trainable(self) -> tuple[bool, bool]:
        """Whether u and v are trained, or would be if they had ranks."""
        return self._trainable or (self.u.requires_grad, self.v.requires_grad)

    def _train_factors(self, u: bool, v: bool) -> None:
        self.u.requires_grad_(u)
        self.v.requires_grad_(v)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the rank from the incoming shapes, so that any trainer's resume works."""
        u, v = state_dict.get(f"{prefix}u"), state_dict.get(f"{prefix}v")
        if isinstance(u, Tensor) and isinstance(v, Tensor) and v.ndim == self.v.ndim:
            rank = v.shape[0]
            if u.ndim != self.u.ndim or u.shape[1] != rank or rank > self.full_rank:
                error_msgs.append(
                    f"factors of {prefix.rstrip('.') or 'the model itself'} do not fit together: "
                    f"u {tuple(u.shape)}, v {tuple(v.shape)}, full rank {self.full_rank}."
                )
                return
            same_otherwise = (
                u.shape[:1] + u.shape[2:] == self.u.shape[:1] + self.u.shape[2:]
                and v.shape[1:] == self.v.shape[1:]
            )
            if rank != self.rank and same_otherwise:
                self.resize(rank)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._place_limit()
        self.freeze_if_empty()

    def _repr_rank(self) -> str:
        return f"rank={self.rank}/{self.full_rank}, bias={self.bias is not None}"


def empty_like_weight(dense: nn.Module, *shape: int) -> Tensor:
    """Return uninitialized memory with the dtype and device of a dense layer's weight."""
    weight = dense.weight
    assert isinstance(weight, Tensor)
    return torch.empty(*shape, dtype=weight.dtype, device=weight.device)


def with_parameters(layer: nn.Module, source: LowRank, weight: Tensor, *, bias: bool) -> nn.Module:
    """Fill a plain layer made on the meta device; trainability and mode follow the source."""
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=source.trainable[0])
    if bias and source.bias is not None:
        value = source.bias.detach().clone()
        layer.bias = nn.Parameter(value, requires_grad=source.bias.requires_grad)
    return layer.train(source.training)
