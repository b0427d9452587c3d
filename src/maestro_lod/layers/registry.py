"""Registry: the class that replaces each type of dense layer.

A further kind is one class and one line:

    @register(nn.Bilinear)
    class LowRankBilinear(LowRank):
        ...

A layer with one weight is replaced by a `LowRank`. A layer with several is *unpacked*: replaced by
a module that calls or reads parts, each of which is a dense layer of a registered type. Its class
has the members of `Unpacked`. `examples/own_layer.py` is a kind to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from maestro_lod.errors import LayerError
from maestro_lod.layers.lowrank import LowRank

Kind = TypeVar("Kind", bound=type)


@runtime_checkable
class Unpacked(Protocol):
    """A layer with several weights whose parts are modules; created from the dense layer alone."""

    user_attributes: tuple[str, ...]
    """The names of attributes that a user added to the dense layer."""
    applies_parts: bool
    """Whether it multiplies by the weights of its parts instead of calling them. Then it defines
    `count_positions(*inputs)`, the number of positions, and `observed(on_product, *inputs)`, which
    computes the same and calls `on_product(part, rows, products)` for each product."""

    @staticmethod
    def blocker(dense: Any) -> str:
        """Return why this dense layer cannot be unpacked, '' if it can."""

    def repacked(self, parts: Mapping[str, nn.Module]) -> nn.Module | None:
        """Return the dense layer again over these parts, None unless all are dense."""


_KINDS: dict[type | str, Any] = {}


def register(dense: type[nn.Module] | str) -> Callable[[Kind], Kind]:
    """Return a class decorator that lets the class replace layers of a type in `decompose`.

    Args:
        dense: The type of the dense layers, or its full name if the package is optional.
            Subclasses count if they change only construction and printing.

    Returns:
        A decorator for a class that derives from `LowRank`, or that is `Unpacked`.

    Raises:
        LayerError: When the class is decorated, if it is neither, or the type has another class.

    Example:
        >>> @lod.register("my_package.MyLinear")
        ... class LowRankMyLinear(lod.LowRank):
        ...     kind = "MyLinear"
    """

    def add(kind: Kind) -> Kind:
        if not issubclass(kind, LowRank) and not hasattr(kind, "repacked"):
            raise LayerError(
                f"{kind.__name__} is not a kind of layer. Derive it from lod.LowRank, or define "
                "blocker and repacked as in maestro_lod.layers.Unpacked."
            )
        current = _KINDS.get(dense)
        if current is not None and current.__qualname__ != kind.__qualname__:
            name = dense if isinstance(dense, str) else dense.__name__
            raise LayerError(
                f"{name} is already replaced by {current.__name__}. Register a type once."
            )
        _KINDS[dense] = kind
        return kind

    return add


_HARMLESS = {"__init__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"}


def overridden_members(subclass: type, base: type) -> list[str]:
    """List the members of a subclass that a replacement of its base would lose.

    Static and class methods do not count unless the base has them: they are called on the class.
    """
    between = [each for each in subclass.__mro__ if each not in base.__mro__]
    return [
        name
        for each in between
        for name, value in vars(each).items()
        if hasattr(base, name) or not isinstance(value, staticmethod | classmethod)
        if name not in _HARMLESS and (name not in _IN_EVERY_CLASS)
    ]


_IN_EVERY_CLASS = {*vars(type("_", (), {"__annotations__": {}})), "__constants__"}


def registered_base(dense: type) -> type | None:
    """Return the registered type that a type is or derives from, None if there is none."""
    return next((base for base in dense.__mro__ if _registered(base) is not None), None)


def _registered(dense: type) -> Any:
    return _KINDS.get(dense) or _KINDS.get(f"{dense.__module__}.{dense.__qualname__}")


def _replacement(dense: type) -> Any:
    base = registered_base(dense)
    return None if base is None or overridden_members(dense, base) else _registered(base)


def weights_read_by(dense: type) -> tuple[str, ...]:
    """Return the parts of a dense layer whose weights its code reads instead of calling them."""
    base = registered_base(dense)
    return () if base is None else getattr(_registered(base), "read_by_dense", ())


def low_rank_type(dense: type) -> type[LowRank] | None:
    """Return the low-rank class for layers of this type with one weight, None if there is none."""
    kind = _replacement(dense)
    return kind if kind is not None and issubclass(kind, LowRank) else None


def unpacked_type(dense: type) -> Any:
    """Return the class that unpacks layers of this type, None if there is none."""
    kind = _replacement(dense)
    return None if kind is None or issubclass(kind, LowRank) else kind


def is_unpacked(module: nn.Module) -> bool:
    """Return whether a module is an unpacked layer."""
    return type(module) in _KINDS.values() and not isinstance(module, LowRank)
