"""Training methods by name; each is imported on use, and others can be registered."""

from __future__ import annotations

from maestro_lod.cli.registry import Registry
from maestro_lod.errors import OptionError, listed, suggest
from maestro_lod.train.method import Settings

METHODS: Registry[type[Settings]] = Registry(
    "method",
    {
        "lod": "train.lod_settings:LoDSettings",
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
    """Register a training method for recipes, which then have its settings as keys.

    Args:
        name: The value of the setting `method`.
        settings: The settings of the method: a frozen dataclass of `setting` fields.

    Raises:
        OptionError: If another method has the name.

    Example:
        >>> register("mine", MySettings)  # lod train digits --set method=mine
    """
    METHODS.register(name, settings)


def method_named(name: str) -> type[Settings]:
    """Return the settings class of a method."""
    if name not in METHODS:
        raise OptionError(
            f'method="{name}" is unknown.{suggest(name, METHODS)} Known: {listed(METHODS, 12)}.'
        )
    return METHODS[name]
