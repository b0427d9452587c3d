"""Train a LeNet on handwritten digits by LoD, and cut smaller models from it.

    python examples/digits.py

LoD, low-rank ordered decomposition, is the method of the paper. The data are the 1,797 digits of
scikit-learn, enlarged to 28×28; nothing is downloaded.
"""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod

EPOCHS, BATCH, PENALTY = 60, 32, 1e-3


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, then test images and labels: every fifth digit."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # (N, 1, 8, 8)
    images = F.interpolate(images, size=28, mode="bilinear") - 0.3
    labels = torch.tensor(data.target)
    test = torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    correct = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return correct


def main() -> None:
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    example = torch.empty(1, 1, 28, 28)
    shuffle = torch.Generator().manual_seed(0)

    build = lod.MODELS["lenet"]
    dense = build()
    model = lod.decompose(build())
    start = lod.summary(model, example)
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=0.02, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train = lod.LoD(model, optimizer, penalty=PENALTY, threshold=1e-4, seed=0)
    before = accuracy(model, test_images, test_labels)

    began = time.perf_counter()
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=shuffle).split(BATCH):
            x, y = images[batch], labels[batch]
            F.cross_entropy(dense(x), y).backward()
            dense_optimizer.step()
            dense_optimizer.zero_grad()
            with train.step():
                loss = F.cross_entropy(model(x), y) + train.penalty_loss()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        train.end_epoch()
        if epoch % 6 == 5 or epoch == EPOCHS - 1:
            ranks = lod.ranks(model)
            print(
                f"epoch {epoch + 1:2d}/{EPOCHS}  total rank {sum(ranks.values()):3d}  "
                f"accuracy {accuracy(model, test_images, test_labels):.2%}  "
                f"ranks {' '.join(f'{name}:{rank}' for name, rank in ranks.items())}  "
                f"({time.perf_counter() - began:.0f} s)"
            )

    print(f"\n{lod.summary(model, example)}\n")
    print("model                      params      MACs  accuracy")
    full = accuracy(dense, test_images, test_labels)
    print(f"dense, same training      {start.dense_params:7,}  {start.dense_macs:8,}  {full:8.2%}")
    print(f"low-rank before training  {start.params:7,}  {start.macs:8,}  {before:8.2%}")
    for share in (1.0, 0.75, 0.5):
        ranks = {name: max(1, round(share * rank)) for name, rank in lod.ranks(model).items()}
        small = lod.extract(model, ranks)
        cost = lod.summary(small, example)
        title = "low-rank after training" if share == 1.0 else f"… cut to {share:.0%} of its ranks"
        reached = accuracy(small, test_images, test_labels)
        print(f"{title:24s}  {cost.params:7,}  {cost.macs:8,}  {reached:8.2%}")
    ledger = train.ledger
    print(
        f"\ntraining cost relative to dense: {ledger.relative_macs:.2f}× MACs, "
        f"{ledger.relative_params:.2f}× parameters in memory"
    )


if __name__ == "__main__":
    main()
