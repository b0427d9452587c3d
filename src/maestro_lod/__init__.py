"""Any PyTorch model in, one training run, every size out."""

import importlib
from typing import TYPE_CHECKING, Any

from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.installing import install

if TYPE_CHECKING:
    from maestro_lod.app.tuning.search import tune as tune
    from maestro_lod.checkpoint import load, save
    from maestro_lod.cost import summary
    from maestro_lod.deploy.deployment import deploy_size
    from maestro_lod.deploy.export import export
    from maestro_lod.deploy.frontier import frontier
    from maestro_lod.deploy.latency import latency
    from maestro_lod.layers.ranks import at_ranks, ranks, set_ranks
    from maestro_lod.planning import survey
    from maestro_lod.shown import show_progress
    from maestro_lod.surgery import decompose, extract, fuse
    from maestro_lod.train.fit import fit
    from maestro_lod.train.lod import LoD
    from maestro_lod.train.penalty import group_lasso, importance, prox_group_lasso_
    from maestro_lod.train.sampling import RankSampler
    from maestro_lod.train.shrink import shrink
    from maestro_lod.train.strength import Budget, Pressure

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "LoD",
    "MaestroError",
    "Pressure",
    "RankSampler",
    "at_ranks",
    "decompose",
    "deploy_size",
    "export",
    "extract",
    "fit",
    "frontier",
    "fuse",
    "group_lasso",
    "importance",
    "latency",
    "load",
    "prox_group_lasso_",
    "ranks",
    "save",
    "set_ranks",
    "show_progress",
    "shrink",
    "summary",
    "survey",
]

_HOMES = {
    "app.tuning.search": ("tune",),  # which needs an extra, so that it is none of `__all__`
    "checkpoint": ("load", "save"),
    "cost": ("summary",),
    "deploy.deployment": ("deploy_size",),
    "deploy.export": ("export",),
    "deploy.frontier": ("frontier",),
    "deploy.latency": ("latency",),
    "layers.ranks": ("at_ranks", "ranks", "set_ranks"),
    "planning": ("survey",),
    "shown": ("show_progress",),
    "surgery": ("decompose", "extract", "fuse"),
    "train.fit": ("fit",),
    "train.lod": ("LoD",),
    "train.penalty": ("group_lasso", "importance", "prox_group_lasso_"),
    "train.sampling": ("RankSampler",),
    "train.shrink": ("shrink",),
    "train.strength": ("Budget", "Pressure"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: torch takes seconds, and `lod --help` needs none.

    `tune` needs the extra tune.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise OptionError(f"tune needs Optuna: {install('tune')}.") from error
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
