"""Checks for averaged copies of a model, whose ranks must change together with the model's."""

from __future__ import annotations

import gc

from torch import nn
from torch.optim.swa_utils import AveragedModel

from maestro_lod.errors import TrainingError
from maestro_lod.layers.ranks import low_rank_layers


def require_no_other_average(model: nn.Module, ema: AveragedModel | None) -> None:
    """Raise TrainingError if an averaged copy exists whose ranks would not change too.

    torch would silently average ranks that do not correspond: it broadcasts a single rank, and
    cannot detect another order.
    """
    if not _others(model, ema):
        return
    gc.collect()  # removes deleted averages
    if _others(model, ema):
        raise TrainingError(
            "ranks would change while an AveragedModel of this model exists that was not passed "
            "as ema=: its average would mix different ranks. Pass it to the method, such as "
            "LoD(…, ema=averaged), or to shrink. Replace an average that is not updated any "
            "more with copy.deepcopy(averaged.module)."
        )


def _others(model: nn.Module, ema: AveragedModel | None) -> bool:
    layers = {id(layer) for layer in low_rank_layers(model).values()}
    return any(
        id(layer.source) in layers
        for average in gc.get_objects()
        # isinstance would be slow, and run the code of proxies
        if type(average) is AveragedModel and average is not ema and "module" in average._modules
        for layer in low_rank_layers(average.module).values()
    )
