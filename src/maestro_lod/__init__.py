"""Any PyTorch model in, one training run, every size out.

Every public name is imported when it is first used: torch takes seconds, and `lod --help` needs
none of it. Names of `_EXTRAS` need further packages, and are therefore not part of `__all__`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.integrations.registration import register_with_transformers
from maestro_lod.version import __version__ as __version__

if TYPE_CHECKING:
    from maestro_lod.baselines.compare import compare as compare
    from maestro_lod.cli.data import Data, load_data
    from maestro_lod.cli.registry import METHODS, MODELS
    from maestro_lod.cli.tuning.search import explore as explore
    from maestro_lod.cli.tuning.search import tune as tune
    from maestro_lod.cli.tuning.trials import Reached as Reached
    from maestro_lod.deploy.deployment import deploy_size
    from maestro_lod.deploy.export import export
    from maestro_lod.distributed.fsdp import across_ranks
    from maestro_lod.files.state import load_state, save_state
    from maestro_lod.integrations.accelerate import AcceleratedLoD as AcceleratedLoD
    from maestro_lod.integrations.hf_trainer import LoDTrainerCallback as LoDTrainerCallback
    from maestro_lod.integrations.huggingface import from_pretrained as from_pretrained
    from maestro_lod.integrations.huggingface import save_pretrained as save_pretrained
    from maestro_lod.integrations.lightning import LoDCallback as LoDCallback
    from maestro_lod.layers.lowrank import LowRank
    from maestro_lod.layers.ranks import at_ranks, match_ranks, ranks, set_ranks
    from maestro_lod.layers.registry import register
    from maestro_lod.model.checkpoint import load, save, verify
    from maestro_lod.model.cost import summary
    from maestro_lod.model.frontier import Frontier
    from maestro_lod.model.surgery import decompose, extract, fuse
    from maestro_lod.model.survey import survey
    from maestro_lod.pretrained.compression import compress
    from maestro_lod.pretrained.correction import correct
    from maestro_lod.pretrained.distillation import distill
    from maestro_lod.progress import show_progress
    from maestro_lod.sizes.calibrated_allocation import choose_ranks
    from maestro_lod.sizes.calibration import calibrate
    from maestro_lod.sizes.frontier_search import frontier
    from maestro_lod.sizes.latency import latency, round_ranks
    from maestro_lod.sizes.outputs import own_scores, own_values, scores_loss
    from maestro_lod.train.elastic import Elastic
    from maestro_lod.train.evaluate import evaluate, recalibrate
    from maestro_lod.train.fit import FitOptions, fit
    from maestro_lod.train.lod import LoD
    from maestro_lod.train.method import Method, RunPlan, Settings
    from maestro_lod.train.penalty import group_lasso, importance, prox_group_lasso_
    from maestro_lod.train.sampling import RankSampler
    from maestro_lod.train.shrink import shrink

__all__ = [
    "METHODS",
    "MODELS",
    "Data",
    "Elastic",
    "FitOptions",
    "Frontier",
    "LoD",
    "LowRank",
    "MaestroError",
    "Method",
    "RankSampler",
    "RunPlan",
    "Settings",
    "across_ranks",
    "at_ranks",
    "calibrate",
    "choose_ranks",
    "compress",
    "correct",
    "decompose",
    "deploy_size",
    "distill",
    "evaluate",
    "export",
    "extract",
    "fit",
    "frontier",
    "fuse",
    "group_lasso",
    "importance",
    "latency",
    "load",
    "load_data",
    "load_state",
    "match_ranks",
    "own_scores",
    "own_values",
    "prox_group_lasso_",
    "ranks",
    "recalibrate",
    "register",
    "round_ranks",
    "save",
    "save_state",
    "scores_loss",
    "set_ranks",
    "show_progress",
    "shrink",
    "summary",
    "survey",
    "verify",
]

_HOMES = {
    "baselines.compare": ("compare",),
    "cli.data": ("Data", "load_data"),
    "cli.registry": ("METHODS", "MODELS"),
    "cli.tuning.search": ("explore", "tune"),
    "cli.tuning.trials": ("Reached",),
    "deploy.deployment": ("deploy_size",),
    "deploy.export": ("export",),
    "distributed.fsdp": ("across_ranks",),
    "files.state": ("load_state", "save_state"),
    "integrations.accelerate": ("AcceleratedLoD",),
    "integrations.hf_trainer": ("LoDTrainerCallback",),
    "integrations.huggingface": ("from_pretrained", "save_pretrained"),
    "integrations.lightning": ("LoDCallback",),
    "layers.lowrank": ("LowRank",),
    "layers.ranks": ("at_ranks", "match_ranks", "ranks", "set_ranks"),
    "layers.registry": ("register",),
    "model.checkpoint": ("load", "save", "verify"),
    "model.cost": ("summary",),
    "model.frontier": ("Frontier",),
    "model.surgery": ("decompose", "extract", "fuse"),
    "model.survey": ("survey",),
    "pretrained.compression": ("compress",),
    "pretrained.correction": ("correct",),
    "pretrained.distillation": ("distill",),
    "progress": ("show_progress",),
    "sizes.calibrated_allocation": ("choose_ranks",),
    "sizes.calibration": ("calibrate",),
    "sizes.frontier_search": ("frontier",),
    "sizes.latency": ("latency", "round_ranks"),
    "sizes.outputs": ("own_scores", "own_values", "scores_loss"),
    "train.elastic": ("Elastic",),
    "train.evaluate": ("evaluate", "recalibrate"),
    "train.fit": ("FitOptions", "fit"),
    "train.lod": ("LoD",),
    "train.method": ("Method", "RunPlan", "Settings"),
    "train.penalty": ("group_lasso", "importance", "prox_group_lasso_"),
    "train.sampling": ("RankSampler",),
    "train.shrink": ("shrink",),
}
_REMOVED = {
    "Budget": ". Use lod.Elastic(model, optimizer, sizes=[0.25]).",
    "BudgetTraining": ". Use lod.Elastic(model, optimizer, sizes=[0.25]).",
    "ElasticTraining": ". Use lod.Elastic(model, optimizer, smallest=0.1).",
    "Pressure": ". Use LoD(…, penalty=λ), or lod.Elastic(model, optimizer, sizes=[0.25]).",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_EXTRAS = {
    "AcceleratedLoD": "accelerate",
    "LoDCallback": "lightning",
    "LoDTrainerCallback": "huggingface,accelerate",
    "Reached": "tune",
    "compare": "compare",
    "explore": "tune",
    "from_pretrained": "huggingface",
    "save_pretrained": "huggingface",
    "tune": "tune",
}
"""The extra that a name needs."""

if not TYPE_CHECKING:  # which would let any name pass

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name not in _HOME:
            instead = _REMOVED.get(name, "")
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
        try:
            module = importlib.import_module(f"{__name__}.{_HOME[name]}")
        except ModuleNotFoundError as error:
            if name not in _EXTRAS:
                raise
            text = importlib.import_module(f"{__name__}.text")
            command = text.install_command(_EXTRAS[name])
            raise OptionError(f"lod.{name} needs the package {error.name}: {command}.") from error
        value = globals()[name] = getattr(module, name)
        return value


register_with_transformers()


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
