"""A multilayer perceptron with ReLU, for 28×28 images of one channel."""

from __future__ import annotations

from torch import nn


class MLP(nn.Sequential):
    """1,863,690 parameters, 1,861,632 MACs; large enough that a smaller model takes less time."""

    def __init__(self, classes: int = 10, width: int = 1024) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(784, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )
