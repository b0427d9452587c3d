"""Compress a pretrained model from a few batches of its data, without its training.

    python examples/pretrained.py

The pretrained model is a small network for the digits of scikit-learn; nothing is downloaded. It is
compressed to several sizes in three ways: by the SVD of its weights, with calibration on data, and
with calibration and distillation. Labels are used for the evaluation only.
"""

from __future__ import annotations

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod

EPOCHS, BATCH = 12, 32
SHARES = (0.5, 0.3, 0.2)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, then test images and labels: every fourth digit."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 0.6
    labels = torch.tensor(data.target)
    test = torch.arange(len(labels)) % 4 == 0
    return images[~test], labels[~test], images[test], labels[test]


def pretrained(images: Tensor, labels: Tensor) -> nn.Module:
    """Train the model that is then compressed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH):
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model.eval()(images).argmax(1) == labels).float().mean())


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def by_weights(model: nn.Module, share: float) -> nn.Module:
    """Cut every layer to the same share of its ranks, the largest within the limit."""
    low_rank = lod.decompose(copy.deepcopy(model))
    full = lod.ranks(low_rank)
    for percent in range(99, 0, -1):
        ranks = {name: max(1, rank * percent // 100) for name, rank in full.items()}
        small = lod.extract(low_rank, ranks)
        if count_params(small) <= share * count_params(model):
            break
    return small


def main() -> None:
    images, labels, test_images, test_labels = digits()
    original = pretrained(images, labels)
    data = list(images[:512].split(BATCH))  # no labels
    print(f"original: {accuracy(original, test_images, test_labels):.1%} of test digits\n")
    print("parameters   SVD of weights   calibrated   + 200 steps of distillation")
    for share in SHARES:
        row = [accuracy(by_weights(original, share), test_images, test_labels)]
        for steps in (0, 200):
            model = copy.deepcopy(original)
            done = lod.compress(
                model,
                data,
                max_params=share,
                loss=lod.own_scores,
                distill_steps=steps,
                soft_loss=lod.scores_loss,
            )
            row.append(accuracy(lod.extract(model), test_images, test_labels))
        kept = done.params / done.dense_params
        print(f"{kept:9.2f}×{row[0]:16.1%}{row[1]:13.1%}{row[2]:25.1%}")


if __name__ == "__main__":
    main()
