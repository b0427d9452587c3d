"""Who can be compared: methods, ways to cut what one of them has trained, packages of others.

A contender comes to a size in one of three ways: it is trained anew for each size, it is trained
once and cut to each size, or it has a size of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from maestro_lod.cli.methods import METHODS
from maestro_lod.cli.recipe import method_of
from maestro_lod.errors import OptionError, listed, suggest
from maestro_lod.train.method import Settings


@dataclass(frozen=True)
class Contender:
    """One way to a smaller model."""

    name: str
    method: str
    """As recipes have it."""
    settings: tuple[str, ...] = ()
    """key=value, in place of what the recipe says; {smallest} is the smallest size."""
    cut: bool = False
    """Whether what was trained is cut to each size afterwards."""

    @property
    def kind(self) -> type[Settings]:
        """What may be set of its method; imports it."""
        return method_of({"method": self.method})

    @property
    def trained_per_size(self) -> bool:
        """Say whether each size is a training of its own."""
        given: object = getattr(self.kind.at_size, "__func__", None)
        return not self.cut and given is not getattr(Settings.at_size, "__func__", None)

    def chosen(self, smallest: float) -> list[str]:
        """Return its own settings as key=value, given the smallest size of a comparison."""
        return [change.format(smallest=f"{smallest:g}") for change in self.settings]

    def at_size(self, size: float | None) -> list[str]:
        """Return the settings of a training for a size, or of the only one, as key=value."""
        given = {} if size is None else self.kind.at_size(size)
        return [f"{key}={json.dumps(value)}" for key, value in given.items()]

    def has_use_for(self, change: str) -> bool:
        """Say whether a change of a recipe is about all methods, or about this one."""
        key = change.partition("=")[0].partition(".")[0].strip()
        others = set().union(*map(_keys, METHODS.values())) - _keys(self.kind)
        return key not in others

    @property
    def place(self) -> str:
        """What its runs are called by: contenders that train the same share them."""
        return self.method.partition(":")[0].rpartition(".")[2]


def _keys(method: type[Settings]) -> set[str]:
    return {entry.name for entry in dataclasses.fields(method)}  # type: ignore[arg-type]


_PARTICULAR = {
    "elastic": Contender("elastic", "lod", ("elastic={smallest}",), cut=True),
    "svd": Contender("svd", "dense", cut=True),
    "svd-finetuned": Contender("svd-finetuned", "svd", ("finetune=0.25",)),
}
"""Those that are more than the name of a method; the first two are one training for all sizes."""

_PEERS = {
    "torch-pruning": "maestro_lod.baselines.torch_pruning:TorchPruningSettings",
}
"""Packages that one could use instead: where the method is that uses them."""


def known() -> list[str]:
    """Return the names of all contenders."""
    return [*dict.fromkeys([*METHODS, *_PARTICULAR, *_PEERS])]


def require_known(names: Iterable[str]) -> None:
    """Refuse names that no contender has."""
    for name in names:
        if name not in known():
            raise OptionError(
                f"there is no method {name!r}.{suggest(name, known())} Known: "
                f"{listed(known(), 20)}."
            )


def contender(name: str) -> Contender:
    """Return a contender by its name, or say what is missing to have it."""
    require_known([name])
    if name in _PEERS:
        _require_package(name)
    return _PARTICULAR.get(name) or Contender(name, _PEERS.get(name, name))


def _require_package(peer: str) -> None:
    try:
        importlib.import_module(_PEERS[peer].partition(":")[0])
    except ImportError as error:
        raise OptionError(
            f"{peer} needs its package ({error}): pip install 'maestro-lod[compare]'."
        ) from None
