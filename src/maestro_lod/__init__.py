"""Any PyTorch model in, one training run, every size out."""

import importlib
from typing import TYPE_CHECKING, Any

from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.installing import install
from maestro_lod.integrations.registration import register_with_transformers
from maestro_lod.version import __version__ as __version__

if TYPE_CHECKING:
    from maestro_lod.cli.tuning.search import tune as tune
    from maestro_lod.deploy.deployment import deploy_size
    from maestro_lod.deploy.export import export
    from maestro_lod.integrations.huggingface import from_pretrained as from_pretrained
    from maestro_lod.integrations.huggingface import save_pretrained as save_pretrained
    from maestro_lod.layers.ranks import at_ranks, ranks, set_ranks
    from maestro_lod.model.checkpoint import load, save
    from maestro_lod.model.cost import summary
    from maestro_lod.model.surgery import decompose, extract, fuse
    from maestro_lod.model.survey import survey
    from maestro_lod.progress import show_progress
    from maestro_lod.sizes.frontier_search import frontier
    from maestro_lod.sizes.latency import latency
    from maestro_lod.train.fit import fit
    from maestro_lod.train.lod import LoD
    from maestro_lod.train.objective import Budget, Pressure
    from maestro_lod.train.penalty import group_lasso, importance, prox_group_lasso_
    from maestro_lod.train.sampling import RankSampler
    from maestro_lod.train.shrink import shrink


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
    "cli.tuning.search": ("tune",),  # which needs an extra, so that it is none of `__all__`
    "deploy.deployment": ("deploy_size",),
    "deploy.export": ("export",),
    "integrations.huggingface": ("from_pretrained", "save_pretrained"),  # an extra too
    "layers.ranks": ("at_ranks", "ranks", "set_ranks"),
    "model.checkpoint": ("load", "save"),
    "model.cost": ("summary",),
    "model.surgery": ("decompose", "extract", "fuse"),
    "model.survey": ("survey",),
    "progress": ("show_progress",),
    "sizes.frontier_search": ("frontier",),
    "sizes.latency": ("latency",),
    "train.fit": ("fit",),
    "train.lod": ("LoD",),
    "train.objective": ("Budget", "Pressure"),
    "train.penalty": ("group_lasso", "importance", "prox_group_lasso_"),
    "train.sampling": ("RankSampler",),
    "train.shrink": ("shrink",),
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


register_with_transformers()


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
