"""Choice of the size to deploy, and of the form of each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

from torch import nn

from maestro_lod.errors import OptionError, listed
from maestro_lod.layers.lowrank import PlainForm
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.layers.ranks import ranks as ranks_of
from maestro_lod.model.cost import Costs, better_forms, cost_of
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import Example
from maestro_lod.model.limits import Size, require_limits
from maestro_lod.model.macs import dense_macs
from maestro_lod.model.surgery import extract
from maestro_lod.sizes.latency import Latency, latency, round_ranks

Judge = Callable[[Mapping[str, int]], Size]
"""Evaluates the loss and accuracy of a submodel that the search did not measure."""

_BY_SIZE = {"max_params", "max_macs", "max_bytes"}


def choose(
    model: nn.Module,
    sizes: Frontier | None,
    limits: Mapping[str, float],
    example: Example,
    multiple: int | None = None,
    judge: Judge | None = None,
    *,
    timed: Example | None = None,
    prefer_speed: bool = False,
) -> tuple[dict[str, int], Size | None, nn.Module]:
    """Choose the best size within limits; without limits the model at its stored ranks.

    Forms are chosen by measured times for a limit on latency, on request, and for a limit on the
    size if the frontier has latencies. Costs are those of the example, and times those of `timed`.

    Returns the ranks, the chosen size (None without limits), and the extracted model.
    """
    if limits:
        require_limits(limits)
        if sizes is None:
            raise OptionError(
                f"{listed(limits)} cannot be used without a frontier. Give one: frontier(…)."
            )
    if not (low_rank_layers(model) or limits or prefer_speed or multiple):
        return {}, None, copy.deepcopy(model)
    known = {key: most for key, most in limits.items() if key != "max_latency"}
    if known and sizes is not None:
        sizes.point(**known)  # refuses what no size meets before anything is measured
    by_size = sizes is not None and sizes.dense.latency is not None and set(limits) & _BY_SIZE
    fast = prefer_speed or by_size or "max_latency" in limits
    measured = latency(model, example if timed is None else timed) if fast else None
    if not limits or sizes is None:
        ranks = ranks_of(model)
        if multiple is not None:
            ranks = round_ranks(model, ranks, multiple=multiple)
        return ranks, None, extract(model, ranks, by=measured or "params")
    if measured is not None:  # the frontier may have times of another batch size
        sizes = sizes.with_latency(measured.predict, measured.dense)
    point, plain = Choice(model, sizes, limits, example, measured, multiple, judge).best()
    return point.ranks, point, plain


@dataclass
class Choice:
    """The best size of a frontier within limits, in its smallest or its fastest forms.

    With `measured` times, layers that are slower factored become dense, as far as limits on the
    size allow.
    """

    model: nn.Module
    sizes: Frontier
    limits: Mapping[str, float]
    example: Example
    measured: Latency | None = None
    multiple: int | None = None
    judge: Judge | None = None
    costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        self.sizes.point(**self.limits)  # raises for limits that no size meets
        self.costs = Costs(self.model, dense_macs(self.model, self.example))

    def best(self) -> tuple[Size, nn.Module]:
        """Return the best size within the limits when deployed, and its extracted model."""
        tried: list[Size] = []
        for point in self.sizes.within(self.limits):
            ranks = point.ranks
            if self.multiple is not None:
                ranks = round_ranks(self.model, ranks, multiple=self.multiple)
            if any(ranks == other.ranks for other in tried):
                continue
            size, forms = self._in_forms(replace(point, ranks=ranks))
            if ranks != point.ranks and self.judge is not None and self._holds(size, self.limits):
                again = self.judge(ranks)  # the search did not measure rounded ranks
                size = replace(size, loss=again.loss, accuracy=again.accuracy)
            if self._holds(size, self.limits):
                plain = extract(self.model, ranks, by=forms)
                size = replace(size, **asdict(cost_of(plain, self.example)))
                if self._holds(size, self.limits):
                    return size, plain
            tried.append(size)
        why = replace(self.sizes, points=tuple(tried)).why_none(self.limits, together=True)
        rounded = f" with its ranks rounded to multiples of {self.multiple}"
        raise OptionError(
            f"{why} These are the values when deployed{rounded if self.multiple else ''}. Give "
            f"wider limits{', or another multiple to round to' if self.multiple else ''}."
        )

    def _in_forms(self, point: Size) -> tuple[Size, dict[str, PlainForm]]:
        """Choose the form of each layer; return the size with its costs, and the forms."""
        forms, measured = better_forms(self.model, point.ranks), self.measured

        def in_forms(forms: Mapping[str, PlainForm]) -> Size:
            seconds = None if measured is None else measured.predict(point.ranks, forms=forms)
            return replace(point, latency=seconds, **asdict(self.costs.at(point.ranks, forms)))

        if measured is None:
            return in_forms(forms), forms
        sizes = {key: limit for key, limit in self.limits.items() if key in _BY_SIZE}
        for name, form in [*forms.items()]:
            if (faster := measured.choose(name, point.ranks[name])) != form:
                tried: dict[str, PlainForm] = {**forms, name: faster}
                if not sizes or self._holds(in_forms(tried), sizes):
                    forms = tried
        return in_forms(forms), forms

    def _holds(self, point: Size, limits: Mapping[str, float]) -> bool:
        """Return whether a size is within limits, with shares of the frontier's dense model."""
        return bool(replace(self.sizes, points=(point,)).within(limits))
