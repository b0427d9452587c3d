"""Multi-head attention over four projections that are separate modules.

`nn.MultiheadAttention` reads the weights of its projections instead of calling them, so they must
be dense. `Attention` calls them; it takes the same arguments and returns the same results. The file
imports only torch, so that an extracted model needs this class alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PARTS = ("q", "k", "v", "out_proj")


class Attention(nn.Module):
    """`nn.MultiheadAttention` with projections `q`, `k`, `v`, `out_proj` of any linear kind."""

    q: nn.Module
    k: nn.Module
    v: nn.Module
    out_proj: nn.Module
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    user_attributes: tuple[str, ...] = ()
    """The names of attributes that a user added to torch's layer."""
    applies_parts = False
    read_by_dense = ("out_proj",)
    """The parts whose weights torch's layer reads instead of calling them."""

    # torch's transformer layers decide by these on their fast path, which needs dense weights.
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    @staticmethod
    def blocker(dense: nn.MultiheadAttention) -> str:
        """Return why this layer cannot be unpacked, '' if it can."""
        if type(dense.out_proj) is not nn.modules.linear.NonDynamicallyQuantizableLinear:
            return f"its out_proj is a {type(dense.out_proj).__name__}"
        packed = ["in_proj_weight"] if dense._qkv_same_embed_dim else []
        for name in packed or ["q_proj_weight", "k_proj_weight", "v_proj_weight"]:
            if dense._parameters.get(name) is None:
                return "its weights are computed (weight norm, spectral norm, pruning, …)"
        return ""

    def __init__(self, dense: nn.MultiheadAttention) -> None:
        """Copy the options of `dense`, and view its weights in `nn.Linear` projections."""
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = (
            dense.embed_dim, dense.num_heads, dense.head_dim,
        )  # fmt: skip
        self.kdim, self.vdim = dense.kdim, dense.vdim
        self.dropout, self.batch_first = dense.dropout, dense.batch_first
        self.add_zero_attn = dense.add_zero_attn
        weights: Sequence[Tensor]
        packed: Sequence[Tensor]
        if dense._qkv_same_embed_dim:
            weights = dense.in_proj_weight.chunk(3)
            packed = [dense.in_proj_weight] * 3
        else:
            weights = packed = [dense.q_proj_weight, dense.k_proj_weight, dense.v_proj_weight]
        in_bias = dense.in_proj_bias
        biases = [None] * 3 if in_bias is None else list(in_bias.chunk(3))
        self.q, self.k, self.v = (
            _linear(weight, bias, source, in_bias)
            for weight, bias, source in zip(weights, biases, packed, strict=True)
        )
        out = dense.out_proj
        self.out_proj = _linear(out.weight, out.bias, out.weight, out.bias)
        self.bias_k = cast("nn.Parameter | None", dense.bias_k)
        self.bias_v = cast("nn.Parameter | None", dense.bias_v)
        self.train(dense.training)

    def repacked(self, parts: Mapping[str, nn.Module]) -> nn.MultiheadAttention | None:
        """Return torch's own attention over these projections, None unless all are dense."""
        if not all(type(part) is nn.Linear for part in parts.values()):
            return None
        q, k, v, out = (cast("nn.Linear", parts[name]) for name in PARTS)
        plain = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, bias=q.bias is not None,
            add_bias_kv=self.bias_k is not None, add_zero_attn=self.add_zero_attn, kdim=self.kdim,
            vdim=self.vdim, batch_first=self.batch_first, device="meta",
        )  # fmt: skip
        if plain.in_proj_weight is not None:
            plain.in_proj_weight = _joined(q.weight, k.weight, v.weight)
        else:
            plain.q_proj_weight, plain.k_proj_weight, plain.v_proj_weight = (
                _joined(part.weight) for part in (q, k, v)
            )
        if plain.in_proj_bias is not None:
            plain.in_proj_bias = _joined(q.bias, k.bias, v.bias)
            plain.out_proj.bias = _joined(out.bias)
        plain.out_proj.weight = _joined(out.weight)
        if self.bias_k is not None and self.bias_v is not None:
            plain.bias_k, plain.bias_v = _joined(self.bias_k), _joined(self.bias_v)
        return plain.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched: bool = F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal=True is a hint about attn_mask, which is missing. Give attn_mask too."
            )
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        query, key, value = self._batch_first(batched, query, key, value)
        # as torch does, trust the hint where the mask is not needed otherwise
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._merged_mask(query, key, attn_mask, key_padding_mask)
        q, k, v = self._projected(query, key, value)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)  # (N, heads, L, S)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        output: Tensor = self.out_proj(heads.transpose(1, 2).flatten(-2))  # (N, L, embed_dim)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _batch_first(self, batched: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Give query, key and value the shape (N, length, width)."""
        if not batched:
            inputs = tuple(x.unsqueeze(0) for x in inputs)
        elif not self.batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        key, value = (tuple(x.shape[:2]) for x in inputs[1:])
        if key != value:
            raise AssertionError(f"key has batch and length {key}, value {value}.")
        return inputs

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project to heads (N, heads, length, head_dim), with the extra key positions."""
        q, k, v = self.q(query), self.k(key), self.v(value)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], dim=1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))  # (N, heads, S + 1, head_dim)
        return q, k, v

    def _merged_mask(
        self, query: Tensor, key: Tensor, attn_mask: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """Merge both masks into one to add to the scores: (N or 1, heads or 1, L or 1, S)."""
        n, length, source = query.shape[0], query.shape[1], key.shape[1]
        merged: Tensor | None = None
        if attn_mask is not None:
            expected = {2: (length, source), 3: (n * self.num_heads, length, source)}
            if tuple(attn_mask.shape) != expected.get(attn_mask.ndim):
                raise RuntimeError(
                    f"attn_mask has shape {tuple(attn_mask.shape)}, expected {expected[2]} or "
                    f"{expected[3]}."
                )
            merged = _additive(attn_mask, query.dtype, "attn_mask")
            heads = (n, self.num_heads) if attn_mask.ndim == 3 else (1, 1)
            merged = merged.view(*heads, length, source)
        if padding is not None:
            if tuple(padding.shape) != (n, source):
                raise AssertionError(
                    f"key_padding_mask has shape {tuple(padding.shape)}, expected {(n, source)}."
                )
            added = _additive(padding, query.dtype, "key_padding_mask")[:, None, None]
            merged = added if merged is None else merged + added
        extra = (self.bias_k is not None) + self.add_zero_attn  # positions that are never masked
        return merged if merged is None or not extra else F.pad(merged, (0, extra))


def _joined(*parts: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), parts[0].requires_grad)


def _additive(mask: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    if mask.dtype != torch.bool:
        raise AssertionError(f"{name} is of {mask.dtype}. Give a bool or floating-point mask.")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _linear(
    weight: Tensor, bias: Tensor | None, whole_weight: Tensor, whole_bias: Tensor | None
) -> nn.Linear:
    """Return a linear layer on views of these tensors, trainable as the whole tensors are."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), whole_weight.requires_grad)
    if bias is not None and whole_bias is not None:
        linear.bias = nn.Parameter(bias.detach(), whole_bias.requires_grad)
    return linear
