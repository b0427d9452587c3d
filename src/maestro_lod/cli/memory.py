"""Reuse of freed tensor memory on glibc."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of returning it to the system.

    Otherwise the system clears fresh pages for the large activations of every step: a step of two
    convolutions took more than twice as long. The choice is one of the whole process, so a
    program makes it, not the library.

    Returns:
        True if glibc is in use and accepted both limits.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # older versions take no more than half of a heap, 32 MiB
    kept = any(libc.mallopt(_MMAP_THRESHOLD, most) for most in (1 << 30, 1 << 25))
    return bool(libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and kept
