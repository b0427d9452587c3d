"""Low-rank embeddings, separate or sharing their factors with an output head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.layers.lowrank import LowRank, PlainForm, Rows, Split
from maestro_lod.layers.pivoted import PivotedOutputs
from maestro_lod.layers.registry import register
from maestro_lod.layers.svd import svd_factors

if TYPE_CHECKING:
    from typing_extensions import Self


@register(nn.Embedding)
class LowRankEmbedding(LowRank):
    """`nn.Embedding` as a look-up in u (num_embeddings, r), multiplied by v (r, embedding_dim)."""

    kind = "Embedding"
    options = ("num_embeddings", "embedding_dim", "padding_idx")
    pivots = "v"
    padding_idx: int | None

    @classmethod
    def from_dense_shape(cls, dense: Any, rank: int | None = None) -> Self:
        layer = super().from_dense_shape(dense, rank)
        layer.padding_idx = dense.padding_idx
        return layer

    @classmethod
    def from_dense(
        cls, dense: nn.Module, rank: int | None = None, *, split: Split = svd_factors
    ) -> Self:
        layer = super().from_dense(dense, rank, split=split)
        assert isinstance(dense, nn.Embedding)
        padding = dense.padding_idx
        if padding is not None and not bool(dense.weight[padding].any()):
            with torch.no_grad():  # the SVD has rounding errors
                layer.u[padding] = 0.0
        return layer

    @property
    def slow(self) -> str:
        return "faster only at few ranks, since a product follows each lookup"

    @classmethod
    def blocker(cls, dense: Any) -> str:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if value := getattr(dense, option):
                return f"{option}={value} acts on rows of a dense weight"
        return ""

    @property
    def num_embeddings(self) -> int:
        return self.u.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.v.shape[1]

    def forward(self, input: Tensor) -> Tensor:
        self.note_positions(input.numel())
        u, v = self._active_factors()
        rows = F.embedding(input, u, self.padding_idx)  # (..., r), then (..., embedding_dim)
        output = F.linear(rows, v.mT)
        return output.to(v.dtype)  # autocast narrows products, but not look-ups

    def count_positions(self, *inputs: Tensor) -> int:
        return inputs[0].numel()

    def lookups(self, *inputs: Tensor) -> Tensor:
        return inputs[0].detach().flatten().bincount(minlength=self.num_embeddings)

    def output_rows(self, output: Tensor, *inputs: Any) -> Rows:
        return [output.reshape(-1, self.embedding_dim)]

    # a dense look-up has no MACs, so only parameters can be saved

    def macs(self, positions: int, rank: int | None = None) -> int:
        return positions * (self.rank if rank is None else rank) * self.embedding_dim

    def dense_macs(self, positions: int) -> int:
        return 0

    def executed_macs(self, positions: int, rank: int) -> int:
        return self.macs(positions, rank)

    def dense(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        return self._embedding(u @ v)

    def factored(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        second = nn.Linear(v.shape[0], self.embedding_dim, bias=False, device="meta")
        second.weight = nn.Parameter(v.mT.contiguous(), self.trainable[1])
        return nn.Sequential(self._embedding(u), second).train(self.training)

    def pivoted(self, rank: int | None = None) -> nn.Module:
        (kept,), (others,), (columns,) = self._pivoted_matrices(rank)
        second = nn.Linear(others.shape[1], others.shape[0], bias=False, device="meta")
        second.weight = nn.Parameter(others, self.trainable[1])
        table = self._embedding(kept.mT.contiguous())
        return PivotedOutputs(table, second, columns.argsort()).train(self.training)

    def _embedding(self, weight: Tensor) -> nn.Embedding:
        number, dim = weight.shape
        plain = nn.Embedding(number, dim, padding_idx=self.padding_idx, device="meta")
        plain.weight = nn.Parameter(weight, self.trainable[0])
        return plain.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self._repr_rank()}"


class SharedHead(nn.Module):
    """A linear output head that uses the factors of a low-rank embedding: logits = u·(v·x) + bias.

    The embedding is not a child of this module, so that it keeps its only name in the model, also
    if the head comes first.
    """

    kind = "SharedHead"
    replaces = nn.Linear
    bias: nn.Parameter | None
    user_attributes: tuple[str, ...] = ()
    """The names of attributes that a user added to the linear layer."""

    def __init__(self, embedding: LowRankEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, where torch does not look for children
        self.register_parameter("bias", bias)
        self.train(embedding.training)

    @property
    def embedding(self) -> LowRankEmbedding:
        return self._embedding[0]

    @property
    def weight(self) -> Tensor:
        """The dense weight, for code that expects a linear layer."""
        return self.embedding.weight

    def forward(self, input: Tensor) -> Tensor:
        u, v = self.embedding._active_factors()
        return F.linear(F.linear(input, v), u, self.bias)  # (..., r), then (..., num_embeddings)

    @property
    def in_features(self) -> int:
        return self.embedding.embedding_dim

    @property
    def out_features(self) -> int:
        return self.embedding.num_embeddings

    @property
    def rank(self) -> int:
        return self.embedding.rank

    def count_positions(self, *inputs: Tensor) -> int:
        return inputs[0].numel() // self.embedding.embedding_dim

    def macs(self, positions: int, rank: int | None = None) -> int:
        return positions * self.embedding.weights(rank)

    def dense_macs(self, positions: int) -> int:
        return positions * self.embedding.dense_weights

    def plain_macs(self, form: PlainForm, positions: int, rank: int) -> int:
        if form == "dense":
            return self.dense_macs(positions)
        return self.macs(positions, max(rank, 1))  # rank 0 becomes one rank of zeros

    def executed_macs(self, positions: int, rank: int) -> int:
        return self.macs(positions, rank)

    def copied_weights(self, form: PlainForm, rank: int) -> int:
        """Count the scalars that plain layers store twice: the small factor, once transposed."""
        return 0 if form == "dense" else max(rank, 1) * self.embedding.embedding_dim

    def to_torch(self, embedding: nn.Module) -> nn.Module:
        """Return plain layers that share the weight of the embedding's plain form."""
        bias = self.bias is not None
        if isinstance(embedding, nn.Embedding):
            number, dim = embedding.weight.shape
            head: nn.Module = (last := nn.Linear(dim, number, bias=bias, device="meta"))
            last.weight = embedding.weight
        else:
            look_up, v, trainable = _second_factor(embedding)
            rank, dim = v.shape
            first = nn.Linear(dim, rank, bias=False, device="meta")
            # one factor is shared, the other is copied
            first.weight = nn.Parameter(v, trainable)
            last = nn.Linear(rank, look_up.weight.shape[0], bias=bias, device="meta")
            last.weight = look_up.weight
            head = nn.Sequential(first, last)
            for key in ("in_features", "out_features"):
                setattr(head, key, getattr(self, key))  # for the model's code
        if self.bias is not None:
            last.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return head.train(self.training)


def _second_factor(embedding: nn.Module) -> tuple[nn.Embedding, Tensor, bool]:
    """Return the table of an embedding's plain form, what multiplies it, and if that is trained."""
    look_up, multiply = embedding.children()
    assert isinstance(look_up, nn.Embedding)
    assert isinstance(multiply, nn.Linear)
    factor = multiply.weight.detach()
    if isinstance(embedding, PivotedOutputs):
        kept = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
        factor = torch.cat([kept, factor]).index_select(0, embedding.order)
    return look_up, factor.mT.contiguous(), multiply.weight.requires_grad


def can_share(table: nn.Module, head: nn.Module) -> bool:
    """Return whether two layers with one weight are an embedding and its unchanged output head."""
    if type(table) is not nn.Embedding or type(head) is not SharedHead.replaces:
        return False
    one, other = table.weight, head.weight  # not, say, a transposed view, or some rows
    return one.shape == other.shape and one.stride() == other.stride()
