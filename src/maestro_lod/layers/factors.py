"""Factors: a pair of tensors, and the numbers of ranks that are stored, active and trained."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist

from maestro_lod.errors import RankError
from maestro_lod.layers.active import Block, active_blocks

if TYPE_CHECKING:
    from typing_extensions import Self

    from maestro_lod.layers.composed import ProductCache

Shape: TypeAlias = "tuple[int, ...]"

_NO_LIMIT = 2**31 - 1  # the compiled form of "no active rank": every rank counts


def _changeable(number: int, device: torch.device) -> Tensor:
    """Return a number as a tensor that can be changed later, also if made in inference mode."""
    with torch.inference_mode(False):
        return torch.tensor(number, device=device)


def _untrained(factor: Tensor) -> Tensor:
    """Return a factor without gradient; in distributed training, which waits for one, zeros."""
    if dist.is_available() and dist.is_initialized():
        return factor.detach() + factor[:0].sum()
    return factor.detach()


class _Origin:
    """A weak reference to a layer: copies of the layer share it, pickles lose it."""

    def __init__(self, layer: Factors | None = None) -> None:
        self.layer = (lambda: None) if layer is None else weakref.ref(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Origin:
        return self

    def __reduce__(self) -> tuple[type[_Origin], tuple[()]]:
        return _Origin, ()


class RanksCutWarning(UserWarning):
    """A loaded state has fewer ranks than the model, which lost the others."""


class Factors(nn.Module):
    """A module with two factors, whose ranks can be activated, resized and loaded."""

    u: nn.Parameter
    v: nn.Parameter
    bias: nn.Parameter | None
    groups: int
    matrix_shape: tuple[int, int]
    """The shape (m, n) of the matrix that each group factors."""
    positions: int | None
    """The number of positions of the last forward, batch included; None before the first one."""
    _limit: Tensor
    product_cache: ProductCache | None = None
    """The product of the factors for several passes, inside `composed_once`."""
    _holders: tuple[Any, Any] | None = None
    """The owners of the parts of `u` and `v`, if these are sharded over processes."""
    identity_factor: Literal["u", "v"] | None = None
    """The factor that is a frozen identity, while the other one is the weight itself."""

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
        self._activated: int | None = None  # outside of blocks of the running context
        self._trainable: tuple[bool, bool] | None = None  # of factors that are frozen while empty
        self._origin, self._copied_from = _Origin(self), _Origin()
        self._compiled = False
        self._blocks: list[tuple[int, int]] = []  # entered in any context: ids and ranks
        # The last of these ranks for compiled graphs, or else the active one: as a tensor it can
        # change without a new graph. No buffer, which averaged copies would take over and
        # `to_empty` would leave undefined.
        self._limit = _changeable(_NO_LIMIT, u.device)

    @classmethod
    def allocate(cls, dense: Any, rank: int | None, u: Shape, v: Shape, groups: int = 1) -> Self:
        """Create a layer with uninitialized factors; `u` and `v` are their shapes but for the rank.

        The rank defaults to the full one. Dtype, device, mode, trainability and the presence of a
        bias are those of the dense layer.
        """
        weight, bias = dense.weight, getattr(dense, "bias", None)
        if rank is None:
            rank = min(math.prod(u), math.prod(v)) // groups
        memory = functools.partial(torch.empty, dtype=weight.dtype, device=weight.device)
        layer = cls(
            memory(u[0], rank, *u[1:]),
            memory(rank, *v),
            None if bias is None else memory(u[0]),
            groups=groups,
            trainable=weight.requires_grad,
        )
        return layer.train(dense.training)

    @property
    def source(self) -> Factors | None:
        """The layer that this one is a deep copy of, if it still exists."""
        return self._copied_from.layer()

    @property
    def rank(self) -> int:
        """The number of stored ranks."""
        return self.v.shape[0]

    @property
    def sharded(self) -> bool:
        """Whether the factors are sharded over processes."""
        return self._holders is not None

    def stored_factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return `u` and `v` as an optimizer holds them: sharded, even while they are gathered."""
        if self._holders is None:
            return self.u, self.v
        u, v = self._holders
        return u.sharded_param, v.sharded_param

    @property
    def full_rank(self) -> int:
        """The rank at which any dense weight can be represented."""
        return min(self.matrix_shape)

    def truncated(self, rank: int | None) -> tuple[Tensor, Tensor]:
        """Return detached copies of the first ranks of `u` and `v`; rank 0 gives one zero rank."""
        rank = self.rank if rank is None else rank
        self.require_order(rank)
        if rank == 0:
            u, v = self._zero_rank()
        else:
            u, v = self.u[:, :rank], self.v[:rank]
        return u.detach().clone(), v.detach().clone()

    def _zero_rank(self) -> tuple[Tensor, Tensor]:
        """Return one rank of zeros, which keeps the shapes of a layer without ranks.

        The empty sums connect the zeros to the parameters, which therefore get (empty) gradients.
        """
        u, v = self.u, self.v
        return (
            u.new_zeros(u.shape[0], 1, *u.shape[2:]) + u[:, :0].sum(),
            v.new_zeros(1, *v.shape[1:]) + v[:0].sum(),
        )

    # -- the active rank -----------------------------------------------------------------------

    @property
    def active_rank(self) -> int:
        """The number of ranks that the forward uses."""
        active = self._chosen_rank()
        return self.rank if active is None else min(active, self.rank)

    def _chosen_rank(self) -> int | None:
        """Return the rank of the running context, else that of `activate`; None: every rank."""
        for block in reversed(active_blocks()):
            if self in block:
                return block[self]
        return self._activated

    def activate(self, rank: int | None) -> None:
        """Use only the first `rank` ranks from now on, in all contexts; None uses all."""
        if rank is not None:
            self.require_active(rank)
        self._require_one_context()
        self.__dict__["_activated"] = rank  # past nn.Module's slow setattr
        self._set_limit()

    def require_active(self, rank: int) -> None:
        """Raise RankError if the layer cannot run at this rank."""
        if not 0 <= rank <= self.rank:
            raise RankError(f"active rank {rank} is not between 0 and the stored rank {self.rank}.")
        self.require_order(rank)

    def enter(self, block: Block) -> None:
        """Record that a block of a context activates a rank of this layer."""
        self._require_one_context()
        self._blocks.append((id(block), block[self]))
        self._set_limit()

    def leave(self, block: Block) -> None:
        """Record the end of an entered block."""
        self._blocks.remove((id(block), block[self]))
        self._set_limit()

    def _require_one_context(self) -> None:
        """Raise RankError for ranks of several contexts in compiled code, which knows only one."""
        if self._compiled and self._blocks:
            inside = {id(block) for block in active_blocks()}
            if any(block not in inside for block, _ in self._blocks):
                raise RankError(
                    "a compiled model runs at one size at a time, and another thread or task is "
                    "inside at_ranks. Run the model uncompiled, or extract a model for each size."
                )

    def _set_limit(self) -> None:
        self._limit.fill_(self._compiled_rank())

    def _compiled_rank(self) -> int:
        rank = self._activated
        for _, rank in self._blocks[-1:]:  # noqa: B007
            pass
        return _NO_LIMIT if rank is None else rank

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled layer, outside of all blocks."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._origin, self._copied_from = _Origin(self), self._origin
        self._blocks = []
        self._set_limit()

    def _replicate_for_data_parallel(self) -> Self:
        """Return the replica for one thread of `nn.DataParallel`, at the ranks of this thread."""
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.__dict__["_activated"] = self._chosen_rank()
        return replica

    def require_order(self, rank: int) -> None:
        """Raise RankError if ranks are cut while the layer is trained as its dense weight."""
        if self.identity_factor is not None and rank < self.rank:
            raise RankError(
                f"rank {rank} of {self.rank} is not available: the layer is still trained as its "
                "dense weight, and its ranks have no order yet. Continue the training until the "
                "ranks are ordered."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place_limit()
        return self

    def _place_limit(self) -> None:
        """Keep the active rank that compiled graphs read on the factors' device."""
        if self._limit.device != self.u.device:
            self._limit = _changeable(self._compiled_rank(), self.u.device)

    def _active_factors(self) -> tuple[Tensor, Tensor]:
        u, v = self.u, self.v  # once each: nn.Module looks parameters up slowly
        stored = v.shape[0]
        if stored == 0:
            return self._zero_rank()
        if self.identity_factor == "u":
            return _untrained(u), v
        if self.identity_factor == "v":
            return u, _untrained(v)
        if torch.compiler.is_compiling():
            self._compiled = True
            # a slice needs a graph for every rank, a mask on the smaller side does not
            mask = (torch.arange(stored, device=u.device) < self._limit).to(u.dtype)
            return u * mask.view(-1, *[1] * (u.ndim - 2)), v
        active = self._chosen_rank()
        if active is None or active >= stored:
            return u, v
        if active == 0:
            return self._zero_rank()
        return u[:, :active], v[:active]

    def note_positions(self, positions: int) -> None:
        """Record the number of positions of this forward, which also marks the layer as run."""
        if torch.compiler.is_compiling():
            self.positions = positions
        else:  # past nn.Module's slow setattr
            self.__dict__["positions"] = positions

    # -- ranks that change shape ---------------------------------------------------------------

    def resize(self, rank: int) -> None:
        """Resize the factors to `rank` ranks, with undefined contents.

        The Parameter objects stay the same, so that an optimizer that holds them still works.
        """
        for factor, dim in ((self.u, 1), (self.v, 0)):
            shape = [*factor.shape]
            shape[dim] = rank
            # the memory layout stays, since fused optimizers expect it of their state too
            layout = sorted(range(factor.ndim), key=factor.stride, reverse=True)
            factor.grad = None
            factor.data = torch.empty_permuted(
                shape, layout, dtype=factor.dtype, device=factor.device
            )
        self.freeze_if_empty()

    def freeze_if_empty(self) -> None:
        """Freeze factors without ranks, whose empty gradients some optimizers do not support.

        Factors that get ranks again become trainable again.
        """
        if self.rank == 0 and (self.u.requires_grad or self.v.requires_grad):
            self._trainable = self.u.requires_grad, self.v.requires_grad
            self._train_factors(False, False)
        elif self.rank > 0 and self._trainable is not None:
            self._train_factors(*self._trainable)
            self._trainable = None

    @property
    def trainable(self) -> tuple[bool, bool]:
        """Whether u and v are trained; for a layer without ranks, whether they were."""
        return self._trainable or (self.u.requires_grad, self.v.requires_grad)

    def _train_factors(self, u: bool, v: bool) -> None:
        self.u.requires_grad_(u)
        self.v.requires_grad_(v)

    def rank_in(self, state: Mapping[str, Any], prefix: str) -> int | None:
        """Return the rank of this layer in a state, None if its factors are missing or misfit."""
        u, v = state.get(f"{prefix}u"), state.get(f"{prefix}v")
        if not (isinstance(u, Tensor) and isinstance(v, Tensor) and u.ndim > 1 and v.ndim > 1):
            return None
        rank = v.shape[0]
        fits = (
            u.shape == (self.u.shape[0], rank, *self.u.shape[2:])
            and v.shape[1:] == self.v.shape[1:]
            and rank <= self.full_rank
        )
        return rank if fits else None

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
        """Resize to the rank of the loaded factors, so that any trainer's resume works."""
        u, v = state_dict.get(f"{prefix}u"), state_dict.get(f"{prefix}v")
        self.identity_factor = None  # a training of the dense weight sets it again
        if isinstance(u, Tensor) and isinstance(v, Tensor) and v.ndim == self.v.ndim:
            if u.ndim != self.u.ndim or u.shape[1] != v.shape[0] or v.shape[0] > self.full_rank:
                error_msgs.append(
                    f"factors of {prefix.rstrip('.') or 'the model itself'} do not fit together: "
                    f"u {tuple(u.shape)}, v {tuple(v.shape)}, full rank {self.full_rank}."
                )
                return
            rank = self.rank_in(state_dict, prefix)
            if rank is not None and rank != self.rank:
                _warn_of_cut(prefix, self.rank, rank, error_msgs)
                self.resize(rank)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._place_limit()
        self.freeze_if_empty()


_warned: list[str] | None = None  # the list of errors of the last load with a warning


def _warn_of_cut(prefix: str, stored: int, loaded: int, errors: list[str]) -> None:
    """Warn once per load, which its list of errors identifies, that it cuts layers."""
    global _warned
    if loaded >= stored or errors is _warned:
        return
    _warned = errors
    warnings.warn(
        f"load_state_dict cut {prefix.rstrip('.') or 'the model itself'} from rank {stored} to "
        f"{loaded}, the rank in the loaded state, and possibly other layers. To load a checkpoint "
        "without this warning, call lod.match_ranks(model, state) first. To merge smaller models "
        "into this one, use maestro_lod.integrations.federated.aggregate.",
        RanksCutWarning,
        stacklevel=2,
    )
