"""Names in recipes: training methods and models, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from torch import nn

from maestro_lod.errors import OptionError, listed, suggest
from maestro_lod.train.method import Settings

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Mapping of names to objects; those given as `module:attribute` are imported on access."""

    def __init__(self, kind: str, homes: Mapping[str, str]) -> None:
        self._kind, self._entries = kind, cast("dict[str, Any]", dict(homes))

    def register(self, name: str, entry: T) -> None:
        """Add an object; raise OptionError if another object has the name."""
        if self._entries.get(name, entry) is not entry:
            raise OptionError(
                f"the name of a {self._kind} is already in use: {name!r}. Give another name."
            )
        self._entries[name] = entry

    def unregister(self, name: str) -> None:
        """Remove a name."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(importlib.import_module(f"maestro_lod.{module}"), attribute)
        return cast("T", entry)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


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


MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "lenet": "cli.models.lenet:LeNet",
        "mlp": "cli.models.mlp:MLP",
        "resnet18": "baselines.models.resnet:resnet18",
        "resnet18_small": "baselines.models.resnet:resnet18_small",
        "resnet50": "baselines.models.resnet:resnet50",
        "vgg19": "baselines.models.vgg:VGG19",
        "vgg19_small": "baselines.models.vgg:vgg19_small",
        "transformer": "baselines.models.transformer:Transformer",
        "transformer_small": "baselines.models.transformer:transformer_small",
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
