"""Allocator settings of the program: glibc reuses the memory of freed tensors.

Without them, the time of a training step depends on page faults more than on arithmetic. Dense and
low-rank models gain alike, so comparisons between them stay fair.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of returning it to the system.

    By default every step gets fresh pages for its large activations, which the system clears: a
    step of two convolutions took more than twice as long. The setting affects the whole process, so
    the program makes it and the library does not.

    Returns:
        True if glibc is in use and accepted both limits.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # older versions accept at most half of a heap, 32 MiB
    kept = any(libc.mallopt(_MMAP_THRESHOLD, most) for most in (1 << 30, 1 << 25))
    return bool(libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and kept
