"""LeNet-5 with ReLU, for 28×28 images of one channel."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class LeNet(nn.Module):
    """44,426 parameters, 281,640 MACs; the paper's smallest model.

    `width` is that of the first linear layer; the others are in proportion.
    """

    def __init__(self, classes: int = 10, width: int = 120) -> None:
        super().__init__()
        first, second, last = (max(1, round(width * of / 120)) for of in (6, 16, 84))
        self.conv1 = nn.Conv2d(1, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(16 * second, width)
        self.fc2 = nn.Linear(width, last)
        self.fc3 = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)  # (N, 6, 12, 12) at width 120
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # (N, 16, 4, 4)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits
