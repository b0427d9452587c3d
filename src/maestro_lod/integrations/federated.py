"""Federated training of one low-rank model by clients of several sizes, without a framework.

The server sends each client the first ranks that its tier allows, as views of the server's tensors.
The replies are averaged rank by rank, over the clients that have the rank.

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
"""The state of a client's model, and its weight: usually its number of samples."""


def leading(model: nn.Module, ranks: Ranks | None) -> dict[str, Tensor]:
    """Return the state of a submodel, as views of the model's tensors.

    >>> state = leading(server, 0.25)

    Args:
        model: The server's low-rank model.
        ranks: Ranks as for `decompose`; a share is relative to the full rank. None or 1.0 is the
            whole model.

    Returns:
        The state by name, with the first ranks of each factor.

    Raises:
        LayerError: The model has no low-rank layers.
        OptionError: A rank is not usable.
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
    """Load a state into a client's low-rank model, in place, and cut it to the ranks of the state.

    >>> receive(client_model, leading(server, 0.25))

    Args:
        model: The client's low-rank model.
        state: What `leading` returned.

    Raises:
        LayerError: The state belongs to another model. Nothing has changed then.
        TrainingError: The model cannot hold its values. Nothing has changed then.
    """
    layers = require_low_rank(model)
    entries = _entries(model, {name: layer.full_rank for name, layer in layers.items()})
    _require_state("the state", state, entries)
    match_ranks(model, state)
    unwrapped(model).load_state_dict(dict(state))


@torch.no_grad()
def aggregate(model: nn.Module, updates: Iterable[Update]) -> None:
    """Average the updates of clients into the server's model, in place.

    Each rank becomes the weighted mean over the clients that have it. Ranks that no client has keep
    the server's value.

    >>> aggregate(server, [(client_model.state_dict(), 600.0)])

    Args:
        model: The server's low-rank model.
        updates: The state and the weight of each client.

    Raises:
        LayerError: An update belongs to another model. Nothing has changed then.
        OptionError: A weight is not positive and finite. Nothing has changed then.
        TrainingError: The model cannot hold the values of an update. Nothing has changed then.
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
    results = [(mean.entry.stored, mean.result()) for mean in means.values()]
    for stored, result in results:
        stored.copy_(result)


def _entries(model: nn.Module, most: Mapping[str, int]) -> dict[str, _Entry]:
    """Return the entries of a low-rank model's state; `most` is the largest rank of each layer."""
    by_parameter = _rank_dimensions(model)
    entries = {}
    for key, stored in unwrapped(model).state_dict(keep_vars=True).items():
        layer, dim = by_parameter.get(id(stored), (None, None))
        entries[key] = _Entry(key, stored, layer, dim, 0 if layer is None else most[layer])
    return entries


def _rank_dimensions(model: nn.Module) -> dict[int, tuple[str, int]]:
    """Return the layer name and the rank dimension of every factor, by its id."""
    layers = require_low_rank(model)
    factors = [(name, layer.u, 1) for name, layer in layers.items()]
    factors += [(name, layer.v, 0) for name, layer in layers.items()]
    return {id(parameter): (name, dim) for name, parameter, dim in factors}


@dataclass(frozen=True)
class _Entry:
    """One tensor of a model's state, and the checks of its replacements."""

    key: str
    stored: Tensor
    layer: str | None
    """The low-rank layer of a factor."""
    dim: int | None
    """The dimension of a factor's ranks."""
    most: int
    """The largest number of ranks of a factor."""

    def require_fit(self, sender: str, value: object) -> None:
        """Raise LayerError or TrainingError for a value that this tensor cannot hold."""
        if (
            not isinstance(value, Tensor)
            or value.layout is not torch.strided
            or value.is_nested
            or value.is_meta
        ):
            raise LayerError(f"{sender} has no dense tensor for {self.key}. Leave this update out.")
        self._require_shape(sender, [*value.shape])
        stored = self.stored.dtype
        if value.dtype not in (_FLOATS if self.stored.is_floating_point() else {stored} & _WHOLE):
            raise LayerError(
                f"{sender} has {value.dtype} in {self.key}, and the model has {stored}: only real "
                "floats, and integers of the model's dtype, can be averaged. Send the state_dict() "
                "of the model that was received."
            )
        if not value.isfinite().all():
            fault = "values that are not finite"
        elif self._overflows(value):
            fault = f"values that overflow as {stored}"
        elif self.key.rpartition(".")[2] in _NONNEGATIVE and (value < 0).any():
            fault = "negative values"
        else:
            return
        raise TrainingError(f"{sender} has {fault} in {self.key}. Leave this update out.")

    def _overflows(self, value: Tensor) -> bool:
        if self.stored.is_floating_point():
            return not value.to(self.stored.dtype).isfinite().all()
        return bool((value.to(torch.float64).abs() > _MOST_WHOLE).any())

    def _require_shape(self, sender: str, shape: list[int]) -> None:
        expected = [*self.stored.shape]
        if self.dim is not None and len(shape) == len(expected):
            if shape[self.dim] > self.most:
                raise LayerError(
                    f"{sender} has {shape[self.dim]} ranks of {self.layer}, and the model can have "
                    f"{self.most}. Send only ranks that were received from this model."
                )
            expected[self.dim] = shape[self.dim]
        if expected != shape:
            raise LayerError(
                f"{sender} has {self.key} of shape {tuple(shape)}, and the model has "
                f"{tuple(self.stored.shape)}. Send the state_dict() of the model that was received."
            )


_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_LARGEST = torch.finfo(torch.float64).max
_MOST_WHOLE = 2.0**53
"""The largest number up to which float64, used for means, represents all integers."""
_NONNEGATIVE = ("running_var", "num_batches_tracked")
"""Buffers of norms that cannot become negative in training."""


class _Mean:
    """The running weighted mean of one tensor over the clients, each rank over those that have it.

    It is computed in float64 and moves towards each value by the value's share of all weights so
    far: it stays within the range of the values, and equals the value of a single client.
    """

    def __init__(self, entry: _Entry) -> None:
        stored, dim = entry.stored, entry.dim
        self.entry = entry
        self.mean = torch.zeros_like(stored, dtype=torch.float64)
        shape = [1] * stored.ndim
        if dim is not None:
            shape[dim] = stored.shape[dim]
        self.weight = stored.new_zeros(shape, dtype=torch.float64)

    def add(self, value: Tensor, weight: float) -> None:
        mean, counted, dim = self.mean, self.weight, self.entry.dim
        if dim is not None:
            mean = mean.narrow(dim, 0, value.shape[dim])
            counted = counted.narrow(dim, 0, value.shape[dim])
        counted.add_(weight)
        share = (
            counted.new_tensor(weight) / counted
        )  # tensor / number would multiply by a rounded reciprocal
        mean.mul_(1 - share).add_(value.to(mean.device, torch.float64) * share)
        mean.clamp_(-_LARGEST, _LARGEST)  # rounding may raise it above the largest value

    def result(self) -> Tensor:
        """Return the mean in the model's dtype; the model's value for ranks without updates."""
        stored = self.entry.stored
        mean = self.mean if stored.is_floating_point() else self.mean.round()  # counters
        return torch.where(self.weight > 0, mean.to(stored.dtype), stored)


def _require_weight(sender: str, weight: float) -> float:
    real = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    number = float(weight) if real and weight <= sys.float_info.max else math.nan
    if not number > 0:
        raise OptionError(f"{sender} has the weight {weight!r}. Give a finite number above zero.")
    return number


def _require_state(sender: str, state: Mapping[str, Tensor], entries: Mapping[str, _Entry]) -> None:
    """Raise LayerError or TrainingError for a state that the model cannot hold."""
    if not isinstance(state, Mapping):
        raise LayerError(f"{sender} is a {type(state).__name__}. Send the state_dict() of a model.")
    if differing := sorted(map(str, state.keys() ^ entries.keys())):
        raise LayerError(
            f"{sender} and the model have different tensors; only one of them has "
            f"{listed(differing)}. Send the state_dict() of the model that was received."
        )
    ranks: dict[str, int] = {}
    for key, entry in entries.items():
        entry.require_fit(sender, state[key])
        if entry.layer is not None and entry.dim is not None:
            rank = state[key].shape[entry.dim]
            if ranks.setdefault(entry.layer, rank) != rank:
                raise LayerError(
                    f"{sender} has {ranks[entry.layer]} ranks in one factor of {entry.layer} and "
                    f"{rank} in the other. Send the state_dict() of the model that was received."
                )
