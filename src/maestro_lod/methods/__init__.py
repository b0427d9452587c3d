"""The ways to train, by the name that recipes have for them; others can be registered."""

from __future__ import annotations

from maestro_lod.errors import OptionError, listed, nearest
from maestro_lod.methods.cuttlefish import CuttlefishSettings
from maestro_lod.methods.dense import DenseSettings
from maestro_lod.methods.imp import IMPSettings
from maestro_lod.methods.lod import LoDSettings
from maestro_lod.methods.narrow import NarrowSettings
from maestro_lod.methods.pufferfish import PufferfishSettings
from maestro_lod.methods.raregems import RareGemsSettings
from maestro_lod.methods.spectral import SpectralSettings
from maestro_lod.methods.svd import SVDSettings
from maestro_lod.methods.xnor import XNORSettings
from maestro_lod.train.method import Settings

METHODS: dict[str, type[Settings]] = {
    "lod": LoDSettings,
    "dense": DenseSettings,
    "narrow": NarrowSettings,
    "svd": SVDSettings,
    "pufferfish": PufferfishSettings,
    "cuttlefish": CuttlefishSettings,
    "spectral": SpectralSettings,
    "imp": IMPSettings,
    "raregems": RareGemsSettings,
    "xnor": XNORSettings,
}


def register(name: str, settings: type[Settings]) -> None:
    """Make a method known by a name: recipes then have it as `method`, and its settings as keys."""
    if METHODS.get(name, settings) is not settings:
        raise OptionError(f"there is a method {name!r} already. Give another name.")
    METHODS[name] = settings


def method_named(name: str) -> type[Settings]:
    """Return the settings of a method."""
    if name not in METHODS:
        raise OptionError(
            f'method="{name}" is unknown.{nearest(name, METHODS)} Known: {listed(METHODS, 12)}.'
        )
    return METHODS[name]
