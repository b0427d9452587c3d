"""Small models and data of our own: an MLP, a Vision Transformer, an LSTM that reads digits."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class MLP(nn.Sequential):
    """Two hidden layers, for 28×28 images."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip


class ViT(nn.Module):
    """A Vision Transformer of four layers, for 28×28 images in patches of 4×4."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(49, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.position
        scores: Tensor = self.head(self.norm(self.encoder(hidden)).mean(1))
        return scores


class RowReader(nn.Module):
    """An LSTM over the rows of a digit."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(rows)[0][:, -1])
        return scores


def rows(batch: int, lines: int = 1437) -> dict[str, Any]:
    """Load scikit-learn's 8×8 digits as sequences of rows; every fifth one is for the test."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 8 - 1
    y, tested = torch.tensor(labels), torch.arange(len(labels)) % 5 == 4
    train = TensorDataset(x[~tested][:lines], y[~tested][:lines])
    test = TensorDataset(x[tested], y[tested])
    return {
        "train": DataLoader(train, batch, shuffle=True),
        "test": DataLoader(test, 360),
    }
