"""Federated training of one elastic model by clients of several sizes; no framework needed.

A client holds the leading ranks that its tier allows. The server sends it those alone, cut from its
own tensors by reference, so that bytes follow the tier; what comes back is averaged rank by rank
over the clients that hold the rank. The model at the end is an elastic one like any other.

    for client in clients:
        receive(client.model, leading(server, client.share))
        updates.append((client.train(), client.samples))
    aggregate(server, updates)
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from maestro_lod.errors import LayerError, OptionError, TrainingError, listed
from maestro_lod.layers.ranks import Ranks, match_ranks, require_low_rank, resolve_for, unwrapped

Update: TypeAlias = tuple[Mapping[str, Tensor], float]
"""What a client sends: its model's state, and how much it counts (usually its samples)."""


def leading(model: nn.Module, ranks: Ranks | None) -> dict[str, Tensor]:
    """Return the state of the submodel at these ranks, as views of the model's own tensors.

    `ranks` as for `decompose`: a share is one of the full rank. None or 1.0 is the whole model.
    """
    whole = ranks is None or (isinstance(ranks, float) and ranks == 1.0)
    chosen = resolve_for(model, None if whole else ranks)
    by_parameter = _rank_dimensions(model)
    state = {}
    for key, value in unwrapped(model).state_dict(keep_vars=True).items():
        state[key] = value.detach()
        if id(value) in by_parameter:
            layer, dim = by_parameter[id(value)]
            state[key] = state[key].narrow(dim, 0, chosen[layer])
    return state


def receive(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state into a client's low-rank model, in place; it gets the ranks of the state.

    A state that is not of this model, or has values that the model cannot hold, changes nothing.
    """
    layers = require_low_rank(model)
    entries = _entries(model, {name: layer.full_rank for name, layer in layers.items()})
    _require_state("the state", state, entries)
    match_ranks(model, state)
    unwrapped(model).load_state_dict(dict(state))


@torch.no_grad()
def aggregate(model: nn.Module, updates: Iterable[Update]) -> None:
    """Average what clients of any ranks sent into the server's model, in place.

    Each rank becomes the weighted mean over the clients that hold it, and ranks that no client
    holds keep the server's value. If one update is not of this model, or has values that the model
    cannot hold, nothing is changed.
    """
    layers = require_low_rank(model)
    entries = _entries(model, {name: layer.rank for name, layer in layers.items()})
    means = {key: _Mean(entry) for key, entry in entries.items()}
    total = 0.0
    for number, (state, weight) in enumerate(updates):
        sender = f"update {number}"
        share = _require_weight(sender, weight)
        if math.isinf(total := total + share):
            raise OptionError(
                f"the weights up to {sender} add up to more than {sys.float_info.max:.2g}. Give "
                "smaller weights, such as numbers of samples."
            )
        _require_state(sender, state, entries)
        for key, mean in means.items():
            mean.add(state[key], share)
    results = [(mean.entry.own, mean.result()) for mean in means.values()]
    for own, result in results:
        own.copy_(result)


def _entries(model: nn.Module, most: Mapping[str, int]) -> dict[str, _Entry]:
    """Return the tensors of a low-rank model's state; `most` is how many ranks a layer can take."""
    by_parameter = _rank_dimensions(model)
    entries = {}
    for key, own in unwrapped(model).state_dict(keep_vars=True).items():
        layer, dim = by_parameter.get(id(own), (None, None))
        entries[key] = _Entry(key, own, layer, dim, 0 if layer is None else most[layer])
    return entries


def _rank_dimensions(model: nn.Module) -> dict[int, tuple[str, int]]:
    """Return the layer and the dimension of the ranks of every factor, by its id."""
    layers = require_low_rank(model)
    factors = [(name, layer.u, 1) for name, layer in layers.items()]
    factors += [(name, layer.v, 0) for name, layer in layers.items()]
    return {id(parameter): (name, dim) for name, parameter, dim in factors}


@dataclass(frozen=True)
class _Entry:
    """One tensor of a model's state, and what may be put in its place."""

    key: str
    own: Tensor
    layer: str | None
    """Of a factor: its low-rank layer."""
    dim: int | None
    """Of a factor: the dimension of its ranks."""
    most: int
    """Of a factor: how many ranks it can take."""

    def require_fit(self, sender: str, value: object) -> None:
        """Refuse a value that this tensor cannot hold."""
        if (
            not isinstance(value, Tensor)
            or value.layout is not torch.strided
            or value.is_nested
            or value.is_meta
        ):
            raise LayerError(f"{sender} has no dense tensor as {self.key}. Leave it out.")
        self._require_shape(sender, [*value.shape])
        own = self.own.dtype
        if value.dtype not in (_FLOATS if self.own.is_floating_point() else {own} & _WHOLE):
            raise LayerError(
                f"{sender} has {value.dtype} in {self.key}, the model {own}: only real "
                "floating-point values and unchanged types of whole numbers can be averaged."
            )
        if not value.isfinite().all():
            fault = "values that are not finite"
        elif self._overflows(value):
            fault = f"values that overflow as {own}"
        elif self.key.rpartition(".")[2] in _NONNEGATIVE and (value < 0).any():
            fault = "negative values"
        else:
            return
        raise TrainingError(f"{sender} has {fault} in {self.key}. Leave it out.")

    def _overflows(self, value: Tensor) -> bool:
        if self.own.is_floating_point():
            return not value.to(self.own.dtype).isfinite().all()
        return bool((value.to(torch.float64).abs() > _MOST_WHOLE).any())

    def _require_shape(self, sender: str, given: list[int]) -> None:
        expected = [*self.own.shape]
        if self.dim is not None and len(given) == len(expected):
            if given[self.dim] > self.most:
                raise LayerError(
                    f"{sender} has {given[self.dim]} ranks of {self.layer}, and the model can take "
                    f"{self.most}. Send ranks that were received from this model."
                )
            expected[self.dim] = given[self.dim]
        if expected != given:
            raise LayerError(
                f"{sender} has {self.key} of shape {tuple(given)}, the model "
                f"{tuple(self.own.shape)}: it is of another model."
            )


_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_LARGEST = torch.finfo(torch.float64).max
_MOST_WHOLE = 2.0**53
"""Up to here float64, in which means are taken, tells whole numbers apart."""
_NONNEGATIVE = ("running_var", "num_batches_tracked")
"""Buffers of norms that no training makes negative."""


class _Mean:
    """The weighted mean of one tensor over the clients, each rank over those that hold it.

    It moves towards each client's value by the client's share of the weights up to there, in
    float64: it never leaves the range of the values, and one client's values come back.
    """

    def __init__(self, entry: _Entry) -> None:
        own, dim = entry.own, entry.dim
        self.entry = entry
        self.mean = torch.zeros_like(own, dtype=torch.float64)
        shape = [1] * own.ndim
        if dim is not None:
            shape[dim] = own.shape[dim]
        self.weight = own.new_zeros(shape, dtype=torch.float64)

    def add(self, value: Tensor, weight: float) -> None:
        mean, counted, dim = self.mean, self.weight, self.entry.dim
        if dim is not None:
            mean = mean.narrow(dim, 0, value.shape[dim])
            counted = counted.narrow(dim, 0, value.shape[dim])
        counted.add_(weight)
        share = counted.new_tensor(weight) / counted  # by a number torch would take the reciprocal
        mean.mul_(1 - share).add_(value.to(mean.device, torch.float64) * share)
        mean.clamp_(-_LARGEST, _LARGEST)  # rounding may lift it above the largest value

    def result(self) -> Tensor:
        """Return the mean in the model's dtype, and the model's own value where nothing came."""
        own = self.entry.own
        mean = self.mean if own.is_floating_point() else self.mean.round()  # counters
        return torch.where(self.weight > 0, mean.to(own.dtype), own)


def _require_weight(sender: str, weight: float) -> float:
    real = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    number = float(weight) if real and weight <= sys.float_info.max else math.nan
    if not number > 0:
        raise OptionError(
            f"{sender} has the weight {weight!r}, which is not above zero and finite."
        )
    return number


def _require_state(sender: str, state: Mapping[str, Tensor], entries: Mapping[str, _Entry]) -> None:
    """Refuse a state that is not of the model, or that the model cannot hold."""
    if not isinstance(state, Mapping):
        raise LayerError(f"{sender} is a {type(state).__name__}, not a state_dict().")
    if differing := sorted(map(str, state.keys() ^ entries.keys())):
        raise LayerError(
            f"{sender} and the model do not have the same tensors; only one has "
            f"{listed(differing)}. Clients send the state_dict() of the model they received."
        )
    ranks: dict[str, int] = {}
    for key, entry in entries.items():
        entry.require_fit(sender, state[key])
        if entry.layer is not None and entry.dim is not None:
            rank = state[key].shape[entry.dim]
            if ranks.setdefault(entry.layer, rank) != rank:
                raise LayerError(
                    f"{sender} has {ranks[entry.layer]} ranks in one factor of {entry.layer} and "
                    f"{rank} in the other."
                )
