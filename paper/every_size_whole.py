"""Every size once more, on all of the data; settings are those that were chosen on less of it."""

from __future__ import annotations

from paper.every_size import Measured, drawings, judgement, markdown, measured
from paper.scale import Scale

__all__ = ["TITLE", "figures", "judgement", "markdown", "measure"]

TITLE = "Beyond the paper: every size, on all of MNIST and CIFAR-10"

figures = drawings


def measure(scale: Scale) -> dict[str, Measured]:
    return measured(scale, ("lenet-whole", "resnet-whole"))
