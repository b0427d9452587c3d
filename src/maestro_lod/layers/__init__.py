"""Low-rank layers: what `decompose` puts in place of dense ones."""

from torch import nn

from maestro_lod.layers.conv import LowRankConv, LowRankConvTranspose
from maestro_lod.layers.linear import LowRankLinear
from maestro_lod.layers.lowrank import LowRank

LOW_RANK_TYPE: dict[type[nn.Module], type[LowRank]] = {
    nn.Linear: LowRankLinear,
    nn.Conv1d: LowRankConv,
    nn.Conv2d: LowRankConv,
    nn.Conv3d: LowRankConv,
    nn.ConvTranspose1d: LowRankConvTranspose,
    nn.ConvTranspose2d: LowRankConvTranspose,
    nn.ConvTranspose3d: LowRankConvTranspose,
}
"""The one dispatch table, looked up by exact type: a subclass may have a forward of its own."""

__all__ = [
    "LOW_RANK_TYPE",
    "LowRank",
    "LowRankConv",
    "LowRankConvTranspose",
    "LowRankLinear",
]
