"""Train a character-level LSTM and a small nn.Transformer on real text, dense and low-rank.

    python examples/text.py [--data DIR] [--lines 3000] [--steps 1600] [--only lstm|transformer]

Reads the first lines of multi30k/train.jsonl (English and German captions, one JSON object with
`en` and `de` per line) in DIR, or in the directory that the environment variable LOD_DATA names.
The LSTM predicts the next character of English lines; the transformer translates characters. Under
Adam, penalty gradients cannot move ranks below the threshold, so ranks are removed by proximal
steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod

LENGTH, BATCH, EPOCHS = 48, 32, 8
PAD, START = 0, 1


class CharLSTM(nn.Module):
    """Predicts each next character: embedding, LSTM, linear head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 48, padding_idx=PAD)
        self.lstm = nn.LSTM(48, 160, batch_first=True)
        self.head = nn.Linear(160, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(source[:, :-1]))
        return self.head(hidden)  # (N, T, vocabulary), predicts source[:, 1:]

    @staticmethod
    def answer(source: Tensor, target: Tensor) -> Tensor:
        return source[:, 1:]


class CharTransformer(nn.Module):
    """Translates characters with torch's own transformer."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.transformer = nn.Transformer(width, 4, 2, 2, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        given = target[:, :-1]
        causal = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        hidden = self.transformer(
            self.embedding(source) + self.position[: source.shape[1]],
            self.embedding(given) + self.position[: given.shape[1]],
            tgt_mask=causal,
            tgt_is_causal=True,
        )
        return self.head(hidden)  # predicts target[:, 1:]

    @staticmethod
    def answer(source: Tensor, target: Tensor) -> Tensor:
        return target[:, 1:]


@dataclass(frozen=True)
class Text:
    """Lines as character codes (lines, LENGTH); the last tenth is kept for validation."""

    english: Tensor
    german: Tensor
    vocabulary: int

    @property
    def split(self) -> int:
        return len(self.english) * 9 // 10


def read_text(directory: Path, lines: int) -> Text:
    path = directory / "multi30k" / "train.jsonl"
    if not path.exists():
        sys.exit(f"{path} does not exist. Get Multi30k and name its directory with --data.")
    with path.open(encoding="utf-8") as file:
        pairs = [json.loads(line) for _, line in zip(range(lines), file, strict=False)]
    characters = sorted({c for pair in pairs for c in pair["en"] + pair["de"]})
    code = {c: i for i, c in enumerate(characters, start=START + 1)}

    def encoded(key: str) -> Tensor:
        rows = torch.full((len(pairs), LENGTH), PAD)
        for row, pair in zip(rows, pairs, strict=True):
            codes = [START, *(code[c] for c in pair[key])][:LENGTH]
            row[: len(codes)] = torch.tensor(codes)
        return rows

    return Text(encoded("en"), encoded("de"), len(code) + START + 1)


def loss_of(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    answer = model.answer(source, target)
    return F.cross_entropy(model(source, target).flatten(0, 1), answer.flatten(), ignore_index=PAD)


@torch.no_grad()
def validate(model: nn.Module, text: Text) -> float:
    model.eval()
    value = loss_of(model, text.english[text.split :], text.german[text.split :]).item()
    model.train()
    return value


def fit(model: nn.Module, text: Text, steps: int, penalty: float | None) -> float:
    """Train with Adam, by LoD if a penalty is given; return the validation loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    train = None
    if penalty is not None:
        train = lod.LoD(model, optimizer, penalty=penalty, threshold=1e-6, proximal=True)
    order = torch.Generator().manual_seed(0)
    for step in range(steps):
        batch = torch.randint(text.split, (BATCH,), generator=order)
        source, target = text.english[batch], text.german[batch]
        if train is None:
            loss_of(model, source, target).backward()
        else:
            train.backward(lambda s=source, t=target: model(s, t), _loss_on(model, source, target))
        optimizer.step()
        optimizer.zero_grad()
        cool.step()
        if train is not None and (step + 1) % (steps // EPOCHS) == 0:
            train.end_epoch()
            if train.epoch == EPOCHS // 2:
                train.penalty = 0.0  # the ranks are chosen; the remaining weights recover
            print(f"  step {step + 1:5d}  total rank {sum(lod.ranks(model).values())}", flush=True)
    return validate(model, text)


def _loss_on(model: nn.Module, source: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
    answer = model.answer(source, target).flatten()
    return lambda output: F.cross_entropy(output.flatten(0, 1), answer, ignore_index=PAD)


def compare(
    name: str, build: Callable[[], nn.Module], text: Text, steps: int, total_penalty: float
) -> bool:
    """Train dense and low-rank from the same weights; return whether low-rank is nearly as good.

    The penalty acts once per step, so `total_penalty` is divided by the number of steps.
    """
    torch.manual_seed(0)
    dense = build()
    model = lod.decompose(copy.deepcopy(dense))
    size = sum(p.numel() for p in dense.parameters())
    print(f"{name}: {size:,} parameters")
    began = time.perf_counter()
    dense_loss = fit(dense, text, steps, None)
    dense_seconds, began = time.perf_counter() - began, time.perf_counter()
    loss = fit(model, text, steps, total_penalty / steps)
    seconds = time.perf_counter() - began
    lod.fuse(model)
    small = sum(p.numel() for p in model.parameters())
    for title, count, value, took in (
        ("dense", size, dense_loss, dense_seconds),
        ("low-rank", small, loss, seconds),
    ):
        print(f"  {title:9s} {count:8,} parameters  validation loss {value:.4f}  {took:5.0f} s")
    good = small < size and loss <= 1.05 * dense_loss
    verdict = "ok" if good else "NOT ok"
    print(f"  {small / size:.2f}× the size at {loss / dense_loss:.3f}× the loss: {verdict}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LOD_DATA", "data")))
    parser.add_argument("--lines", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--only", choices=("lstm", "transformer"))
    options = parser.parse_args()
    text = read_text(options.data, options.lines)
    good = True
    if options.only != "transformer":
        good &= compare("LSTM", lambda: CharLSTM(text.vocabulary), text, options.steps, 200)
    if options.only != "lstm":
        good &= compare(
            "Transformer", lambda: CharTransformer(text.vocabulary), text, options.steps, 215
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
