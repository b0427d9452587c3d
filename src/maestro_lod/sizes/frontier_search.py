"""Frontier search: the best submodel of a model for every cost."""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from maestro_lod.errors import LayerError, OptionError, listed, require_whole, suggest
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.layers.ranks import at_ranks, require_low_rank, resolve_for, unwrapped
from maestro_lod.model.cost import Costs
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import Example, Objective, require_number
from maestro_lod.model.limits import Size
from maestro_lod.model.macs import DenseMacs, dense_macs
from maestro_lod.progress import OnProgress, ProgressLine
from maestro_lod.sizes.measured_search import measured
from maestro_lod.sizes.replay import Replay, alone_with
from maestro_lod.sizes.strategies import STEPWISE, Search, at_given_ranks

__all__ = ["METHODS", "Frontier", "Size", "frontier"]

METHODS = ("measured", *STEPWISE)


def frontier(
    model: nn.Module,
    objective: Objective,
    *,
    method: str = "measured",
    ranks: Sequence[Mapping[str, int | float]] | None = None,
    cost: Literal["macs", "params"] = "macs",
    step: float = 0.1,
    exact: bool = False,
    example: Example | None = None,
    accuracy: Callable[[nn.Module], float] | None = None,
    until: float | Callable[[Size], bool] | None = None,
    on_progress: OnProgress | None = None,
    resume: str | os.PathLike[str] | None = None,
    memory: int = 2**31,
) -> Frontier:
    """Search the best submodels of a model, from its stored ranks down; changes nothing.

    `objective` and `accuracy` get the model without gradients and dropout, and with norms that use
    batch statistics; changes of modes and running statistics are undone.

    Args:
        model: A decomposed model.
        objective: `objective(model)`: the loss of the model on one large fixed batch.
        method: "measured" measures each layer alone at a few ranks, allocates the ranks of about
            25 sizes, evaluates each, and measures again where much is cut. It takes at most 18
            evaluations per layer and 110 for the sizes, from twelve layers on 7 and 75. "greedy"
            always cuts the layer whose cut raises the loss least (the paper's search), by `step` of
            its ranks. "look-ahead" begins like "greedy"; once the loss rises it takes the cut, of
            any size, that raises it least per saved cost, and keeps the submodels that it measures
            between. The last two evaluate many more submodels.
        ranks: Ranks to evaluate instead of a search, for instance those of other runs.
        cost: The cost to save: "macs" or "params".
        step: The share of a layer's ranks in one step of "greedy" or "look-ahead".
        exact: Whether these two evaluate all candidates before each cut, instead of only those
            that may be best.
        example: An input to count MACs for; by default the batch that `objective` evaluates.
        accuracy: `accuracy(model)`: a share between 0 and 1, evaluated for each submodel.
        until: The share of the dense cost at which the search ends, or a function of a Size that
            returns True for the last one.
        on_progress: `on_progress(done, total, note)` gets a percentage, 100, and the number of
            submodels so far. The percentage is the finished share of "measured", otherwise the
            saved share of the dense cost.
        resume: A directory for measured losses, from which the same call resumes after a kill, with
            the same result.
        memory: The most bytes of cached outputs, which save time.

    Returns:
        The submodels and their costs, from the stored ranks down.

    Raises:
        LayerError: If there is no low-rank layer, or none with a cheaper rank.
        OptionError: If an option is invalid, the objective is not a finite number or differs from
            call to call, or `resume` belongs to another call.

    Example:
        >>> model, x = lod.decompose(nn.Sequential(nn.Linear(64, 32))), torch.randn(100, 64)
        >>> target = model(x).detach()
        >>> frontier = lod.frontier(model, lambda m: (m(x) - target).square().mean())
        >>> small = lod.extract(model, frontier.pick(max_macs=0.25))
    """
    model = unwrapped(model)
    _require_options(method, cost, step, until, exact=exact)
    require_whole("memory", memory)
    require_low_rank(model)
    maps = None if ranks is None else [resolve_for(model, given_ranks) for given_ranks in ranks]
    replay = Replay(model, objective, memory=memory)
    costs = Costs(model, _macs(model, example, replay, needed=cost == "macs"))
    used = method if maps is None else "given"
    last = None if until is None or callable(until) else float(until)
    call: dict[str, Any] = {"method": used, "cost": cost, "step": step, "exact": exact}
    if used == "measured":
        call["until"] = last  # the sizes between depend on it
    call |= {"given ranks": maps, "ranks": replay.ranks, "loss": replay.loss, "model": model}
    told = _Told(on_progress or _default_progress())
    with StageCache(resume, call).answers("search") as answers:
        search = Search(replay, costs, cost, step, answers, told.evaluated)
        if maps is not None:
            steps = at_given_ranks(search, maps)
        else:
            _require_cheaper_ranks(search)
            steps = (
                measured(search, last) if method == "measured" else STEPWISE[method](search, exact)
            )
        points: list[Size] = []
        for ranks_of_size, loss in itertools.chain([search.current], steps):
            share = search.share(ranks_of_size)
            points.append(point := _point(search, ranks_of_size, loss, accuracy))
            told.found(share, of_evaluations=used == "measured")
            if until is not None and (until(point) if callable(until) else share <= until):
                break
    dense = replace(points[0], ranks={}, **asdict(costs.dense))
    return Frontier(tuple(points), dense, used, cost)


@dataclass
class _Told:
    """The progress of a search."""

    on_progress: OnProgress
    percent: int = 0
    note: str = "measuring layers"
    count: int = 0

    def evaluated(self, share: float) -> None:
        """Tell the finished share of all evaluations."""
        self.percent = round(100 * share)
        self.on_progress(self.percent, 100, self.note)

    def found(self, share: float, *, of_evaluations: bool) -> None:
        """Tell that there is another size, with this share of the dense cost."""
        self.count += 1
        self.note = f"{self.count} size{'s' * (self.count > 1)}, down to {share:.2f}×"
        if not of_evaluations:
            self.percent = round(100 * max(0.0, 1.0 - share))
        self.on_progress(self.percent, 100, self.note)


def _require_cheaper_ranks(search: Search) -> None:
    """Raise LayerError if no layer has a cheaper rank."""
    if all(len(ladder) == 1 for ladder in search.ladders.values()):
        raise LayerError(
            f"no low-rank layer of {type(search.replay.model).__name__} has a rank at which it has "
            f"fewer {search.cost}: {listed(search.ladders)}. Try "
            f"cost='{'params' if search.cost == 'macs' else 'macs'}'."
        )


def _point(
    search: Search,
    ranks: dict[str, int],
    loss: float,
    accuracy: Callable[[nn.Module], float] | None,
) -> Size:
    model, share = search.replay.model, None
    if accuracy is not None:

        def measure() -> float:
            with at_ranks(model, ranks), alone_with(model):
                value = require_number(accuracy(model), "accuracy")
            if not 0.0 <= value <= 1.0:
                raise OptionError(f"accuracy returned {value!r}. Return a share between 0 and 1.")
            return value

        share = search.answers.answer({"accuracy at": ranks}, measure)
    return Size(ranks, loss, share, **asdict(search.costs.at(ranks)))


def _macs(
    model: nn.Module, example: Example | None, replay: Replay, *, needed: bool
) -> DenseMacs | None:
    """Count MACs on the example or the batch; None if that fails and they are not needed."""
    call = replay.call if example is None else example
    if call is None:
        if needed:
            raise OptionError(
                "objective did not call the model directly, so its MACs are not known. Give an "
                "example= of its input, or cost='params'."
            )
        return None
    try:
        return dense_macs(model, call)
    except LayerError:
        if needed or example is not None:
            raise
        return None


def require_method(method: str) -> None:
    """Raise OptionError for an unknown search method."""
    if method not in METHODS:
        raise OptionError(
            f"method={method!r} is not known.{suggest(str(method), METHODS)} Choose one of "
            f"{listed(METHODS)}."
        )


def _default_progress() -> OnProgress:
    """Return the default `on_progress`, which writes a progress line."""
    line = ProgressLine("frontier")
    return lambda done, total, note: line(lambda: note)


def _require_options(method: str, cost: str, step: float, until: object, *, exact: bool) -> None:
    require_method(method)
    if exact and method == "measured":
        raise OptionError(
            "exact=True does not apply to method='measured'. Choose 'greedy' or 'look-ahead'."
        )
    if cost not in ("macs", "params"):
        raise OptionError(f"cost={cost!r} is not known. Choose 'macs' or 'params'.")
    if not 0.0 < float(step) < 1.0:
        raise OptionError(f"step={step!r} must be a share of a layer's ranks, between 0 and 1.")
    if until is None or callable(until):
        return
    if not isinstance(until, numbers.Real) or not 0.0 < float(until) < 1.0:
        raise OptionError(
            f"until={until!r} must be a share of the dense cost, between 0 and 1, or a function "
            "of a Size that returns True to stop."
        )
