"""Which ranks to keep: from one model, the best submodel for every cost."""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from torch import nn

from maestro_lod.errors import LayerError, OptionError, listed, require_whole, suggest
from maestro_lod.layers.ranks import at_ranks, require_low_rank, resolve_for, unwrapped
from maestro_lod.model.cost import Costs
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import Example, require_number
from maestro_lod.model.limits import Point
from maestro_lod.model.macs import DenseMacs, dense_macs
from maestro_lod.progress import ProgressLine
from maestro_lod.sizes.journal import Journal
from maestro_lod.sizes.replay import Loss, Replay, alone_with
from maestro_lod.sizes.strategies import METHODS, Search, Submodel, at_given_ranks

__all__ = ["Frontier", "Point", "frontier"]


def frontier(
    model: nn.Module,
    loss: Loss,
    *,
    method: str = "look-ahead",
    ranks: Sequence[Mapping[str, int | float]] | None = None,
    cost: Literal["macs", "params"] = "macs",
    step: float = 0.1,
    exact: bool = False,
    example: Example | None = None,
    accuracy: Callable[[nn.Module], float] | None = None,
    until: float | Callable[[Point], bool] | None = None,
    progress: Callable[[int, float], None] | None = None,
    resume: str | os.PathLike[str] | None = None,
    memory: int = 2**31,
) -> Frontier:
    """Search the best submodels of a low-rank model, from its own ranks down; changes nothing.

    `loss(model)` evaluates the model on one large fixed batch, and so does `accuracy(model)` for
    each submodel on data of its own. Both get the model without gradients and dropout, and with
    norms that use the statistics of the batch; all that they do to it is undone.

    >>> found = frontier(model, lambda m: F.cross_entropy(m(x), y))
    >>> small = extract(model, found.pick(max_macs=0.25))

    `method`: "greedy" always cuts the layer whose cut raises the loss least (the paper's search),
    by `step` of its ranks; "look-ahead" begins like "greedy", and once the loss rises takes the cut
    that raises it least per saved cost, of any size, and keeps what it measures on the way. Both
    evaluate only the candidates that may be best, or with `exact` all of them before each cut.
    `ranks` evaluates
    these instead of a search, such as those that other runs ended with.

    `cost` is what to save, "macs" or "params". MACs are counted for `example` or, without one, for
    the batch that `loss` evaluates. `until` ends the search at this share of the dense cost, or at
    the first submodel for which it returns True. `progress` is told how many submodels there are
    and the last one's share of the dense cost. `resume` is a file in which the search keeps what it
    has learnt: a search that was killed goes on from there, with the same result. `memory` limits
    the bytes of outputs that are remembered to save time.
    """
    model = unwrapped(model)
    _require_options(method, cost, step, until)
    require_whole("memory", memory)
    require_low_rank(model)
    maps = None if ranks is None else [resolve_for(model, given_ranks) for given_ranks in ranks]
    replay = Replay(model, loss, memory=memory)
    costs = Costs(model, _macs(model, example, replay, needed=cost == "macs"))
    used = method if maps is None else "given"
    about: dict[str, Any] = {"method": used, "cost": cost, "step": step, "exact": exact}
    about |= {"ranks": replay.ranks, "loss": replay.loss}
    with Journal(resume, about) as journal:
        search = Search(replay, costs, cost, step, journal)
        steps = at_given_ranks(search, maps) if maps is not None else _steps(search, method, exact)
        points = []
        for point, share in _measured(search, steps, accuracy, progress or _usual_progress()):
            points.append(point)
            if until is not None and (until(point) if callable(until) else share <= until):
                break
    dense = replace(points[0], ranks={}, **asdict(costs.dense))
    return Frontier(tuple(points), dense, used, cost)


def _steps(search: Search, method: str, exact: bool) -> Iterator[Submodel]:
    """Begin a search, or refuse one in which no layer can go down."""
    if all(len(ladder) == 1 for ladder in search.ladders.values()):
        raise LayerError(
            f"no low-rank layer of {type(search.replay.model).__name__} has a rank at which it has "
            f"fewer {search.cost}: {listed(search.ladders)}. Try "
            f"cost='{'params' if search.cost == 'macs' else 'macs'}'."
        )
    return METHODS[method](search, exact)


def _measured(
    search: Search,
    steps: Iterable[Submodel],
    accuracy: Callable[[nn.Module], float] | None,
    progress: Callable[[int, float], None],
) -> Iterator[tuple[Point, float]]:
    """Yield the model as it is and the submodels of a search, with shares of the dense cost."""
    for count, (ranks, loss) in enumerate(itertools.chain([search.here], steps), 1):
        point, share = _point(search, ranks, loss, accuracy), search.share(ranks)
        progress(count, share)
        yield point, share


def _point(
    search: Search,
    ranks: dict[str, int],
    loss: float,
    accuracy: Callable[[nn.Module], float] | None,
) -> Point:
    model, share = search.replay.model, None
    if accuracy is not None:

        def measure() -> float:
            with at_ranks(model, ranks), alone_with(model):
                value = require_number(accuracy(model), "accuracy")
            if not 0.0 <= value <= 1.0:
                raise OptionError(f"accuracy returned {value!r}. Return a share between 0 and 1.")
            return value

        share = search.journal.answer({"accuracy at": ranks}, measure)
    return Point(ranks, loss, share, **asdict(search.costs.at(ranks)))


def _macs(
    model: nn.Module, example: Example | None, replay: Replay, *, needed: bool
) -> DenseMacs | None:
    """Count MACs on the example or the batch; None if that cannot be done and is not needed."""
    call = replay.call if example is None else example
    if call is None:
        if needed:
            raise OptionError(
                "loss did not call the model itself, so its MACs are not known. Give an example= "
                "of its input, or cost='params'."
            )
        return None
    try:
        return dense_macs(model, call)
    except LayerError:
        if needed or example is not None:
            raise
        return None


def require_method(method: str) -> None:
    """Refuse a way to search that there is not."""
    if method not in METHODS:
        raise OptionError(
            f"method={method!r} is not known.{suggest(str(method), METHODS)} Choose one of "
            f"{listed(METHODS)}."
        )


def _usual_progress() -> Callable[[int, float], None]:
    """Return who is told how far a search has come if nobody else is."""
    tell = ProgressLine("frontier")
    return lambda count, share: tell(lambda: f"{count} sizes, down to {share:.2f}×")


def _require_options(method: str, cost: str, step: float, until: object) -> None:
    require_method(method)
    if cost not in ("macs", "params"):
        raise OptionError(f"cost={cost!r} is not known. Choose 'macs' or 'params'.")
    if not 0.0 < float(step) < 1.0:
        raise OptionError(f"step={step!r} must be a share of a layer's ranks, between 0 and 1.")
    if until is None or callable(until):
        return
    if not isinstance(until, numbers.Real) or not 0.0 < float(until) < 1.0:
        raise OptionError(
            f"until={until!r} must be a share of the dense cost, between 0 and 1, or a function "
            "of a Point that returns True to stop."
        )
