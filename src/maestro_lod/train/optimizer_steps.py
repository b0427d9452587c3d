"""What happens before or after every step of an optimizer, for as long as somebody wants it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def call_after_steps(optimizer: Optimizer, method: Callable[[], None]) -> None:
    """Call a bound method after every optimizer step that was done, while its object lives."""
    weak = weakref.WeakMethod(method)

    def after_step(stepped: Optimizer, *_: Any) -> None:
        skipped = getattr(stepped, "found_inf", None)
        if skipped is not None and skipped > 0:
            return  # GradScaler lets fused optimizers skip the step themselves
        if (call := weak()) is not None:
            call()

    optimizer.register_step_post_hook(after_step)


def call_before_steps(optimizer: Optimizer, method: Callable[[], None]) -> None:
    """Call a bound method before every optimizer step, while its object lives."""
    weak = weakref.WeakMethod(method)

    def before_step(*_: Any) -> None:
        if (call := weak()) is not None:
            call()

    optimizer.register_step_pre_hook(before_step)
