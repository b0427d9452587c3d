"""Replay: evaluate an objective at changing ranks, running only the affected modules.

A search evaluates the loss of one model a thousand times, with one layer changed each time. Modules
that run before that layer return the same outputs again. So outputs are cached, by their place in
the tree of calls, and returned until a changed layer is used. Only modules are skipped: all other
code of the model runs every time. An objective that calls the model batch by batch makes several
passes, each of which is shortened.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import activated, require_low_rank
from maestro_lod.model.inputs import ModelInputs, Objective, batch_statistics, require_number
from maestro_lod.model.replace import model_lock

logger = logging.getLogger(__name__)

_Place: TypeAlias = tuple[int, ...]
"""A call in the tree of calls: (2, 0, 1) is the second call in the first call in the third pass."""

_PLAIN = (Tensor, bool, int, float, str, type(None))  # types that can be returned again


class _Values:
    """Arguments or outputs of a call, with a check for later in-place changes."""

    def __init__(self, values: Any) -> None:
        self.leaves, self._structure = tree_flatten(values)
        self._versions = self._writes()

    def _writes(self) -> list[int]:
        tensors = (leaf for leaf in self.leaves if isinstance(leaf, Tensor))
        return [0 if t.is_inference() else t._version for t in tensors]  # not counted in inference

    @property
    def written(self) -> bool:
        return self._writes() != self._versions

    @property
    def size(self) -> int | None:
        """Bytes of the tensors; None if some value cannot be returned again."""
        if all(isinstance(leaf, _PLAIN) for leaf in self.leaves):
            return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Tensor))
        return None

    def again(self, *, copied: bool) -> Any:
        leaves = self.leaves
        if copied:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten(leaves, self._structure)

    def equals(self, other: _Values) -> bool:
        """Return whether all values are plain and equal."""
        alike = self._structure == other._structure and not self.written
        return alike and all(map(_equal, self.leaves, other.leaves))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return one is other or (alike and torch.equal(one, other))
    return isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other)


@contextmanager
def alone_with(model: nn.Module) -> Iterator[None]:
    """Lock and evaluate a model inside the block, in which its modes and forwards are changed."""
    with model_lock(model), batch_statistics(model):
        yield


class _Intercepted:
    """A forward, or a use of factors, that a replay intercepts.

    Other threads that run the model meanwhile, and copies of it, use the original.
    """

    def __init__(self, replay: Replay, plain: Callable[..., Any], through: Callable[..., Any]):
        self._replay, self._plain, self._through = replay, plain, through

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = _RUNNING.get() is self._replay
        return (self._through if running else self._plain)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain, memo)


_RUNNING: ContextVar[Replay | None] = ContextVar("maestro_lod.replay", default=None)


class _Seen(NamedTuple):
    """The record of a call in the first evaluation."""

    module: nn.Module
    size: int | None
    layers: frozenset[str]
    """The low-rank layers that its pass used until it returned."""


class Replay:
    """The loss of a low-rank model at its current ranks and at changed ranks.

    `objective` is evaluated several times at first, to record the calls and to check that their
    outputs can be reused. `memory` limits the bytes of cached outputs.
    """

    def __init__(self, model: nn.Module, objective: Objective, *, memory: int) -> None:
        self.model, self._function = model, objective
        self.layers = require_low_rank(model)
        self.ranks = {name: layer.rank for name, layer in self.layers.items()}
        self.call: ModelInputs | None = None
        """The arguments of the model's first call, on the meta device; None if there was none."""
        self._order: dict[str, int] = {}  # of the first uses of layers
        self._seen: dict[_Place, _Seen] = {}
        self._kept: set[_Place] | None = None  # calls with cached outputs; None: not decided yet
        self._inputs: dict[int, _Values] = {}  # by pass
        self._outputs: dict[_Place, tuple[_Values, frozenset[str]]] = {}  # with the layers of _Seen
        self._overwritten: set[_Place] = set()  # calls whose outputs the model changes later
        self.loss = self._run(self.ranks, set())
        if math.isinf(self.loss):
            raise OptionError(
                "the loss at the model's stored ranks is NaN or infinite. Check that the batch is "
                "not empty and the weights are finite."
            )
        self._kept = self._worth_keeping(memory)
        self._test()

    # -- interface of searches -----------------------------------------------------------------

    def evaluate(self, changes: Mapping[str, int]) -> float:
        """Return the loss at the current ranks with these changes; infinite if it is NaN."""
        return self._run({**self.ranks, **changes}, self._changed(changes))

    def accept(self, changes: Mapping[str, int], loss: float) -> None:
        """Make changed ranks the current ones."""
        changed = self._changed(changes)
        for place in [p for p, (_, layers) in self._outputs.items() if layers & changed]:
            del self._outputs[place]
        self.ranks, self.loss = {**self.ranks, **changes}, loss

    def first_use(self, name: str) -> int:
        """Return a layer's number in the order in which layers are first used."""
        return self._order.get(name, len(self._order))

    def _changed(self, changes: Mapping[str, int]) -> set[str]:
        return {name for name, rank in changes.items() if rank != self.ranks[name]}

    # -- evaluating ----------------------------------------------------------------------------

    def _run(self, ranks: Mapping[str, int], changed: set[str]) -> float:
        """Evaluate the loss; calls that end before a changed layer is used are not repeated."""
        self._changed_now, self._change_met, self._replaying = changed, False, False
        self._used: set[str] = set()  # layers, in the current pass
        self._calls = [0]  # numbers of calls by the objective and, nested, by running calls
        active = {layer: ranks[name] for name, layer in self.layers.items()}
        with alone_with(self.model), self._intercepted(), activated(active):
            loss = require_number(self._function(self.model), "objective")
        return loss if math.isfinite(loss) else math.inf

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Intercept calls of modules and uses of factors inside the `with` block."""
        modules = [m for m in self.model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        replaced: list[tuple[nn.Module, str, Any]] = [
            *((m, "forward", self._through(m.forward, self._call, m)) for m in modules),
            *(
                (m, "_active_factors", self._through(m._active_factors, self._use, name))
                for name, m in self.layers.items()
            ),
        ]
        before = [(m, key, m.__dict__.get(key)) for m, key, _ in replaced]  # usually not set
        for module, key, value in replaced:
            module.__dict__[key] = value  # past nn.Module's slow setattr
        outer = _RUNNING.get()
        _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.set(outer)
            for module, key, own in before:
                del module.__dict__[key]
                if own is not None:
                    module.__dict__[key] = own

    def _through(
        self, plain: Callable[..., Any], interceptor: Callable[..., Any], *arguments: Any
    ) -> _Intercepted:
        return _Intercepted(self, plain, partial(interceptor, *arguments, plain))

    def _use(self, name: str, factors: Callable[[], Any]) -> Any:
        self._order.setdefault(name, len(self._order))
        self._used.add(name)
        if name in self._changed_now:
            self._replaying, self._change_met = False, True
        return factors()

    def _call(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.call is None and module is self.model:
            self.call = ModelInputs(args, kwargs).on_meta()
        place = tuple(self._calls)
        if len(place) == 1:
            self._begin_pass(place[0], _Values((args, kwargs)))
        if (cached := self._cached(place, module)) is not None:
            self._calls[-1] += 1
            return cached.again(copied=place in self._overwritten)
        self._calls.append(0)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._calls.pop()
            self._calls[-1] += 1
        if self._kept is None:
            self._seen[place] = _Seen(module, _Values(output).size, frozenset(self._used))
        elif self._replaying and place in self._kept:
            values = _Values(output)
            if place in self._overwritten:
                values = _Values(values.again(copied=True))
            self._outputs[place] = values, frozenset(self._used)
        return output

    def _cached(self, place: _Place, module: nn.Module) -> _Values | None:
        """Return the cached output of a call if the call would return it again, else None."""
        if place in self._seen and self._seen[place].module is not module:
            self._replaying = False  # calls come in another order than in the first evaluation
        if not self._replaying or place not in self._outputs:
            return None
        values, layers = self._outputs[place]
        if values.written:
            self._overwritten.add(place)
        if values.written or layers & self._changed_now:
            return None
        self._used |= layers
        return values

    def _begin_pass(self, index: int, inputs: _Values) -> None:
        """Check whether a pass has the same inputs as before.

        Inputs may differ since an earlier pass used a changed layer, which is temporary, or since
        ranks were accepted; then the outputs of the pass are cached again.
        """
        self._used = set()
        self._replaying = index in self._inputs and self._inputs[index].equals(inputs)
        if not self._replaying and not self._change_met:
            self._replaying, self._inputs[index] = True, inputs
            for place in [place for place in self._outputs if place[0] == index]:
                del self._outputs[place]

    # -- after the first evaluation ------------------------------------------------------------

    def _worth_keeping(self, memory: int) -> set[_Place]:
        """Return the calls whose outputs are worth caching.

        After such a call, and before its outer call ends, some low-rank layer is used; otherwise
        the outer output is enough. If memory is short, outer calls come first, then early ones.
        """
        kept = set()
        for place, (_, size, layers) in sorted(self._seen.items(), key=lambda s: (len(s[0]), s[0])):
            outer = place[:-1]
            while outer and self._seen[outer].size is None:
                outer = outer[:-1]  # not cached
            until = self._seen[outer].layers if outer else frozenset(self._order)
            if size is not None and layers != until and size <= memory:
                memory -= size
                kept.add(place)
        return kept

    def _test(self) -> None:
        """Check that the loss is the same when repeated, and with cached outputs."""
        again = self._run(self.ranks, set())
        if not math.isclose(self.loss, again, rel_tol=1e-4, abs_tol=1e-7):
            raise OptionError(
                f"the loss differs between two evaluations at the same ranks: {self.loss:.6g} and "
                f"{again:.6g}. Use one fixed batch, without augmentation or other randomness."
            )
        if not self._kept:
            return
        # modules that keep state get the state of other ranks; then the longest replays come first,
        # because modules that run restore theirs
        self._run({name: rank - rank // 2 for name, rank in self.ranks.items()}, set(self.layers))
        for name in sorted(self.layers, key=self.first_use, reverse=True):
            if self._run(self.ranks, {name}) != self.loss:
                logger.warning(
                    "the loss of %s changes with cached outputs of its modules: every evaluation "
                    "runs the whole model", type(self.model).__name__,
                )  # fmt: skip
                self._kept.clear()
                self._outputs.clear()
                return
