"""The encoder-decoder Transformer that the paper trains to translate, and a smaller one.

Layer norm follows each addition and each embedding; positions are encoded by sinusoids. Every
projection is an `nn.Linear`, so that each can be decomposed.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.errors import OptionError

EPSILON = 1e-6
"""Constant that layer norm adds to the variance."""

KeysValues: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of attention, each (N, heads, tokens, width / heads)."""


def sinusoids(first: int, count: int, like: Tensor) -> Tensor:
    """Return position codes (count, width) from `first`, with width and type of `like`."""
    width = like.shape[-1]
    position = torch.arange(first, first + count, device=like.device, dtype=torch.float32)
    even = torch.arange(0, width, 2, device=like.device, dtype=torch.float32)
    angle = position[:, None] * 10_000.0 ** (-even / width)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).to(like.dtype)


class HeadedAttention(nn.Module):
    """Multi-head attention without biases, with four separate projections."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def keys_values(self, x: Tensor) -> KeysValues:
        """Return keys and values of x."""
        return self._by_head(self.key(x)), self._by_head(self.value(x))

    def forward(
        self, x: Tensor, seen: KeysValues, mask: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            self._by_head(self.query(x)), *seen, mask, dropout, is_causal=causal
        )
        result: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return result

    def _by_head(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], self.heads, x.shape[-1] // self.heads
        return x.reshape(shape).transpose(1, 2)  # (N, heads, T, width / heads)


class FeedForward(nn.Module):
    """Two linear layers with ReLU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)))
        return y


class AddNorm(nn.Module):
    """Sum with the output of a sublayer after dropout, normalized."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(width, eps=EPSILON)

    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.dropout(change))
        return y


class EncoderLayer(nn.Module):
    """Self-attention among source tokens, then a feed-forward layer."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = HeadedAttention(width, heads, dropout)
        self.add_attention = AddNorm(width, dropout)
        self.feed_forward = FeedForward(width, hidden)
        self.add_feed_forward = AddNorm(width, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.add_attention(x, self.attention(x, self.attention.keys_values(x), mask))
        y: Tensor = self.add_feed_forward(x, self.feed_forward(x))
        return y


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, then a feed-forward layer."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = HeadedAttention(width, heads, dropout)
        self.add_attention = AddNorm(width, dropout)
        self.cross_attention = HeadedAttention(width, heads, dropout)
        self.add_cross_attention = AddNorm(width, dropout)
        self.feed_forward = FeedForward(width, hidden)
        self.add_feed_forward = AddNorm(width, dropout)

    def forward(
        self, x: Tensor, source: KeysValues, mask: Tensor, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Return the output and all keys and values; with a past, x is the next token."""
        keys, values = self.attention.keys_values(x)
        if past is not None:
            keys, values = torch.cat((past[0], keys), 2), torch.cat((past[1], values), 2)
        seen = keys, values
        x = self.add_attention(x, self.attention(x, seen, causal=past is None))
        x = self.add_cross_attention(x, self.cross_attention(x, source, mask))
        return self.add_feed_forward(x, self.feed_forward(x)), seen


class Transformer(nn.Module):
    """53,853,184 parameters and 48,914,944 MACs for one source and one target token.

    Source and target share one embedding. With `tie_output` the output projection uses it too:
    48,978,432 parameters.
    """

    def __init__(
        self,
        vocabulary: int = 9521,
        width: int = 512,
        heads: int = 8,
        hidden: int | None = None,
        layers: int = 6,
        dropout: float = 0.1,
        *,
        tie_output: bool = False,
        padding: int = 0,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads or width % 2:
            raise OptionError(
                f"width={width} does not fit heads={heads}. Choose a width that is even and a "
                "multiple of the number of heads."
            )
        sizes = width, heads, hidden or 4 * width, dropout
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.source_norm = nn.LayerNorm(width, eps=EPSILON)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(layers))
        self.target_norm = nn.LayerNorm(width, eps=EPSILON)
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(layers))
        self.output = nn.Linear(width, vocabulary, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2 and weight is not self.embedding.weight:
                nn.init.xavier_uniform_(weight)
        self.scale = 1.0
        if tie_output:
            self.output.weight = self.embedding.weight
            self.scale = width**-0.5  # an embedding's entries are about 1, not 1/√width

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits (N, T, vocabulary) of the token that follows each target token.

        Token ids are (N, S) and (N, T), filled up with `padding` at the end.
        """
        sources, mask = self._encode(source)
        x = self.target_norm(self._embed(target))
        for layer, seen in zip(self.decoder, sources, strict=True):
            x, _ = layer(x, seen, mask)
        return self._logits(x)

    @torch.no_grad()
    def translate(self, source: Tensor, start: int, stop: int, longest: int) -> Tensor:
        """Translate greedily; return token ids (N, at most `longest`).

        A sentence begins after `start`, which is not returned, and ends with `stop`, followed by
        `padding`. Complete sentences are not computed further. Call `eval()` before.
        """
        sources, mask = self._encode(source)
        pasts = [(k[:, :, :0], v[:, :, :0]) for k, v in sources]  # no tokens yet
        result = source.new_full((len(source), longest), self.padding)
        rows = torch.arange(len(source), device=source.device)  # rows of incomplete sentences
        token = source.new_full((len(source), 1), start)
        for t in range(longest):
            x = self.target_norm(self._embed(token, first=t))
            for i, layer in enumerate(self.decoder):
                x, pasts[i] = layer(x, sources[i], mask, pasts[i])
            token = self._logits(x).argmax(-1)
            result[rows, t] = token[:, 0]
            going_on = token[:, 0] != stop
            if not going_on.any():
                return result[:, : t + 1]
            rows, token, mask = rows[going_on], token[going_on], mask[going_on]
            sources = [(k[going_on], v[going_on]) for k, v in sources]
            pasts = [(k[going_on], v[going_on]) for k, v in pasts]
        return result

    def _encode(self, source: Tensor) -> tuple[list[KeysValues], Tensor]:
        """Return the keys and values of the source for each decoder layer, and the padding mask."""
        mask = (source != self.padding)[:, None, None, :]  # (N, heads, tokens that look, S)
        x = self.source_norm(self._embed(source))
        for layer in self.encoder:
            x = layer(x, mask)
        decoder: Any = self.decoder  # for the type checker, its layers are just modules
        return [layer.cross_attention.keys_values(x) for layer in decoder], mask

    def _embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        x = self.embedding(tokens)
        y: Tensor = self.dropout(x + sinusoids(first, tokens.shape[1], like=x))
        return y

    def _logits(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(x * self.scale)
        return y


def transformer_small(
    vocabulary: int = 9521, width: int = 128, *, tie_output: bool = False, padding: int = 0
) -> Transformer:
    """Build a Transformer for a CPU: 3 layers of width 128 with 4 heads.

    3,821,824 parameters and 2,594,944 MACs for one source and one target token; with `tie_output`
    2,603,136 parameters.
    """
    return Transformer(vocabulary, width, 4, layers=3, tie_output=tie_output, padding=padding)
