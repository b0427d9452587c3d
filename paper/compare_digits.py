"""The same comparison on scikit-learn's digits, which take seconds instead of minutes."""

from __future__ import annotations

from typing import Any

from paper.compare import compared, figures, judgement, markdown, pages
from paper.scale import Scale

__all__ = ["TITLE", "figures", "judgement", "markdown", "measure", "pages"]

TITLE = "Figure 3 and Tables 1 to 3 and 15, scaled down further: all methods on LeNet and digits"


def measure(scale: Scale) -> dict[str, Any]:
    return compared(scale, "digits", seeds=3, lr_trials=3, lr_epochs=15)
