"""Low-rank layers: what `decompose` puts in place of dense ones."""

from torch import nn

from maestro_lod.layers.attention import Attention
from maestro_lod.layers.conv import LowRankConv, LowRankConvTranspose
from maestro_lod.layers.embedding import LowRankEmbedding, SharedHead
from maestro_lod.layers.linear import LowRankLinear, LowRankTransposedLinear
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.recurrent import LowRankMatrix, Matrix, Recurrent

LOW_RANK_TYPE: dict[type[nn.Module], type[LowRank]] = {
    nn.Linear: LowRankLinear,
    nn.Conv1d: LowRankConv,
    nn.Conv2d: LowRankConv,
    nn.Conv3d: LowRankConv,
    nn.ConvTranspose1d: LowRankConvTranspose,
    nn.ConvTranspose2d: LowRankConvTranspose,
    nn.ConvTranspose3d: LowRankConvTranspose,
    nn.Embedding: LowRankEmbedding,
    Matrix: LowRankMatrix,
}
"""The one dispatch table, looked up by exact type: a subclass may have a forward of its own."""

_FOREIGN: dict[str, type[LowRank]] = {
    "transformers.pytorch_utils.Conv1D": LowRankTransposedLinear,
    "transformers.models.falcon.modeling_falcon.FalconLinear": LowRankLinear,
}
"""The same for types of packages that are not imported here, by their full name."""

OPENED_TYPE: dict[type[nn.Module], type[Attention] | type[Recurrent]] = {
    nn.MultiheadAttention: Attention,
    nn.LSTM: Recurrent,
    nn.GRU: Recurrent,
    nn.RNN: Recurrent,
}
"""Layers with several weights: what opens them into parts that can be decomposed one by one."""


def low_rank_type(module: nn.Module) -> type[LowRank] | None:
    """Return the low-rank kind for a dense layer, None if there is none."""
    return low_rank_type_of(type(module))


def low_rank_type_of(kind: type) -> type[LowRank] | None:
    """Return the low-rank kind for a type of dense layer, None if there is none."""
    return LOW_RANK_TYPE.get(kind) or _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")


__all__ = [
    "LOW_RANK_TYPE",
    "OPENED_TYPE",
    "Attention",
    "LowRank",
    "LowRankConv",
    "LowRankConvTranspose",
    "LowRankEmbedding",
    "LowRankLinear",
    "LowRankMatrix",
    "LowRankTransposedLinear",
    "Matrix",
    "Recurrent",
    "SharedHead",
    "low_rank_type",
    "low_rank_type_of",
]
