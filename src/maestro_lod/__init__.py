"""Any PyTorch model in, one training run, every size out."""

import importlib
from typing import Any

from maestro_lod.checkpoint import load, save
from maestro_lod.cost import summary
from maestro_lod.deploy.deployment import deploy_size
from maestro_lod.deploy.export import export
from maestro_lod.deploy.frontier import frontier
from maestro_lod.deploy.latency import latency
from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.layers.ranks import at_ranks, ranks, set_ranks
from maestro_lod.planning import survey
from maestro_lod.surgery import decompose, extract, fuse
from maestro_lod.train.fit import fit
from maestro_lod.train.lod import LoD
from maestro_lod.train.penalty import group_lasso, importance, prox_group_lasso_
from maestro_lod.train.sampling import RankSampler
from maestro_lod.train.shrink import shrink
from maestro_lod.train.strength import Budget, Pressure

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
    "shrink",
    "summary",
    "survey",
]


def __getattr__(name: str) -> Any:
    """Import `tune` when it is asked for: it needs the extra maestro-lod[tune]."""
    if name == "tune":
        try:
            return importlib.import_module("maestro_lod.app.tuning.search").tune
        except ModuleNotFoundError as error:
            if error.name == "optuna":
                raise OptionError("tune needs Optuna: pip install 'maestro-lod[tune]'.") from error
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
