"""One row for every kind of layer: a small dense model around it, and what it is called with.

`test_kinds.py` holds what is promised of every row. A new kind is one more row: append it to
`KINDS`, or, in a test file of your own, take the promises and give them rows of your own:

    from tests.layers.test_kinds import *

    KINDS = [Kind("my layer", …)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import examples.own_layer  # noqa: F401  # registers nn.Bilinear, which the library does not know


class Around(nn.Module):
    """A model of one layer, so that it has a name and can be replaced in place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer(*inputs)


class Tied(nn.Module):
    """An embedding and the output head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)))


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x, x)


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of layer; sizes are such that every weight has ranks that save something.

    `weights` says where the dense model keeps what is decomposed: parameter -> the low-rank layers
    that it becomes, one after the other along its first dimension. Each is seen as a matrix of its
    first dimension by all others, one per group.
    """

    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: one("weight", ""))
    groups: int = 1
    ids: int | None = None
    """How many ids there are, for a layer that looks ids up instead of taking floats."""
    tied: Literal["keep", "share"] = "keep"
    saves_macs: bool = True
    """Whether fewer ranks mean fewer MACs: not where dense needs none, or all weights run dense."""

    in_onnx: bool = True
    """Whether ONNX can say what the layer does."""

    def __str__(self) -> str:
        return self.name

    def dense(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """Build the dense model, with biases that are not zero, in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    nn.init.normal_(parameter, std=0.3)
        return model.to(dtype).eval()

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, ...]:
        """Draw the arguments of one call."""
        source = torch.Generator().manual_seed(seed)
        if self.ids is not None:
            return tuple(torch.randint(self.ids, s, generator=source) for s in self.shapes)
        return tuple(
            torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in self.shapes
        )

    @property
    def layers(self) -> list[str]:
        """The names of the low-rank layers."""
        return [name for names in self.weights.values() for name in names]

    @torch.no_grad()
    def truncated(self, ranks: Mapping[str, int], dtype: torch.dtype) -> nn.Module:
        """Build the dense model and cut the SVD of each of its weights to a rank."""
        model = self.dense(dtype)
        for parameter, names in self.weights.items():
            weight = model.get_parameter(parameter)
            blocks = weight.chunk(len(names) * self.groups)
            for i, block in enumerate(blocks):
                rank = ranks[names[i // self.groups]]
                u, s, v = torch.linalg.svd(block.flatten(1), full_matrices=False)
                cut = (u[:, :rank] * s[:rank]) @ v[:rank]
                block.copy_(cut.view(block.shape))
        return model


def one(parameter: str, layer: str) -> dict[str, tuple[str, ...]]:
    """Say that a parameter of the layer becomes one low-rank layer."""
    prefix = "layer." if layer else "layer"
    return {f"layer.{parameter}": (f"{prefix}{layer}",)}


def attention_weights(prefix: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{prefix}.in_proj_weight": (f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"),
        f"{prefix}.out_proj.weight": (f"{prefix}.out_proj",),
    }


def recurrent_weights(*suffixes: str, projected: bool = False) -> dict[str, tuple[str, ...]]:
    names = [f"weight_{part}_{suffix}" for suffix in suffixes for part in ("ih", "hh")]
    names += [f"weight_hr_{suffix}" for suffix in suffixes if projected]
    return {f"layer.{name}": (f"layer.{name}",) for name in names}


def plain(
    name: str, layer: Callable[[], nn.Module], *shapes: tuple[int, ...], **options: Any
) -> Kind:
    """Make the row of a layer that stands alone in its model."""
    return Kind(name, lambda: Around(layer()), shapes, **options)


def conv1d_of_transformers(out: int, into: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(out, into)


KINDS = [
    plain("Linear", lambda: nn.Linear(24, 20), (2, 24)),
    plain("Linear without bias", lambda: nn.Linear(20, 28, bias=False), (2, 3, 20)),
    plain("Conv1D of transformers", lambda: conv1d_of_transformers(28, 20), (2, 3, 20)),
    plain("Conv1d", lambda: nn.Conv1d(8, 16, 3, stride=2), (2, 8, 11)),
    plain("Conv2d", lambda: nn.Conv2d(6, 16, 3, 2, 1, padding_mode="reflect"), (2, 6, 9, 9)),
    plain("Conv3d", lambda: nn.Conv3d(4, 12, 2, bias=False), (2, 4, 4, 4, 4)),
    plain("Conv2d with groups", lambda: nn.Conv2d(12, 24, 3, padding="same", groups=2),
          (2, 12, 6, 6), groups=2),
    plain("ConvTranspose1d", lambda: nn.ConvTranspose1d(16, 8, 3, 2), (2, 16, 6)),
    plain("ConvTranspose2d with groups",
          lambda: nn.ConvTranspose2d(24, 8, 3, 2, 1, output_padding=1, groups=2),
          (2, 24, 4, 4), groups=2),
    plain("ConvTranspose3d", lambda: nn.ConvTranspose3d(12, 4, 2, bias=False), (2, 12, 3, 3, 3)),
    plain("Embedding", lambda: nn.Embedding(40, 16, padding_idx=2), (2, 5), ids=40,
          saves_macs=False),
    Kind("tied pair", Tied, ((2, 5),), {"embedding.weight": ("embedding",)}, ids=40, tied="share"),
    Kind("self-attention", SelfAttention, ((2, 4, 16),), attention_weights("layer")),
    plain("cross-attention",
          lambda: nn.MultiheadAttention(16, 2, kdim=20, vdim=14, batch_first=True),
          (2, 3, 16), (2, 5, 20), (2, 5, 14),
          weights=one("q_proj_weight", "q") | one("k_proj_weight", "k") | one("v_proj_weight", "v")
          | one("out_proj.weight", "out_proj")),
    plain("TransformerEncoderLayer",
          lambda: nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True), (2, 4, 16),
          weights=attention_weights("layer.self_attn")
          | one("linear1.weight", "linear1") | one("linear2.weight", "linear2")),
    plain("LSTM", lambda: nn.LSTM(12, 16, 2, bidirectional=True, batch_first=True), (2, 4, 12),
          weights=recurrent_weights("l0", "l0_reverse", "l1", "l1_reverse"), saves_macs=False),
    plain("LSTM with projections", lambda: nn.LSTM(12, 20, proj_size=10, batch_first=True),
          (2, 4, 12), weights=recurrent_weights("l0", projected=True), saves_macs=False,
          in_onnx=False),
    plain("GRU", lambda: nn.GRU(12, 16, bidirectional=True, batch_first=True), (2, 4, 12),
          weights=recurrent_weights("l0", "l0_reverse"), saves_macs=False),
    plain("RNN", lambda: nn.RNN(20, 16, 2, nonlinearity="relu", batch_first=True), (2, 4, 20),
          weights=recurrent_weights("l0", "l1"), saves_macs=False),
    plain("Bilinear", lambda: nn.Bilinear(6, 5, 12), (4, 6), (4, 5)),
]  # fmt: skip
