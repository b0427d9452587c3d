"""Who can be compared: the methods, what they are cut by, and packages that one could use instead.

A contender comes to a size in one of three ways: it is trained anew for each size, it is trained
once and cut to each size, or it has a size of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from maestro_lod.app.recipe import Recipe, load_recipe
from maestro_lod.errors import OptionError, listed, nearest
from maestro_lod.methods import METHODS
from maestro_lod.train.method import Settings


@dataclass(frozen=True)
class Contender:
    """One way to a smaller model."""

    name: str
    method: str
    """As recipes have it."""
    settings: tuple[str, ...] = ()
    """key=value, beside those of the recipe."""
    size_key: str | None = None
    """The setting that takes a size; None for one that is not trained for a size."""
    cut: bool = False
    """Whether what was trained is cut to each size afterwards."""

    @property
    def trained_as(self) -> str:
        """What its runs are called: those who train the same share them."""
        return ",".join([self.method.partition(":")[0].rpartition(".")[2], *self.settings])


_PARTICULAR = {
    "lod": Contender("lod", "lod", size_key="budget.params"),
    "elastic": Contender("elastic", "lod", ("penalty=0", "sampling=several"), cut=True),
    "svd": Contender("svd", "dense", cut=True),
}
"""Those that are more than a method with a setting `size`, or without."""

_PEERS: dict[str, tuple[str, str]] = {}
"""Packages of others: where the method is, and what to install."""


def known() -> list[str]:
    """Return the names of all contenders."""
    return [*dict.fromkeys([*_PARTICULAR, *METHODS, *_PEERS])]


def contender(name: str) -> Contender:
    """Return a contender by its name; a peer's package is imported here."""
    if name in _PARTICULAR:
        return _PARTICULAR[name]
    if name in METHODS:
        return Contender(name, name, size_key=_size_key(METHODS[name]))
    if name not in _PEERS:
        raise OptionError(
            f"there is no method {name!r}.{nearest(name, known())} Known: {listed(known(), 20)}."
        )
    raise NotImplementedError


def _size_key(method: type[Settings]) -> str | None:
    return "size" if "size" in _keys(method) else None


def _keys(method: type[Settings]) -> set[str]:
    return {entry.name for entry in dataclasses.fields(method)}  # type: ignore[arg-type]


def recipe_for(
    contender: Contender, recipe: str, changes: Iterable[str], others: Sequence[str]
) -> Recipe:
    """Return a recipe as a contender trains it.

    `changes` are a user's; those about settings of other methods alone are left out. `others` are
    those of the comparison.
    """
    foreign = set().union(*map(_keys, METHODS.values()))
    foreign -= _keys(METHODS[contender.method]) if contender.method in METHODS else set()
    kept = [change for change in changes if _top(change) not in foreign]
    return load_recipe(
        recipe, [*kept, f"method={contender.method}", *contender.settings, *others]
    )


def _top(change: str) -> str:
    return change.partition("=")[0].partition(".")[0].strip()
