"""Every size once more, on all of the data; settings are those that were chosen on less of it."""

from __future__ import annotations

from typing import Any

from paper.every_size import SHARES, Task, drawings, judgement, markdown, measured
from paper.scale import Scale

__all__ = ["TITLE", "figures", "judgement", "markdown", "measure"]

TITLE = "Beyond the paper: every size, on all of MNIST and CIFAR-10"
TASKS = {
    "LeNet, MNIST": Task(
        "paper/lenet.yaml", (0,), {"params": SHARES, "macs": (0.5, 0.33, 0.25)},
        {"data__limit": 60_000},
    ),
    "ResNet, CIFAR-10": Task(
        "paper/resnet.yaml", (0,), {"params": (0.5, 0.25, 0.15)}, {"data__limit": 50_000}
    ),
}  # fmt: skip

figures = drawings


def measure(scale: Scale) -> dict[str, Any]:
    return measured(scale, TASKS)
