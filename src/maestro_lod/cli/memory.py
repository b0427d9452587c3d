"""What the process does with memory that tensors give back."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def keep_freed_memory() -> bool:
    """Let glibc keep what tensors give back instead of returning it; say whether it does.

    Otherwise large activations come as fresh pages, which the system clears one by one, every step
    anew. For the process as a whole, so a program decides on it, not the library.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # older versions take no more than half of a heap, 32 MiB
    kept = any(libc.mallopt(_MMAP_THRESHOLD, most) for most in (1 << 30, 1 << 25))
    return bool(libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and kept
