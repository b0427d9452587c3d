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
from collections.abc import Iterable, Mapping
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
    """Load a state into a client's low-rank model, in place; it gets the ranks of the state."""
    require_low_rank(model)
    match_ranks(model, state)
    unwrapped(model).load_state_dict(dict(state))


@torch.no_grad()
def aggregate(model: nn.Module, updates: Iterable[Update]) -> None:
    """Average what clients of any ranks sent into the server's model, in place.

    Each rank becomes the weighted mean over the clients that hold it, and ranks that no client
    holds keep the server's value. If one update is not of this model, or has values that are not
    finite, nothing is changed.
    """
    by_parameter = _rank_dimensions(model)
    means = {
        key: _Mean(key, value, *by_parameter.get(id(value), (None, None)))
        for key, value in unwrapped(model).state_dict(keep_vars=True).items()
    }
    for number, (state, weight) in enumerate(updates):
        client = f"update {number}"
        _require_weight(client, weight)
        _require_keys(client, state, means)
        for key, mean in means.items():
            mean.add(client, state[key], float(weight))
        _require_paired_ranks(client, state, means)
    for mean in means.values():
        mean.store()


def _rank_dimensions(model: nn.Module) -> dict[int, tuple[str, int]]:
    """Return the layer and the dimension of the ranks of every factor, by its id."""
    layers = require_low_rank(model)
    factors = [(name, layer.u, 1) for name, layer in layers.items()]
    factors += [(name, layer.v, 0) for name, layer in layers.items()]
    return {id(parameter): (name, dim) for name, parameter, dim in factors}


class _Mean:
    """The weighted mean of one tensor over the clients, each rank over those that hold it.

    Summed in float64: the order of the clients does not matter, one client's values come back.
    """

    def __init__(self, key: str, own: Tensor, layer: str | None, dim: int | None) -> None:
        self.key, self.layer, self.own, self.dim = key, layer, own, dim
        self.total = torch.zeros_like(own, dtype=torch.float64)
        shape = [1] * own.ndim
        if dim is not None:
            shape[dim] = own.shape[dim]
        self.weight = own.new_zeros(shape, dtype=torch.float64)

    def add(self, client: str, value: Tensor, weight: float) -> None:
        self._require_fit(client, value)
        held, counted = self.total, self.weight
        if self.dim is not None:
            held = held.narrow(self.dim, 0, value.shape[self.dim])
            counted = counted.narrow(self.dim, 0, value.shape[self.dim])
        held.add_(value.to(held.device, torch.float64), alpha=weight)
        counted.add_(weight)

    def _require_fit(self, client: str, value: Tensor) -> None:
        expected, given = list(self.own.shape), list(value.shape)
        if self.dim is not None and len(given) == len(expected):
            if given[self.dim] > expected[self.dim]:
                raise LayerError(
                    f"{client} has {given[self.dim]} ranks of {self.layer}, the server "
                    f"{expected[self.dim]}: a server cannot learn ranks that it has not."
                )
            expected[self.dim] = given[self.dim]
        if expected != given:
            raise LayerError(
                f"{client} has {self.key} of shape {tuple(given)}, the server "
                f"{tuple(self.own.shape)}: it is of another model."
            )
        if not bool(value.isfinite().all()):
            raise TrainingError(
                f"{client} has values in {self.key} that are not finite. Leave it out."
            )

    def store(self) -> None:
        mean = self.total / self.weight
        if not self.own.is_floating_point():
            mean = mean.round()  # counters
        mean = torch.where(self.weight > 0, mean, 0).to(self.own.dtype)
        self.own.copy_(torch.where(self.weight > 0, mean, self.own))


def _require_weight(client: str, weight: float) -> None:
    if isinstance(weight, bool) or not (weight > 0 and math.isfinite(weight)):
        raise OptionError(f"{client} has the weight {weight!r}, which is not above zero.")


def _require_keys(client: str, state: Mapping[str, Tensor], own: Mapping[str, _Mean]) -> None:
    if differing := sorted(state.keys() ^ own.keys()):
        raise LayerError(
            f"{client} and the server's model do not have the same tensors; only one has "
            f"{listed(differing)}. Clients send the state_dict() of the model they received."
        )


def _require_paired_ranks(
    client: str, state: Mapping[str, Tensor], means: Mapping[str, _Mean]
) -> None:
    ranks: dict[str, int] = {}
    for key, mean in means.items():
        if mean.layer is not None and mean.dim is not None:
            rank = state[key].shape[mean.dim]
            if ranks.setdefault(mean.layer, rank) != rank:
                raise LayerError(
                    f"{client} has {ranks[mean.layer]} ranks in one factor of {mean.layer} and "
                    f"{rank} in the other."
                )
