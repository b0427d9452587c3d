"""Low-rank layers, which replace dense ones in `decompose`, and the registry for further kinds."""

from torch import nn

from maestro_lod.layers.attention import Attention
from maestro_lod.layers.composed import composed_once
from maestro_lod.layers.conv import LowRankConv
from maestro_lod.layers.conv_transpose import LowRankConvTranspose
from maestro_lod.layers.embedding import LowRankEmbedding, SharedHead
from maestro_lod.layers.experts import ROUTED, Experts, SortedExperts, Stack, StackedProduct
from maestro_lod.layers.factors import RanksCutWarning
from maestro_lod.layers.linear import LowRankLinear, LowRankTransposedLinear
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.matrix import LowRankMatrix
from maestro_lod.layers.ranks import match_ranks
from maestro_lod.layers.recurrent import Matrix, Product, Recurrent
from maestro_lod.layers.registry import Unpacked, register
from maestro_lod.layers.stack import LowRankStack

# not where they are defined: these files import torch alone
register(nn.MultiheadAttention)(Attention)
for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    register(_kind)(Recurrent)
for _family, _name in [*ROUTED.items(), ("qwen3_omni_moe", "Qwen3OmniMoeTalkerText")]:
    register(f"transformers.models.{_family}.modeling_{_family}.{_name}Experts")(Experts)
register("transformers.models.llama4.modeling_llama4.Llama4TextExperts")(SortedExperts)

__all__ = [
    "Attention",
    "Experts",
    "LowRank",
    "LowRankConv",
    "LowRankConvTranspose",
    "LowRankEmbedding",
    "LowRankLinear",
    "LowRankMatrix",
    "LowRankStack",
    "LowRankTransposedLinear",
    "Matrix",
    "Product",
    "RanksCutWarning",
    "Recurrent",
    "SharedHead",
    "SortedExperts",
    "Stack",
    "StackedProduct",
    "Unpacked",
    "composed_once",
    "match_ranks",
    "register",
]
