"""What the code of a module reads: weights of the layers in it, and of layers it is handed.

Such code takes a dense weight for granted: a fused kernel, or a check of its dtype.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_WEIGHTS = ("weight", "all_weights", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_PREFIXES = ("weight_ih", "weight_hh", "weight_hr", "in_proj_")
"""How the weights of a plain layer, a recurrent one, and attention are called."""


class Reading(NamedTuple):
    """What the code of a class, or one method of it, reads and hands on; modules by their path."""

    weights: frozenset[str] = frozenset()
    """The submodules whose weights are read."""
    arguments: frozenset[str | int] = frozenset()
    """The parameters of forward whose weights are read, by name and by place."""
    passed: frozenset[tuple[str, str | int, str]] = frozenset()
    """Submodules that others are called with: who is called, the argument, what it is. The
    argument is a name, or a place among the positional ones."""
    used: frozenset[str] = frozenset()
    """The attributes of self that are used."""


@functools.lru_cache(maxsize=1024)
def reading_of(kind: type) -> Reading:
    """Return what a class reads in its forward, or in what that uses.

    Properties count too, since others use them. torch's own transformer layers read weights in a
    fast path that is switched off instead.
    """
    properties = [n for base in kind.__mro__ for n, v in vars(base).items() if _is_property(v)]
    waiting, known, found = ["forward", *properties], set(), Reading()
    while waiting:
        if (name := waiting.pop()) not in known:
            known.add(name)
            member = inspect.getattr_static(kind, name, None)
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and not function.__module__.startswith("torch.nn."):
                read = _reading_in(function)
                waiting += read.used
                found = Reading(
                    found.weights | read.weights,
                    read.arguments if name == "forward" else found.arguments,
                    found.passed | read.passed,
                )
    return found


def _is_property(member: object) -> bool:
    return isinstance(member, property)


@functools.lru_cache(maxsize=8192)
def _reading_in(method: Callable[..., Any]) -> Reading:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        this, *parameters = inspect.signature(method).parameters
    except (OSError, TypeError, SyntaxError, ValueError):  # interactive, or without source
        return Reading()
    weights, used = set[str](), set[str]()
    arguments, passed = set[str | int](), set[tuple[str, str | int, str]]()
    for node in ast.walk(tree):
        owner, *path = _dotted(node) or [""]
        if path and owner == this:
            used.add(path[0])
        if path and (path[-1] in _WEIGHTS or path[-1].startswith(_PREFIXES)):
            if owner == this and len(path) > 1:
                layer = ".".join(path[:-1])
                weights |= {layer, layer.removesuffix(".out_proj")}
            elif owner in parameters and len(path) == 1:
                arguments |= {owner, parameters.index(owner)}
        if isinstance(node, ast.Call):
            passed |= set(_passed_in(node, this))
    return Reading(frozenset(weights), frozenset(arguments), frozenset(passed), frozenset(used))


def _dotted(node: ast.AST) -> list[str] | None:
    """Return the names of `a.b.c`, None for anything else."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return [node.id, *path] if isinstance(node, ast.Name) else None


def _passed_in(call: ast.Call, this: str) -> Iterator[tuple[str, str | int, str]]:
    """Yield what a call of a submodule hands to it of the other submodules."""
    called = _dotted(call.func)
    if called is None or called[0] != this:
        return
    given: list[tuple[str | int | None, ast.expr]] = [*enumerate(call.args)]
    given += [(word.arg, word.value) for word in call.keywords]
    for argument, value in given:
        path = _dotted(value)
        if argument is not None and path is not None and path[0] == this and len(path) > 1:
            yield ".".join(called[1:]), argument, ".".join(path[1:])
