"""The ways to train, by the name that recipes have for them; others can be registered."""

from __future__ import annotations

from maestro_lod.cli.registry import Registry
from maestro_lod.errors import OptionError, listed, nearest
from maestro_lod.train.method import Settings

METHODS: Registry[type[Settings]] = Registry(
    "method",
    {
        "lod": "train.lod_settings:LoDSettings",
        "elastic": "train.elastic_settings:ElasticSettings",
        "dense": "train.dense:DenseSettings",
        "narrow": "baselines.narrow:NarrowSettings",
        "svd": "baselines.svd:SVDSettings",
        "pufferfish": "baselines.pufferfish:PufferfishSettings",
        "cuttlefish": "baselines.cuttlefish:CuttlefishSettings",
        "spectral": "baselines.spectral:SpectralSettings",
        "imp": "baselines.imp:IMPSettings",
        "raregems": "baselines.raregems:RareGemsSettings",
        "xnor": "baselines.xnor:XNORSettings",
    },
)


def register(name: str, settings: type[Settings]) -> None:
    """Make a method known by a name: recipes then have it as `method`, and its settings as keys."""
    METHODS.register(name, settings)


def method_named(name: str) -> type[Settings]:
    """Return the settings of a method."""
    if name not in METHODS:
        raise OptionError(
            f'method="{name}" is unknown.{nearest(name, METHODS)} Known: {listed(METHODS, 12)}.'
        )
    return METHODS[name]
