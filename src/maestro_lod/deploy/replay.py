"""Evaluate a loss at changing ranks, running only what a change can reach.

A search asks for the loss of one model a thousand times, with one layer changed each time. All that
ran before that layer gives what it gave before. So the calls of all modules are numbered in the
order in which they start; what they returned is remembered, within a limit of memory; and a call
that is over before the first use of a changed layer returns what it returned before. The model's
own code runs every time, so nothing has to be known about it. A loss that calls the model batch by
batch makes several passes, and each of them is shortened so.
"""

from __future__ import annotations

import bisect
import logging
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from maestro_lod.cost import Call
from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import activated, require_low_rank

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[[nn.Module], "Tensor | float"]

_PLAIN = (Tensor, bool, int, float, str, type(None))  # what can be returned a second time


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Evaluate a model inside: no gradients, no dropout, norms that look at the batch alone.

    Running statistics mix those of many submodels and fit none of them. Modes and running
    statistics are as before afterwards, whatever happens.
    """
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module, _ in modes if isinstance(module, _NormBase)]
    statistics = [(b, b.clone()) for norm in norms for b in norm.buffers(recurse=False)]
    try:
        for module, _ in modes:
            module.training = isinstance(module, _NormBase)
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in statistics:
                buffer.copy_(before)


@dataclass
class _Called:
    """One call of a module, by the numbers of the calls around it."""

    module: nn.Module
    parent: int
    """The call in which it was made, -1 for none."""
    end: int = 0
    """The first call that starts after this one is over."""
    size: int | None = None
    """The bytes of what it returned, None if that cannot be returned again."""


@dataclass
class _Value:
    """What a call returned or was given, as long as nobody has written into it."""

    leaves: list[Any]
    spec: TreeSpec
    versions: list[int]

    @classmethod
    def of(cls, output: Any, *, copied: bool = False) -> _Value:
        leaves, spec = tree_flatten(output)
        if copied:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(leaves, spec, _versions(leaves))

    def again(self, *, copied: bool) -> Any:
        leaves = self.leaves
        if copied:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten(leaves, self.spec)

    @property
    def touched(self) -> bool:
        return _versions(self.leaves) != self.versions

    def equals(self, other: _Value) -> bool:
        """Say whether both are known to be the same, value by value."""
        same_structure = not self.touched and self.spec == other.spec
        return same_structure and all(map(_equal, self.leaves, other.leaves))


@dataclass
class _Pass:
    """A call that the loss made itself, such as the model's on one batch."""

    start: int
    inputs: _Value
    end: int = 0
    uses: dict[str, int] = field(default_factory=dict)
    """The call in it that uses each low-rank layer first."""
    valid: int = 0
    """Calls that end here or before were remembered at the current ranks."""


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return one is other or (alike and torch.equal(one, other))
    return isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other)


def _versions(leaves: list[Any]) -> list[int]:
    """Return how often each tensor was written to, which torch does not count in inference mode."""
    return [0 if t.is_inference() else t._version for t in leaves if isinstance(t, Tensor)]


class Replay:
    """The loss of a low-rank model at its current ranks, and at ranks that differ from them.

    `loss` is evaluated some times at once, to see in which order modules are called and that
    outputs can be used again. `memory` limits the bytes that are spent on them.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, memory: int) -> None:
        self.model, self._function = model, loss
        self.layers = require_low_rank(model)
        self.ranks = {name: layer.rank for name, layer in self.layers.items()}
        self.call: Call | None = None
        """The arguments of the model's first call, on the meta device; None if there was none."""
        self._calls: list[_Called] = []
        self._passes: list[_Pass] = []
        self._kept: dict[int, _Value | None] = {}  # by the number of the call
        self._written: set[int] = set()  # calls into whose output something is written later
        self._entered = 0  # passes of the evaluation that runs
        self._depth = 0  # in calls
        self._next = 0  # call, if all goes on as it was learnt
        self._until: list[int] = []  # where each pass meets a changed layer
        self._limit = 0  # the same for the pass that runs; -1 if nothing can be used again
        self.loss = self._learn()
        self._plan(memory)
        self._test()

    # -- what a search asks --------------------------------------------------------------------

    def evaluate(self, changes: Mapping[str, int]) -> float:
        """Return the loss at the current ranks with these changes; infinite if it is no number."""
        return self._run({**self.ranks, **changes}, self._reached(self._changed(changes)))

    def accept(self, changes: Mapping[str, int], loss: float) -> None:
        """Make changed ranks the current ones."""
        for part, until in zip(self._passes, self._reached(self._changed(changes)), strict=True):
            part.valid = min(part.valid, until)
        self.ranks = {**self.ranks, **changes}
        self.loss = loss

    def first_use(self, name: str) -> int:
        """Return the number of the call that uses a layer first."""
        uses = (part.uses[name] for part in self._passes if name in part.uses)
        return min(uses, default=len(self._calls))

    def _changed(self, changes: Mapping[str, int]) -> list[str]:
        return [name for name, rank in changes.items() if rank != self.ranks[name]]

    def _reached(self, changed: list[str]) -> list[int]:
        """Return the first call of each pass that these layers reach."""
        return [
            min((part.uses.get(name, part.end) for name in changed), default=part.end)
            for part in self._passes
        ]

    # -- evaluating ----------------------------------------------------------------------------

    def _run(self, ranks: Mapping[str, int], until: list[int]) -> float:
        """Evaluate the loss; what is over at `until` in a pass does as at the current ranks."""
        self._until, self._entered, self._depth = until, 0, 0
        with self._intercepted(self._replayed):
            loss = self._value(ranks)
        for index, output in self._kept.items():
            if output is not None and output.touched:
                self._written.add(index)
                self._kept[index] = None
                part = next(part for part in self._passes if index < part.end)
                part.valid = min(part.valid, index)
        return loss

    def _value(self, ranks: Mapping[str, int]) -> float:
        active = {layer: ranks[name] for name, layer in self.layers.items()}
        with activated(active), batch_statistics(self.model):
            loss = self._function(self.model)
        value = number(loss, "loss")
        return value if math.isfinite(value) else math.inf

    @contextmanager
    def _intercepted(self, called: Callable[..., Any]) -> Iterator[None]:
        """Send the calls of all modules to `called(module, forward, args, kwargs)`."""

        def sent(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: called(module, forward, args, kwargs)

        with ExitStack() as stack:
            for module in self.model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.enter_context(_own(module, "forward", sent(module, module.forward)))
            yield

    def _replayed(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self._depth == 0:
            self._enter(_Value.of((args, kwargs)))
        self._depth += 1
        try:
            output = self._remembered(module, forward, args, kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0 and 0 <= self._limit <= self._next:
            part = self._passes[self._entered - 1]
            part.valid = max(part.valid, self._limit)
        return output

    def _enter(self, inputs: _Value) -> None:
        """Begin a pass. Its outputs can be used again if it gets what it got before.

        A later pass may get something else because an earlier one met a changed layer: that is for
        now. Or because ranks have been changed for good: then it is remembered anew.
        """
        index, self._limit = self._entered, -1
        self._entered += 1
        if index >= len(self._passes):
            return
        part = self._passes[index]
        if index > 0 and not part.inputs.equals(inputs):
            if any(self._until[i] < self._passes[i].end for i in range(index)):
                return
            part.inputs, part.valid = inputs, part.start
        self._next, self._limit = part.start, self._until[index]

    def _remembered(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        index = self._next
        if index >= self._limit:
            return forward(*args, **kwargs)
        call = self._calls[index]
        if call.module is not module:  # not the order that was learnt
            self._limit = -1
            return forward(*args, **kwargs)
        known = self._known(index)
        if known is not None:
            self._next = call.end
            return known
        self._next += 1
        output = forward(*args, **kwargs)
        if index in self._kept and self._next == call.end <= self._limit:
            self._kept[index] = _Value.of(output, copied=index in self._written)
        return output

    def _known(self, index: int) -> Any:
        """Return what a call returned, None if it has to be run.

        In a chain the output of a call goes to the next one and nowhere else, so the output of any
        later one that is over too will do: it is what the first call returns that is run.
        """
        over = min(self._passes[self._entered - 1].valid, self._limit)
        while (call := self._calls[index]).end <= over:
            kept = self._kept.get(index)
            if kept is not None:
                return kept.again(copied=index in self._written)
            if call.end == self._chain_end(call):
                break
            index = call.end
        return None

    def _chain_end(self, call: _Called) -> int:
        """Return where the chain ends that a call is part of: with itself, if it is in none."""
        parent = self._calls[call.parent] if call.parent >= 0 else call
        return parent.end if _is_chain(parent.module) else call.end

    # -- learning the order of calls -----------------------------------------------------------

    def _learn(self) -> float:
        """Evaluate the loss; note which modules call which, and which use low-rank layers."""
        inside: list[int] = []

        def called(
            module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
        ) -> Any:
            if module is self.model and self.call is None:
                self.call = Call(args, kwargs).on_meta()
            index = len(self._calls)
            self._calls.append(call := _Called(module, inside[-1] if inside else -1))
            if not inside:
                self._passes.append(_Pass(index, _Value.of((args, kwargs))))
            inside.append(index)
            try:
                output = forward(*args, **kwargs)
            finally:
                inside.pop()
                call.end = len(self._calls)
                self._passes[-1].end = call.end
            leaves = tree_leaves(output)
            if all(isinstance(leaf, _PLAIN) for leaf in leaves):
                call.size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            return output

        def noted(name: str, factors: Callable[[], Any]) -> Callable[[], Any]:
            def use() -> Any:
                if inside:  # outside, what it changes shows in the inputs of later passes
                    self._passes[-1].uses.setdefault(name, inside[-1])
                return factors()

            return use

        with ExitStack() as stack:
            for name, layer in self.layers.items():
                use = noted(name, layer._active_factors)
                stack.enter_context(_own(layer, "_active_factors", use))
            with self._intercepted(called):
                loss = self._value(self.ranks)
        if not math.isfinite(loss):
            raise OptionError(
                "the loss at the model's own ranks is NaN or infinite. Is the batch empty, or are "
                "weights not finite?"
            )
        return loss

    def _plan(self, memory: int) -> None:
        """Choose which outputs to remember: all, or those before every second, third … layer."""
        starts = sorted(
            {start for part in self._passes for start in (*part.uses.values(), part.end)}
        )
        for stride in range(1, len(starts) + 1):
            kept = self._needed_for(starts[::stride])
            if sum(self._calls[index].size or 0 for index in kept) <= memory:
                self._kept = dict.fromkeys(kept)
                return

    def _needed_for(self, starts: list[int]) -> list[int]:
        """Return the calls that are over at one of these starts while their output is in use.

        It is in use until the call is over in which it was made; in a chain, until the next one is.
        """
        needed = []
        for index, call in enumerate(self._calls):
            parent = call.parent
            while parent >= 0 and self._calls[parent].size is None:
                parent = self._calls[parent].parent  # runs every time: its parts are asked for
            in_use: float = math.inf if parent < 0 else self._calls[parent].end
            if call.end < self._chain_end(call):
                in_use = min(in_use, self._calls[call.end].end)
            later = bisect.bisect_left(starts, call.end)
            if call.size is not None and later < len(starts) and starts[later] < in_use:
                needed.append(index)
        return needed

    def _test(self) -> None:
        """See that the loss is the same again, and also if outputs are used again."""
        again = self._run(self.ranks, self._reached([]))
        if not math.isclose(self.loss, again, rel_tol=1e-4, abs_tol=1e-7):
            raise OptionError(
                f"the loss is {self.loss:.6g} and, evaluated again at the same ranks, {again:.6g}. "
                "Evaluate one fixed batch, without augmentation or other randomness."
            )
        if not self._kept:
            return
        # If modules keep values for themselves, let them keep other ones. Then replay, the longest
        # first, because what runs puts the right ones back.
        self._value({name: rank - rank // 2 for name, rank in self.ranks.items()})
        for name in sorted(self.layers, key=self.first_use, reverse=True):
            if self._run(self.ranks, self._reached([name])) != self.loss:
                logger.warning(
                    "%s gives another loss when outputs of its modules are used again: every "
                    "evaluation runs the whole model", type(self.model).__name__,
                )  # fmt: skip
                self._kept.clear()
                return


def number(value: object, source: str) -> float:
    """Return what a user's function gave as a float, or refuse what is not one number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        what = f"a tensor of shape {tuple(value.shape)}"
    raise OptionError(f"{source} returned {what}. Return one number, such as a mean over a batch.")


def _is_chain(module: nn.Module) -> bool:
    """Say whether a module hands the output of each child to the next one, and nothing else."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not any(isinstance(child, torch.jit.ScriptModule) for child in module)
    )


@contextmanager
def _own(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Give a module an attribute of its own for the `with` block, past its class."""
    before = {name: module.__dict__[name]} if name in module.__dict__ else {}
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]
        module.__dict__.update(before)
