"""Registration with transformers, at the moment that transformers itself is imported.

`import maestro_lod` must neither import transformers nor wait for it, and transformers has no entry
point for quantizers. So this waits for the import of the module that holds transformers' registry
and adds this library's quantizer once that module is ready.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_REGISTRY = "transformers.quantizers.auto"
_QUANTIZER = "maestro_lod.integrations.quantizer"  # its import registers it


def register_with_transformers() -> None:
    """Let the stock `from_pretrained` of transformers load directories of this library.

    Costs microseconds if transformers is not imported yet. Calling it again changes nothing.
    """
    if _REGISTRY in sys.modules:
        importlib.import_module(_QUANTIZER)
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


class _RegistryFinder(MetaPathFinder):
    """Wraps the loader of transformers' registry of quantizers, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads the registry as its own loader does, then registers this library's quantizer."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        importlib.import_module(_QUANTIZER)
