"""The same comparison on the small ResNet and CIFAR-10, at one size and one learning rate."""

from __future__ import annotations

from typing import Any

from paper.compare import compared, figures, judgement, markdown, pages
from paper.scale import Scale

__all__ = ["TITLE", "figures", "judgement", "markdown", "measure", "pages"]

TITLE = "Figure 3 and Tables 1 to 3 and 15, scaled down: all methods on a small ResNet and CIFAR-10"


def measure(scale: Scale) -> dict[str, Any]:
    # a training takes ten minutes of a core: the recipe's learning rate for all, and one seed
    return compared(
        scale, "resnet18-small-cifar10", sizes=(0.25,), seeds=1, lr_trials=1,
        changes=("epochs=20", "schedule.epochs=[12,17]"),
    )  # fmt: skip
