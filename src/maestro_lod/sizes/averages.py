"""Checks for averaged copies of a model, which must change along with its ranks."""

from __future__ import annotations

import gc

from torch import nn
from torch.optim.swa_utils import AveragedModel

from maestro_lod.errors import TrainingError
from maestro_lod.layers.ranks import low_rank_layers


def require_no_other_average(model: nn.Module, ema: AveragedModel | None) -> None:
    """Refuse to change ranks while an average of the model exists that cannot follow.

    torch would average ranks that do not belong together: of a model with one rank by broadcasting
    it, of one whose ranks were put into order without any sign.
    """
    if not _others(model, ema):
        return
    gc.collect()  # of those that were deleted
    if _others(model, ema):
        raise TrainingError(
            "ranks would change under an AveragedModel of this model that was not given as ema: "
            "its average would mix ranks that do not belong together. Give it, as "
            "LoD(…, ema=averaged) or shrink(…, ema=averaged); of one that is no longer updated, "
            "keep copy.deepcopy(averaged.module) and delete the rest."
        )


def _others(model: nn.Module, ema: AveragedModel | None) -> bool:
    mine = {id(layer) for layer in low_rank_layers(model).values()}
    return any(
        id(layer.source) in mine
        for average in gc.get_objects()
        # isinstance would run the code of proxies, and take long
        if type(average) is AveragedModel and average is not ema and "module" in average._modules
        for layer in low_rank_layers(average.module).values()
    )
