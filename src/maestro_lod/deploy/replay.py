"""Evaluate a loss at changing ranks, running only what a change can reach.

A search asks for the loss of one model a thousand times, with one layer changed each time. All that
ran before that layer gives what it gave before. So the calls of all modules are numbered in the
order in which they start; what they returned is remembered, within a limit of memory; and a call
that is over before the first use of a changed layer returns what it returned before. The model's
own code runs every time, so nothing has to be known about it.
"""

from __future__ import annotations

import bisect
import logging
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from maestro_lod.cost import Call, call_on_meta
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
class _Module:
    """One call of a module, by the numbers of the calls around it."""

    module: nn.Module
    parent: int
    """The call in which it was made, -1 for none."""
    end: int
    """The first call that starts after this one is over."""
    size: int | None = None
    """The bytes of what it returned, None if that cannot be returned again."""


@dataclass
class _Output:
    """What a call returned; handed out as long as nobody has written into it."""

    leaves: list[Any]
    spec: TreeSpec
    versions: list[int]

    @classmethod
    def of(cls, output: Any, *, copied: bool) -> _Output:
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
        self._calls: list[_Module] = []
        self._first_use: dict[str, int] = {}
        self._kept: dict[int, _Output | None] = {}
        self._written: set[int] = set()  # calls into whose output something is written later
        self._valid = 0  # calls that end here or before were remembered at the current ranks
        self._until = self._next = 0
        self.loss = self._learn()
        self._plan(memory)
        self._test()

    # -- what a search asks --------------------------------------------------------------------

    def evaluate(self, changes: Mapping[str, int]) -> float:
        """Return the loss at the current ranks with these changes; infinite if it is no number."""
        start = self._start(changes)
        return self._run({**self.ranks, **changes}, start)

    def first_use(self, name: str) -> int:
        """Return the number of the call that uses a layer first: later ones depend on its rank."""
        return self._first_use[name]

    def accept(self, changes: Mapping[str, int], loss: float) -> None:
        """Make changed ranks the current ones."""
        start = self._start(changes)
        self.ranks = {**self.ranks, **changes}
        self.loss = loss
        self._valid = min(self._valid, start)

    def _start(self, changes: Mapping[str, int]) -> int:
        """Return the first call that a change reaches."""
        changed = [name for name, rank in changes.items() if rank != self.ranks[name]]
        return min(map(self.first_use, changed), default=len(self._calls))

    # -- evaluating ----------------------------------------------------------------------------

    def _run(self, ranks: Mapping[str, int], until: int) -> float:
        """Evaluate the loss; calls that are over at `until` do what they do at `self.ranks`."""
        self._until, self._next = until, 0
        with self._intercepted(self._replayed):
            loss = self._value(ranks)
        if self._next >= until:
            self._valid = max(self._valid, until)
        for index, output in self._kept.items():
            if output is not None and output.touched:
                self._written.add(index)
                self._kept[index] = None
                self._valid = min(self._valid, index)
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
        index = self._next
        if index >= self._until:
            return forward(*args, **kwargs)
        call = self._calls[index]
        if call.module is not module:  # not the order that was learnt
            self._until = 0
            return forward(*args, **kwargs)
        known = self._known(index)
        if known is not None:
            self._next = call.end
            return known
        self._next += 1
        output = forward(*args, **kwargs)
        if index in self._kept and self._next == call.end <= self._until:
            self._kept[index] = _Output.of(output, copied=index in self._written)
        return output

    def _known(self, index: int) -> Any:
        """Return what a call returned, None if it has to be run.

        In a chain the output of a call goes to the next one and nowhere else, so the output of any
        later one that is over too will do: it is what the first call returns that is run.
        """
        over = min(self._valid, self._until)
        while (call := self._calls[index]).end <= over:
            kept = self._kept.get(index)
            if kept is not None:
                return kept.again(copied=index in self._written)
            if call.end == self._chain_end(call):
                break
            index = call.end
        return None

    def _chain_end(self, call: _Module) -> int:
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
                self.call = call_on_meta(Call(args, kwargs))
            index = len(self._calls)
            self._calls.append(call := _Module(module, inside[-1] if inside else -1, end=0))
            inside.append(index)
            try:
                output = forward(*args, **kwargs)
            finally:
                inside.pop()
                call.end = len(self._calls)
            leaves, _ = tree_flatten(output)
            if all(isinstance(leaf, _PLAIN) for leaf in leaves):
                call.size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            return output

        def noted(name: str, factors: Callable[[], Any]) -> Callable[[], Any]:
            def use() -> Any:
                self._first_use.setdefault(name, inside[-1] if inside else len(self._calls))
                return factors()

            return use

        with ExitStack() as stack:
            for name, layer in self.layers.items():
                use = noted(name, layer._active_factors)
                stack.enter_context(_own(layer, "_active_factors", use))
            with self._intercepted(called):
                loss = self._value(self.ranks)
        for name in self.layers:  # what was not used changes nothing
            self._first_use.setdefault(name, len(self._calls))
        if not math.isfinite(loss):
            raise OptionError(
                "the loss at the model's own ranks is NaN or infinite. Is the batch empty, or are "
                "weights not finite?"
            )
        return loss

    def _plan(self, memory: int) -> None:
        """Choose which outputs to remember: all, or those before every second, third … layer."""
        starts = sorted(set(self._first_use.values()))
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
        again = self._run(self.ranks, len(self._calls))
        if not math.isclose(self.loss, again, rel_tol=1e-4, abs_tol=1e-7):
            raise OptionError(
                f"the loss is {self.loss:.6g} and, evaluated again at the same ranks, {again:.6g}. "
                "Evaluate one fixed batch, without augmentation or other randomness."
            )
        if not self._kept:
            return
        # If modules keep values for themselves, let them keep other ones. Then replay, the longest
        # first, because what runs puts the right ones back.
        self._run({name: rank - rank // 2 for name, rank in self.ranks.items()}, 0)
        for start in sorted(set(self._first_use.values()), reverse=True):
            if self._run(self.ranks, start) != self.loss:
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
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before
