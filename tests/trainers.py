"""What the tests of all trainers compare with: one small task, and the loop written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from maestro_lod import LoD, decompose, ranks

BATCH, ACCUMULATED, CLIP, EPOCHS = 8, 2, 0.5, 4
OPTIONS: dict[str, Any] = {"penalty": 0.02, "threshold": 0.4, "seed": 3}
"""With these the network loses ranks at several epochs' ends."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 3)
    )


def low_rank_network() -> nn.Module:
    return decompose(network())


def samples(count: int = 36) -> tuple[Tensor, Tensor]:
    """Return inputs and labels; with 36 the last batch of five is a smaller one."""
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] * 2).round().clamp(-1, 1).long() + 1


def batches(count: int = 36) -> list[tuple[Tensor, Tensor]]:
    x, y = samples(count)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def sgd(parameters: Iterable[Tensor]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.2, momentum=0.9)


def decay(optimizer: optim.Optimizer) -> optim.lr_scheduler.LambdaLR:
    """One factor per optimizer step, of which there are three in an epoch."""
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.02 * step))


def by_hand(
    weight: Callable[[int], float] = lambda i: 1 / ACCUMULATED,
    *,
    epochs: int = EPOCHS,
    bf16: bool = False,
    count: int = 36,
    **options: Any,
) -> LoD:
    """Train by a loop of one's own: accumulation, clipping, a scheduler; `weight` is of batch i."""
    model = low_rank_network()
    optimizer = sgd(model.parameters())
    scheduler = decay(optimizer)
    train = LoD(model, optimizer, **(OPTIONS | options))
    data = batches(count)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(data):
            with train.step():
                with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                    loss = F.cross_entropy(model(x), y)
                (loss * weight(i)).backward()
            if (i + 1) % ACCUMULATED == 0 or i + 1 == len(data):
                train.add_penalty_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        train.end_epoch(last=epoch + 1 == epochs)
    return train


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Compare bit for bit; names may differ by a prefix, the order may not."""
    assert list(ranks(one).values()) == list(ranks(other).values())
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
