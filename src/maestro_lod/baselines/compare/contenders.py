"""Contenders of a comparison: methods, models cut after training, and other packages.

A contender reaches a size in one of three ways: it is trained for each size, it is trained once and
cut to each size, or its method determines the size.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from maestro_lod.cli.recipe import method_of
from maestro_lod.cli.registry import METHODS
from maestro_lod.errors import OptionError, listed, suggest
from maestro_lod.train.method import Settings


@dataclass(frozen=True)
class Contender:
    """One method of a comparison, and how it reaches a size."""

    name: str
    method: str
    """The value of the setting `method`."""
    settings: tuple[str, ...] = ()
    """`key=value` that replace settings of the recipe; {smallest} is the smallest size."""
    cut: bool = False
    """True if one trained model is cut to each size afterwards."""

    @property
    def kind(self) -> type[Settings]:
        """Settings class of the method; importing it imports the method."""
        return method_of({"method": self.method})

    @property
    def trained_per_size(self) -> bool:
        """True if each size needs a training."""
        given: object = getattr(self.kind.at_size, "__func__", None)
        return not self.cut and given is not getattr(Settings.at_size, "__func__", None)

    def chosen(self, smallest: float) -> list[str]:
        """Return its own settings as `key=value`, given the smallest size of a comparison."""
        return [change.format(smallest=f"{smallest:g}") for change in self.settings]

    def at_size(self, size: float | None) -> list[str]:
        """Return the settings of a training for a size as `key=value`; none for None."""
        given = {} if size is None else self.kind.at_size(size)
        return [f"{key}={json.dumps(value)}" for key, value in given.items()]

    def has_use_for(self, change: str) -> bool:
        """Return True if a change of a recipe concerns all methods, or this one."""
        key = change.partition("=")[0].partition(".")[0].strip()
        others = set().union(*map(_keys, METHODS.values())) - _keys(self.kind)
        return key not in others

    @property
    def place(self) -> str:
        """Start of the names of its runs; contenders with the same training share runs."""
        return self.method.partition(":")[0].rpartition(".")[2]


def _keys(method: type[Settings]) -> set[str]:
    return {entry.name for entry in dataclasses.fields(method)}  # type: ignore[arg-type]


_PARTICULAR = {
    "elastic": Contender("elastic", "lod", ("elastic={smallest}",), cut=True),
    "svd": Contender("svd", "dense", cut=True),
    "svd-finetuned": Contender("svd-finetuned", "svd", ("finetune=0.25",)),
}
"""Contenders with settings of their own; the first two are trained once for all sizes."""

_PEERS = {
    "torch-pruning": "maestro_lod.baselines.torch_pruning:TorchPruningSettings",
}
"""Contenders that need another package, and their settings class."""


def known() -> list[str]:
    """Return the names of all contenders."""
    return [*dict.fromkeys([*METHODS, *_PARTICULAR, *_PEERS])]


def require_known(names: Iterable[str]) -> None:
    """Raise OptionError for a name that no contender has."""
    for name in names:
        if name not in known():
            raise OptionError(
                f"method {name!r} is unknown.{suggest(name, known())} Known: {listed(known(), 20)}."
            )


def contender(name: str) -> Contender:
    """Return a contender by name; raise OptionError if its package is not installed."""
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
