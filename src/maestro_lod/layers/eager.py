"""Whether operations run here and now, as they are written."""

from __future__ import annotations

import torch


def runs_as_written(device: str) -> bool:
    """Say whether nobody compiles, traces or transforms operations, or casts what they get.

    Only then may a layer take a faster way whose operations such tools do not know.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled(device)
    )
