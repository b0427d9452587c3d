"""Static analysis of forwards: which layers' weights does a module's code read directly?

Such code takes a dense weight for granted: a fused kernel, or a check of its dtype.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

_WEIGHTS = ("weight", "all_weights", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_PREFIXES = ("weight_ih", "weight_hh", "weight_hr", "in_proj_")
"""How the weights of a plain layer, a recurrent one, and attention are called."""


Path: TypeAlias = tuple[str, ...]
"""The names that lead from a module to one inside it; "*" stands for any one name."""


class WeightReads(NamedTuple):
    """The weights that the code of a class or method reads and passes on, by module path."""

    weights: frozenset[Path] = frozenset()
    """The submodules whose weights are read."""
    arguments: frozenset[str | int] = frozenset()
    """The parameters of forward whose weights are read, by name and by place."""
    passed: frozenset[tuple[Path, str | int, Path]] = frozenset()
    """Submodules that others are called with: who is called, the argument, what it is. The
    argument is a name, or a place among the positional ones."""
    used: frozenset[str] = frozenset()
    """The attributes of self that are used."""
    calls: frozenset[tuple[Path, str]] = frozenset()
    """The methods of submodules that are called, other than their forward."""


@functools.lru_cache(maxsize=4096)
def analyze_forward(kind: type, methods: frozenset[str] = frozenset()) -> WeightReads:
    """Return what a class reads in its forward and in these methods, or in what those use.

    Properties count too, since others use them. torch's own transformer layers read weights in a
    fast path that is switched off instead.
    """
    properties = [n for base in kind.__mro__ for n, v in vars(base).items() if _is_property(v)]
    waiting, known, found = ["forward", *methods, *properties], set(), WeightReads()
    while waiting:
        if (name := waiting.pop()) not in known:
            known.add(name)
            for function in _run_by(kind, name):
                read = _reading_in(function)
                waiting += read.used
                found = WeightReads(
                    found.weights | read.weights,
                    found.arguments | read.arguments if name == "forward" else found.arguments,
                    found.passed | read.passed,
                    calls=found.calls | read.calls,
                )
    return found


def _is_property(member: object) -> bool:
    return isinstance(member, property)


def _run_by(kind: type, name: str) -> Iterator[types.FunctionType]:
    """Yield the method or property of a class, and those of its bases that it calls by super()."""
    for base in kind.__mro__:
        if name in vars(base):
            member = vars(base)[name]
            function = member.fget if isinstance(member, property) else member
            if not inspect.isfunction(function) or (function.__module__ or "").startswith(
                "torch.nn."
            ):
                return
            yield function
            written: Any = inspect.unwrap(function)
            if not inspect.isfunction(written) or "super" not in written.__code__.co_names:
                return


@functools.lru_cache(maxsize=8192)
def _reading_in(method: Callable[..., object]) -> WeightReads:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        this, *parameters = inspect.signature(method).parameters
    except (OSError, TypeError, SyntaxError, ValueError):  # interactive, or without source
        return WeightReads()
    names = _Names(tree, [this, *parameters])
    weights, used, calls = set[Path](), set[str](), set[tuple[Path, str]]()
    arguments, passed = set[str | int](), set[tuple[Path, str | int, Path]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            for owner, *path in names.paths(node.value):
                if owner == this and not path:
                    used.add(node.attr)
                elif node.attr not in _WEIGHTS and not node.attr.startswith(_PREFIXES):
                    continue
                elif owner == this:
                    whole = path[:-1] if path[-1] == "out_proj" else path
                    weights |= {tuple(path), tuple(whole)}
                elif not path:
                    arguments |= {owner, parameters.index(owner)}
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                owners = names.paths(node.func.value)
                calls |= {(tuple(p), node.func.attr) for o, *p in owners if o == this and p}
            passed |= set(_passed_in(node, this, names))
    return WeightReads(*map(frozenset, (weights, arguments, passed, used, calls)))  # type: ignore[arg-type]


class _Names:
    """The modules that the names in a method stand for, wherever in it they are bound."""

    def __init__(self, tree: ast.AST, parameters: list[str]) -> None:
        self._bound: dict[str, set[Path]] = {name: {(name,)} for name in parameters}
        nodes = list(ast.walk(tree))
        for node in nodes + nodes:  # twice, since a name may be made of another that comes later
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, self.paths(node.value))
            elif isinstance(node, ast.NamedExpr):
                self._bind(node.target, self.paths(node.value))
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, self._items(node.iter))

    def _bind(self, target: ast.AST, paths: set[Path]) -> None:
        for node in ast.walk(target):
            if paths and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._bound[node.id] = self._bound.get(node.id, set()) | paths

    def paths(self, node: ast.AST) -> set[Path]:
        """Return what `a.b[0].c` may stand for, each from a parameter of the method on."""
        if isinstance(node, ast.Name):
            return self._bound.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {(*path, node.attr) for path in self.paths(node.value)}
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Slice):  # a container of some of the modules
                return self.paths(node.value)
            index = node.slice.value if isinstance(node.slice, ast.Constant) else "*"
            return {(*path, str(index)) for path in self.paths(node.value)}
        return set()

    def _items(self, node: ast.AST) -> set[Path]:
        """Return what going through a container may give: of zip and the like, any part of it."""
        if isinstance(node, ast.Call):
            method = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return set[Path]().union(*map(self._items, [*method, *node.args]))
        return {(*path, "*") for path in self.paths(node)}


def _passed_in(call: ast.Call, this: str, names: _Names) -> Iterator[tuple[Path, str | int, Path]]:
    """Yield what a call of a submodule hands to it of the other submodules."""
    given: list[tuple[str | int | None, ast.expr]] = [*enumerate(call.args)]
    given += [(word.arg, word.value) for word in call.keywords]
    for owner, *called in names.paths(call.func):
        for argument, value in given if owner == this else ():
            for first, *path in names.paths(value):
                if argument is not None and first == this and path:
                    yield tuple(called), argument, tuple(path)
