"""Small models of several kinds, with data that they can learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm, self.head = nn.LSTM(6, 12), nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.rnn(x.transpose(0, 1))[0][-1]))
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)),
        (6,),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
        ),
        (2, 6, 6),
    ),
    "lstm": (Tagger, (5, 6)),
    "transformer": (Attending, (5, 8)),
}


def batches(shape: tuple[int, ...], count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, 16, *shape, generator=draw)
    y = x.flatten(2)[..., :4].argmax(-1)
    return [*zip(x, y, strict=True)]
