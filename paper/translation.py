"""torch's own nn.Transformer, translating the characters of Multi30k's captions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from maestro_lod.train.evaluate import IGNORED

LENGTH = 48
PAD, START, UNKNOWN = 0, 1, 2
ALPHABET = " abcdefghijklmnopqrstuvwxyzäöüß.,'-0123456789"
VOCABULARY = len(ALPHABET) + UNKNOWN + 1


class CharTransformer(nn.Module):
    """Predicts each next character of the translation (N, T, VOCABULARY) from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        hidden = self.transformer(
            self.embedding(source) + self.position[: source.shape[1]],
            self.embedding(given) + self.position[: given.shape[1]],
            tgt_mask=causal,
            tgt_is_causal=True,
        )
        logits: Tensor = self.head(hidden)
        return logits


def characters(batch: int, lines: int = 6000) -> dict[str, Any]:
    """Return batches of ((English, German so far), next German characters)."""
    train, test = (_encoded(split, lines) for split in ("train", "val"))
    return {
        "train": _Pairs(DataLoader(train, batch, shuffle=True, drop_last=True)),
        "test": _Pairs(DataLoader(test, 256)),
    }


class _Pairs:
    """Batches of tensors as (inputs, target), with targets that do not count marked."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        for source, target in self._loader:
            following = target[:, 1:]
            yield (source, target[:, :-1]), following.masked_fill(following == PAD, IGNORED)


def _encoded(split: str, lines: int) -> TensorDataset:
    root = Path(os.environ.get("LOD_DATA", "data"))
    code = {character: i for i, character in enumerate(ALPHABET, UNKNOWN + 1)}
    with (root / "multi30k" / f"{split}.jsonl").open(encoding="utf-8") as file:
        pairs = [json.loads(line) for _, line in zip(range(lines), file, strict=False)]

    def rows(language: str) -> Tensor:
        coded = torch.full((len(pairs), LENGTH), PAD)
        for row, pair in zip(coded, pairs, strict=True):
            text = pair[language].lower()[: LENGTH - 1]
            codes = [START, *(code.get(character, UNKNOWN) for character in text)]
            row[: len(codes)] = torch.tensor(codes)
        return coded

    return TensorDataset(rows("en"), rows("de"))
